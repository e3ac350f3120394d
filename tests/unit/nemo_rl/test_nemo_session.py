"""The order of a run's acts, on every way out, against fakes that write them down."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_rlix.control_plane import keeper
from nemo_rl_rlix.control_plane.protocol import (
    INFER_CLUSTER,
    TRAIN_CLUSTER,
    Priority,
    ProgressReport,
)
from nemo_rl_rlix.errors import (
    DeadlineExceededError,
    GrantRequiredError,
    PipelineClosedError,
    RLixError,
)
from nemo_rl_rlix.nemo_rl import session, train_loop
from nemo_rl_rlix.nemo_rl.demand_hooks import CollectorHooks, repeat_demand
from nemo_rl_rlix.nemo_rl.session import Host, Parts, Session, State
from nemo_rl_rlix.settings import Deadlines, RLixSettings
from nemo_rl_rlix.shards.protocol import MemoryReport
from nemo_rl_rlix.topology import validate_topology

POLICY = object()


class World:
    """Writes down what is asked of the scheduler, the coordinator and the trainer."""

    def __init__(self) -> None:
        self.acts: list[str] = []
        self.broken: dict[str, BaseException] = {}
        self.reports: list[ProgressReport | None] = []

    def act(self, name: str) -> None:
        self.acts.append(name)
        if name in self.broken:
            raise self.broken[name]

    # Control plane

    def request_gpus(self, cluster: str, priority: Priority, **more: Any) -> list[int]:
        self.act(f"request {cluster} {priority.name}")
        return [0]

    def release_gpus(self, cluster: str, **more: Any) -> None:
        self.act(f"release {cluster}")

    def await_release_generation(self, *, timeout_s: float) -> None:
        self.act("await release")

    def unregister(self) -> None:
        self.act("unregister")

    def report_progress(self, report: ProgressReport) -> None:
        self.reports.append(report)

    def clear_progress(self) -> None:
        self.reports.append(None)

    # Trainer

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> Any:
        self.act(f"cache {step}")
        return "handle"

    def onload(self, *, timeout_s: float) -> None:
        self.act("onload")

    def offload(self, *, timeout_s: float) -> MemoryReport:
        self.act("offload")
        return MemoryReport(0, 0)

    def end(self, *, timeout_s: float) -> None:
        self.act("end trainer")

    # Cluster

    def release(self) -> None:
        self.act("release cluster")

    # Coordinator, through `call`

    def call(self, handle: Any, method: str, *args: Any, timeout_s: float) -> Any:
        assert timeout_s > 0
        if method == "begin_cache_build":
            return 0
        if method == "commit_cache":
            return None
        self.act(" ".join([method, *map(str, args)]))
        return None

    def take(self) -> list[str]:
        acts, self.acts = self.acts, []
        return acts


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(session, "call", made.call)
    monkeypatch.setattr(keeper, "call", made.call)
    return made


@pytest.fixture
def make(world: World) -> Iterator[Callable[..., Session]]:
    def build(**more: Any) -> Session:
        plane: Any = world
        parts = Parts(
            pipeline_id="p",
            settings=RLixSettings(
                deadlines=Deadlines(
                    grant_s=1, build_s=0.2, cache_build_s=0.1, offload_s=0.1, control_s=1
                ),
                heartbeat_s=0.01,
            ),
            topology=validate_topology(
                train_device_mapping=[0],
                infer_device_mapping=[0, 1],
                infer_tp=1,
                num_gpus=2,
                gpus_per_node=2,
            ),
            control_plane=plane,
            coordinator=SimpleNamespace(),
            cluster=plane,
            host=Host(
                make_shards=lambda pipeline, ranks: {}, make_trainer=lambda policy, run: plane
            ),
            **more,
        )
        made = Session(parts)
        session.make_current(made)
        return made

    yield build
    session._current = None


def build_trainer(run: Session) -> None:
    with run.trainer_turn():
        run.bind_trainer(POLICY)


def build(run: Session, world: World) -> None:
    build_trainer(run)
    with run.build_turn():
        pass
    run.built()
    run.start_generation()
    world.take()


def test_the_trainer_leaves_its_gpus_before_the_engines_come(
    world: World, make: Callable[..., Session]
) -> None:
    run = make(first_step=3)
    entered = threading.Event()

    def engines() -> None:
        with run.build_turn():
            entered.set()
            world.act("engines")

    thread = threading.Thread(target=engines)
    thread.start()
    assert not entered.wait(0.05)
    with run.trainer_turn():
        world.act("trainer")
        run.bind_trainer(POLICY)
        assert not entered.wait(0.05)
    thread.join(5)
    run.built()
    run.start_generation()
    run.start_generation()
    assert world.take() == [
        f"request {TRAIN_CLUSTER} INITIALIZATION",
        "trainer",
        "cache 3",
        "offload",
        "refresh_and_publish 3",
        "offload",
        f"release {TRAIN_CLUSTER}",
        f"request {INFER_CLUSTER} INITIALIZATION",
        "engines",
        "build_shards",
        f"release {INFER_CLUSTER}",
        f"request {INFER_CLUSTER} GENERATION",
    ]


def test_a_trainer_that_cannot_be_built_ends_the_other_thread_too(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    with pytest.raises(RuntimeError, match="no room"), run.trainer_turn():
        raise RuntimeError("no room")
    assert world.take()[-1] == f"release {TRAIN_CLUSTER}"
    with pytest.raises(PipelineClosedError, match="no room"), run.build_turn():
        pytest.fail("built engines")
    assert world.take() == []


def test_engines_do_not_wait_for_ever(world: World, make: Callable[..., Session]) -> None:
    run = make()
    with pytest.raises(DeadlineExceededError, match="build of the trainer"), run.build_turn():
        pytest.fail("built engines")


def test_engines_that_cannot_be_built_give_their_gpus_back(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    build_trainer(run)
    world.take()
    world.broken["build_shards"] = RLixError("broken")
    with pytest.raises(RLixError, match="broken"), run.build_turn():
        pass
    assert world.take()[-1] == f"release {INFER_CLUSTER}"
    assert isinstance(run.failure, RLixError)


def test_a_step_is_one_grant(world: World, make: Callable[..., Session]) -> None:
    run = make(first_step=4)
    build(run, world)
    run.before_training()
    run.before_training()
    run.require_grant("train")
    run.after_training()
    assert run.step == 5
    assert world.take() == [
        f"request {TRAIN_CLUSTER} ACTOR_TRAINING",
        "onload",
        "onload",
        "cache 5",
        "offload",
        "refresh_and_publish 5",
        "offload",
        f"release {TRAIN_CLUSTER}",
    ]
    with pytest.raises(GrantRequiredError, match="may not train"):
        run.require_grant("train")
    assert isinstance(run.failure, GrantRequiredError)


def test_a_step_that_fails_releases_and_does_not_count(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    build(run, world)
    run.before_training()
    world.broken["cache 1"] = RLixError("no memory")
    with pytest.raises(RLixError, match="no memory"):
        run.after_training()
    assert run.step == 0
    assert f"release {TRAIN_CLUSTER}" in world.take()
    assert str(run.failure) == "no memory"


def test_a_save_outside_of_a_step_has_a_grant_of_its_own(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    build(run, world)
    with run.grant():
        world.act("save")
    assert world.take() == [
        f"request {TRAIN_CLUSTER} ACTOR_TRAINING",
        "onload",
        "save",
        "offload",
        f"release {TRAIN_CLUSTER}",
    ]
    run.before_training()
    world.take()
    with run.grant():
        world.act("save")
    assert world.take() == ["save"]


def test_the_pipeline_is_unregistered_before_anything_ends(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    build(run, world)
    run.leave()
    run.leave()
    assert world.take() == ["await release", "unregister"]
    assert run.state is State.LEFT
    run.close()
    run.close()
    assert world.take() == ["close", "release cluster"]
    assert run.state is State.CLOSED
    with pytest.raises(PipelineClosedError):
        run.before_training()


@pytest.mark.parametrize("broken", ["await release", "unregister", "close"])
def test_nothing_stops_the_end(world: World, make: Callable[..., Session], broken: str) -> None:
    run = make()
    build(run, world)
    world.broken[broken] = RLixError("gone")
    run.close()
    assert world.take() == ["await release", "unregister", "close", "release cluster"]


def test_an_end_inside_of_a_step_frees_the_training_gpus_first(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    build(run, world)
    run.before_training()
    world.take()
    run.close()
    acts = world.take()
    assert acts.index("offload") < acts.index(f"release {TRAIN_CLUSTER}")
    assert acts.index(f"release {TRAIN_CLUSTER}") < acts.index("unregister")
    assert "end trainer" not in acts


def test_a_trainer_that_does_not_let_go_is_ended(
    world: World, make: Callable[..., Session]
) -> None:
    run = make()
    build(run, world)
    run.before_training()
    world.take()
    world.broken["offload"] = RLixError("busy")
    run.close()
    acts = world.take()
    assert acts.index("end trainer") < acts.index(f"release {TRAIN_CLUSTER}")
    assert acts.count("offload") == 1


def test_one_driver_runs_one_pipeline(make: Callable[..., Session], world: World) -> None:
    run = make()
    assert session.current() is run and session.find() is run
    with pytest.raises(RLixError, match="is still open"):
        make()
    run.close()
    assert make() is session.current()


def test_without_a_run_there_is_no_session() -> None:
    assert session.find() is None
    with pytest.raises(RLixError, match="no time-shared run"):
        session.current()


# -- the loop around it ------------------------------------------------------------


def test_the_loop_is_closed_when_it_returns(world: World, make: Callable[..., Session]) -> None:
    run = make()
    loop = train_loop.guard(lambda *args, **kwargs: (args, kwargs))
    assert loop(1, a=2) == ((1,), {"a": 2})
    assert run.state is State.CLOSED


def test_the_loop_is_closed_when_it_raises(world: World, make: Callable[..., Session]) -> None:
    run = make()

    def broken() -> None:
        raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        train_loop.guard(broken)()
    assert run.state is State.CLOSED


def test_a_swallowed_error_comes_out(world: World, make: Callable[..., Session]) -> None:
    run = make()

    def swallows() -> None:
        run.fail(RLixError("the hand-over failed"))

    with pytest.raises(RLixError, match="the hand-over failed"):
        train_loop.guard(swallows)()
    assert run.state is State.CLOSED


def test_validation_is_demand_while_it_runs(world: World, make: Callable[..., Session]) -> None:
    run = make(validation_samples=7)
    seen: list[Any] = []

    def validate() -> str:
        done = threading.Event()
        for _ in range(200):
            if len(world.reports) >= 2:
                break
            done.wait(0.01)
        seen.extend(world.reports)
        return "metrics"

    counted = train_loop.count_validation(validate)
    assert counted() == "metrics" and seen == []  # not running yet
    run.built()
    assert counted() == "metrics"
    assert [(r.step_target_trajectories, r.completed) for r in seen][:2] == [(7, 0), (7, 0)]
    assert world.reports[-1] is None


def test_validation_demand_is_withdrawn_after_an_error(world: World) -> None:
    plane: Any = world
    hooks = CollectorHooks("p", plane)
    with pytest.raises(RuntimeError), repeat_demand(hooks, 3, interval_s=10):
        raise RuntimeError
    assert world.reports[-1] is None


def test_collector_hooks_travel_and_say_nothing_without_a_target() -> None:
    class Plane:
        def report_progress(self, report: ProgressReport) -> None:
            reports.append(report)

    reports: list[ProgressReport] = []
    plane: Any = Plane()
    hooks = CollectorHooks("p", plane)
    hooks.report_progress(5, 0)
    hooks.report_progress(9, 4)
    assert [(r.step_target_trajectories, r.completed) for r in reports] == [(4, 4)]
    assert pickle.loads(pickle.dumps(CollectorHooks("p", None))).pipeline_id == "p"  # type: ignore[arg-type]
