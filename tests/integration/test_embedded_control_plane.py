"""The embedded control plane on real Ray, with coordinators that only pretend."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray

from nemo_rl_rlix.control_plane.embedded.books import RequestRefusedError
from nemo_rl_rlix.control_plane.embedded.client import (
    EmbeddedControlPlane,
    connect_scheduler,
    shutdown_scheduler,
)
from nemo_rl_rlix.control_plane.embedded.events import EventKind
from nemo_rl_rlix.control_plane.protocol import (
    PipelineSpec,
    Priority,
    ProgressReport,
    coordinator_name,
    pipeline_namespace,
)
from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    PipelineClosedError,
    SettingError,
)
from nemo_rl_rlix.settings import Deadlines, RLixSettings

pytestmark = pytest.mark.ray

INIT, TRAIN, GEN = Priority.INITIALIZATION, Priority.ACTOR_TRAINING, Priority.GENERATION
PATIENT = RLixSettings(deadlines=Deadlines(resize_s=30, control_s=10))


class DummyCoordinator:
    """Records the resizes; slow or failing on request."""

    def __init__(self, delay_s: float = 0.0, fails: bool = False) -> None:
        self.delay_s = delay_s
        self.fails = fails
        self.calls: list[tuple[str, list[int]]] = []

    def resize_infer(self, dp_ranks_to_remove: list[int], dp_ranks_to_add: list[int]) -> None:
        assert bool(dp_ranks_to_remove) != bool(dp_ranks_to_add)
        time.sleep(self.delay_s)
        if self.fails:
            raise RuntimeError("cannot map memory")
        self.calls.append(
            ("-", dp_ranks_to_remove) if dp_ranks_to_remove else ("+", dp_ranks_to_add)
        )

    def seen(self) -> list[tuple[str, list[int]]]:
        return self.calls

    def become(self, delay_s: float, fails: bool) -> None:
        self.delay_s, self.fails = delay_s, fails


class Pipelines:
    """Makes pipelines of one test and ends them."""

    def __init__(self) -> None:
        self.planes: dict[str, EmbeddedControlPlane] = {}
        self.coordinators: dict[str, ray.actor.ActorHandle] = {}

    def make(self, pid, train=(0,), infer=(0, 1), *, delay_s=0.0, fails=False, settings=PATIENT):
        namespace = pipeline_namespace(pid)
        self.coordinators[pid] = (
            ray.remote(DummyCoordinator)
            .options(name=coordinator_name(pid), namespace=namespace, max_concurrency=4, num_cpus=0)
            .remote(delay_s, fails)
        )
        spec = PipelineSpec(
            pid,
            namespace,
            {"actor_train": tuple(train), "actor_infer": tuple(infer)},
            {"actor_train": 1, "actor_infer": 1},
        )
        plane = EmbeddedControlPlane(spec, settings).connect()
        plane.register(spec)
        self.planes[pid] = plane
        return plane

    def seen(self, pid):
        return ray.get(self.coordinators[pid].seen.remote(), timeout=30)

    def end(self) -> None:
        for pid, plane in self.planes.items():
            plane.unregister()
            ray.kill(self.coordinators[pid])


@pytest.fixture
def pipelines(ray_cluster):
    made = Pipelines()
    yield made
    made.end()


def eventually(condition: Callable[[], bool], within_s: float = 15.0) -> None:
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end, "did not come true"
        time.sleep(0.02)


def progress(pid: str, done: int, target: int) -> ProgressReport:
    return ProgressReport(pid, target, done, time.time())


def test_sequence_of_two_pipelines(pipelines):
    p1, p2 = pipelines.make("p1", train=[0]), pipelines.make("p2", train=[1])
    for plane, gpus in ((p1, [0]), (p2, [1])):
        assert plane.request_gpus("actor_train", INIT) == gpus
        plane.release_gpus("actor_train")
        assert plane.request_gpus("actor_infer", INIT) == [0, 1]
        plane.release_gpus("actor_infer")
    assert pipelines.seen("p1") == pipelines.seen("p2") == []

    assert p1.request_gpus("actor_infer", GEN, step_target_estimate=8) == [0, 1]
    assert pipelines.seen("p1") == [("+", [0, 1])]
    p1.report_progress(progress("p1", 0, 8))
    assert p2.request_gpus("actor_infer", GEN, step_target_estimate=8) == [0]
    assert pipelines.seen("p1")[1:] == [("-", [0])]

    assert p1.request_gpus("actor_train", TRAIN, global_step=1) == [0]
    assert pipelines.seen("p2") == [("+", [0]), ("-", [0])]
    p1.release_gpus("actor_train")
    eventually(lambda: pipelines.seen("p2")[2:] == [("+", [0])])

    p1.await_release_generation(timeout_s=15)
    assert pipelines.seen("p1")[2:] == [("-", [1])]
    eventually(lambda: pipelines.seen("p2")[3:] == [("+", [1])])
    time.sleep(1.2)  # a whole tick later it has not come back by itself
    assert len(pipelines.seen("p1")) == 3
    assert p1.request_gpus("actor_infer", GEN, step_target_estimate=8)

    kinds = [event.kind for event in p1.events() if event.pipeline_id == "p1"]
    assert kinds[:3] == [EventKind.REGISTER, EventKind.REQUEST, EventKind.GRANT]
    assert {EventKind.SHRINK_START, EventKind.SHRINK_END, EventKind.EXPAND_END} <= set(kinds)
    numbers = [event.number for event in p1.events()]
    assert numbers == sorted(set(numbers))
    assert p1.events(numbers[-1]) == []


def test_duplicates_and_no_ops(pipelines):
    p1 = pipelines.make("p1")
    assert p1.request_gpus("actor_train", TRAIN) == [0]
    assert p1.request_gpus("actor_train", TRAIN) == [0], "same priority: what is held"
    with pytest.raises(RequestRefusedError, match="Release it first"):
        p1.request_gpus("actor_train", INIT)
    with pytest.raises(RequestRefusedError, match="only inference generates"):
        p1.request_gpus("actor_train", GEN)
    with pytest.raises(RequestRefusedError, match="Use one of: actor_train, actor_infer"):
        p1.request_gpus("critic", TRAIN)
    with pytest.raises(RequestRefusedError, match="registered already"):
        p1.register(p1.spec)
    p1.release_gpus("actor_train")
    with pytest.raises(RequestRefusedError, match="holds nothing"):
        p1.release_gpus("actor_train")
    p1.await_release_generation(timeout_s=2)  # nothing in place: returns at once
    assert p1.cancel_request("actor_infer") is False
    assert p1.request_gpus("actor_infer", GEN) == [0, 1], "without estimate or progress"
    assert p1.request_gpus("actor_infer", GEN) == [0, 1]
    p1.unregister()
    p1.unregister()
    with pytest.raises(PipelineClosedError, match="it was unregistered"):
        p1.request_gpus("actor_train", TRAIN)
    p1.report_progress(progress("p1", 0, 8))  # late reports of an ended pipeline vanish


def test_registration_needs_the_coordinator(pipelines):
    spec = PipelineSpec(
        "lone", pipeline_namespace("lone"), {"actor_infer": (0,)}, {"actor_infer": 1}
    )
    plane = EmbeddedControlPlane(spec, PATIENT).connect()
    with pytest.raises(SettingError, match="rlix:coordinator:lone"):
        plane.register(spec)
    with pytest.raises(SettingError, match="GPUs \\[7\\] do not exist"):
        pipelines.make("far", infer=[7])


def test_slow_resize_delays_no_unrelated_pipeline(pipelines):
    slow = pipelines.make("slow", train=[], infer=[0], delay_s=3.0)
    quick = pipelines.make("quick", train=[1], infer=[1])
    assert pipelines.seen("slow") == pipelines.seen("quick") == []  # both have started
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(slow.request_gpus, "actor_infer", GEN, step_target_estimate=4)
        eventually(lambda: slow.status()["pipelines"]["slow"]["expanding"] == [0])
        for _ in range(2):
            assert quick.request_gpus("actor_train", TRAIN, timeout_s=10) == [1]
            quick.release_gpus("actor_train")
            assert quick.request_gpus("actor_infer", GEN, step_target_estimate=4) == [1]
            quick.await_release_generation(timeout_s=10)
        assert not waiting.done()
        assert waiting.result(timeout=20) == [0]


@pytest.mark.parametrize("how", ["raises", "hangs", "dies"])
def test_failing_coordinator_ends_its_own_pipeline_only(pipelines, how):
    good = pipelines.make("good", train=[1])
    hurry = PATIENT.model_copy(
        update={"deadlines": Deadlines(resize_s=0.2, kill_s=0.2, control_s=2)}
    )
    bad = pipelines.make("bad", train=[0], settings=hurry)
    shard = (
        ray.remote(DummyCoordinator)
        .options(name="bad_shard", namespace=pipeline_namespace("bad"), num_cpus=0)
        .remote()
    )
    ray.get(shard.seen.remote(), timeout=30)
    assert pipelines.seen("bad") == []  # it has started
    before = good.events()[-1].number
    assert bad.request_gpus("actor_infer", GEN, step_target_estimate=8) == [0, 1]
    coordinator = pipelines.coordinators["bad"]
    if how == "dies":
        ray.kill(coordinator)
    else:
        ray.get(coordinator.become.remote(30.0 if how == "hangs" else 0.0, how == "raises"))
    assert good.request_gpus("actor_infer", GEN, step_target_estimate=8, timeout_s=30)
    eventually(lambda: good.status()["pipelines"]["good"]["active"] == [0, 1])
    with pytest.raises(PipelineClosedError, match="it was evicted: shrink of"):
        bad.request_gpus("actor_train", TRAIN)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(shard.seen.remote(), timeout=15)
    assert "bad" not in good.status()["pipelines"]
    events = good.events(before)
    freed = [e.number for e in events if e.kind is EventKind.EVICTED]
    expands = [
        e.number for e in events if (e.kind, e.pipeline_id) == (EventKind.EXPAND_START, "good")
    ]
    assert len(freed) == 1
    assert expands and min(expands) > freed[0], "no GPU is reused before the actors are gone"


def test_progress_goes_through_while_many_wait(pipelines):
    holder = pipelines.make("holder", train=[0, 1])
    assert holder.request_gpus("actor_train", TRAIN) == [0, 1]
    crowd = [pipelines.make(f"w{i}", train=[0]) for i in range(9)]
    with ThreadPoolExecutor(18) as pool:
        waits = [pool.submit(p.request_gpus, "actor_train", TRAIN) for p in crowd]
        waits += [
            pool.submit(p.request_gpus, "actor_infer", GEN, step_target_estimate=2) for p in crowd
        ]
        eventually(lambda: holder.status()["waiting_calls"] == 18)
        begin = time.monotonic()
        for done in range(20):
            holder.report_progress(progress("holder", done, 20))
        assert time.monotonic() - begin < 0.5, "reports do not block"
        with pytest.raises(RequestRefusedError, match="waiting already"):
            crowd[0].request_gpus("actor_train", TRAIN)
        with pytest.raises(DeadlineExceededError, match="is held by holder_actor_train"):
            pipelines.make("late", train=[1]).request_gpus("actor_train", INIT, timeout_s=0.3)
        demand = holder.status()["pipelines"]["holder"]["demand"]
        assert demand is None or demand >= 1
        assert crowd[0].cancel_request("actor_train")
        with pytest.raises(PipelineClosedError, match="cancelled"):
            waits[0].result(timeout=15)
        for plane in crowd:
            plane.unregister()
        for wait in waits:
            with pytest.raises(PipelineClosedError):
                wait.result(timeout=15)


def test_silent_pipeline_is_evicted_and_its_gpus_return(pipelines):
    brief = PATIENT.model_copy(update={"heartbeat_s": 0.3})
    silent = pipelines.make("silent", train=[0], settings=brief)
    other = pipelines.make("other", train=[0])
    assert silent.request_gpus("actor_train", TRAIN) == [0]
    copy = pickle.loads(pickle.dumps(silent))
    silent._stop_messenger()  # as if the driver had died
    assert other.request_gpus("actor_train", TRAIN, timeout_s=20) == [0]
    with pytest.raises(PipelineClosedError, match="no heartbeat for"):
        copy.release_gpus("actor_train")
    assert "other" in other.status()["pipelines"], "its own heartbeats keep it"


def test_release_waits_for_a_resize_that_is_running(pipelines):
    plane = pipelines.make("p", delay_s=0.5)
    with ThreadPoolExecutor(2) as pool:
        asking = pool.submit(plane.request_gpus, "actor_infer", GEN, step_target_estimate=4)
        eventually(lambda: plane.status()["pipelines"]["p"]["expanding"] == [0, 1])
        plane.await_release_generation(timeout_s=15)
        assert pipelines.seen("p") == [("+", [0, 1]), ("-", [0, 1])]
        with pytest.raises(PipelineClosedError, match="stopped generating"):
            asking.result(timeout=15)


def test_drivers_share_one_scheduler_and_learn_of_its_end(ray_cluster, pipelines):
    with ThreadPoolExecutor(4) as pool:
        handles = list(pool.map(lambda _: connect_scheduler(), range(4)))
    assert len({handle._actor_id for handle in handles}) == 1
    plane = pipelines.make("p")
    with ThreadPoolExecutor(1) as pool:
        assert plane.request_gpus("actor_train", TRAIN) == [0]
        waiting = pool.submit(plane.request_gpus, "actor_infer", INIT)
        eventually(lambda: plane.status()["waiting_calls"] == 1)
        shutdown_scheduler(handles[0])
        with pytest.raises(ControlPlaneLostError):
            waiting.result(timeout=15)
    with pytest.raises(ControlPlaneLostError):
        plane.status()
    pipelines.planes.clear()
    with pytest.raises(ControlPlaneLostError, match="create=True"):
        connect_scheduler(create=False)
