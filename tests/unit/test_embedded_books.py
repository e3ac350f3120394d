"""Bookkeeping, event log and messenger of the embedded control plane, without Ray."""

from __future__ import annotations

import threading
import time

import pytest

from nemo_rl_rlix.control_plane.embedded.books import Books, RequestRefusedError
from nemo_rl_rlix.control_plane.embedded.events import EventKind, EventLog
from nemo_rl_rlix.control_plane.embedded.messenger import Messenger
from nemo_rl_rlix.control_plane.embedded.planner import make_plan, validate_plan
from nemo_rl_rlix.control_plane.protocol import PipelineSpec, Priority, ProgressReport
from nemo_rl_rlix.errors import DeadlineExceededError, PipelineClosedError

INIT, TRAIN, GEN = Priority.INITIALIZATION, Priority.ACTOR_TRAINING, Priority.GENERATION


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def spec(pid: str, infer=(0, 1), train=(0,)) -> PipelineSpec:
    return PipelineSpec(
        pid,
        f"{pid}_ns",
        {"actor_infer": tuple(infer), "actor_train": tuple(train), "reward": ()},
        {"actor_infer": 1, "actor_train": 1, "reward": 1},
    )


@pytest.fixture
def books():
    made = Books(2, Clock(), EventLog())
    for pid in ("a", "b"):
        made.register(spec(pid), heartbeat_s=2, resize_s=100)
    return made


def carry_out(books):
    """One planning cycle whose resizes end at once."""
    snapshot = books.snapshot()
    plan = make_plan(snapshot)
    validate_plan(snapshot, plan)
    books.keep_promises(plan)
    for ranks_of, shrink in ((plan.shrinks, True), (plan.expands, False)):
        for pid, ranks in ranks_of.items():
            books.resize_started(pid, ranks, shrink=shrink)
            books.resize_ended(books.record(pid), ranks, shrink=shrink, seconds=0.5)
    for grant in plan.grants:
        books.grant(grant)
    return plan


def test_demand_is_the_last_report_and_what_was_asked_for_after_it(books):
    a = books.record("a")
    assert a.demand is None
    books.request(a, "actor_infer", GEN, 8)
    assert a.demand == 8
    books.report(a, ProgressReport("a", 10, 4, 0.0))
    assert a.demand == 6, "a report replaces the estimate"
    books.clear_progress(a)
    assert a.demand == 0
    books.report(a, ProgressReport("a", 10, 12, 0.0))
    assert a.demand == 0


def test_request_without_estimate_is_unknown_demand_not_none(books):
    a = books.record("a")
    books.clear_progress(a)
    books.request(a, "actor_infer", GEN, None)
    assert a.demand is None
    carry_out(books)
    carry_out(books)
    assert a.generation_granted
    assert a.active == {0, 1}


def test_withdrawn_generation_request_gives_back_what_came_meanwhile(books):
    a = books.record("a")
    books.request(a, "actor_infer", GEN, 8)
    books.resize_started("a", (0,), shrink=False)
    assert books.withdraw(a, "actor_infer")
    assert not books.withdraw(a, "actor_infer")
    books.resize_ended(a, (0,), shrink=False, seconds=0.1)
    assert carry_out(books).shrinks == {"a": (0,)}
    assert carry_out(books).empty


def test_release_of_generation_while_a_resize_runs_is_refused(books):
    a = books.record("a")
    books.request(a, "actor_infer", GEN, 8)
    carry_out(books)
    carry_out(books)
    books.resize_started("a", (0,), shrink=True)
    with pytest.raises(RequestRefusedError, match="await_release_gpus"):
        books.release(a, "actor_infer")
    books.resize_ended(a, (0,), shrink=True, seconds=0.1)
    books.release(a, "actor_infer")
    assert not a.resident and not a.wants_generation
    with pytest.raises(RequestRefusedError, match="holds nothing"):
        books.release(a, "actor_infer")


@pytest.mark.parametrize(
    ("cluster", "priority", "message"),
    [
        ("actor_infer", TRAIN, "Use GENERATION"),
        ("actor_infer", INIT, "Release generation first"),
        ("actor_train", GEN, "Use actor_infer"),
        ("actor_train", INIT, "held at ACTOR_TRAINING"),
    ],
)
def test_requests_that_do_not_fit(books, cluster, priority, message):
    a = books.record("a")
    books.request(a, "actor_infer", GEN, 8)
    carry_out(books)
    books.request(a, "actor_train", TRAIN, None)
    for _ in range(3):
        carry_out(books)
    assert a.held == {"actor_train": TRAIN}
    with pytest.raises(RequestRefusedError, match=message):
        books.request(a, cluster, priority, None)


def test_unregistered_names_are_refused_at_the_door(books):
    with pytest.raises(RequestRefusedError, match="Use one of: actor_infer, actor_train"):
        books.resolve("a_reward")
    with pytest.raises(PipelineClosedError, match="no registered pipeline"):
        books.resolve("ghost_actor_train")
    with pytest.raises(RequestRefusedError, match="registered already"):
        books.register(spec("a"), heartbeat_s=2, resize_s=100)
    books.register(spec("a_actor"), heartbeat_s=2, resize_s=100)
    assert books.resolve("a_actor_infer")[0].spec.pipeline_id == "a"
    assert books.resolve("a_actor_actor_infer")[0].spec.pipeline_id == "a_actor"


def test_one_namespace_one_pipeline(books):
    twin = PipelineSpec("c", "a_ns", {"actor_infer": (0,)}, {"actor_infer": 1})
    with pytest.raises(RequestRefusedError, match="belongs to a"):
        books.register(twin, heartbeat_s=2, resize_s=100)


def test_gpus_of_an_ended_pipeline_come_back_only_when_recovered(books):
    a, b = books.record("a"), books.record("b")
    books.request(a, "actor_infer", GEN, 8)
    carry_out(books)
    assert books.occupied_by(a) == {0, 1}
    books.close("a", "it was evicted: test", lost=books.occupied_by(a))
    books.request(b, "actor_infer", GEN, 8)
    assert carry_out(books).empty
    with pytest.raises(PipelineClosedError, match="evicted: test"):
        books.resolve("a_actor_train")
    with pytest.raises(RequestRefusedError):
        books.register(spec("a"), heartbeat_s=2, resize_s=100)
    books.recover("a", {0})
    assert carry_out(books).expands == {"b": (0,)}
    books.recover("a")
    carry_out(books)
    assert b.active == {0, 1}
    books.register(spec("a"), heartbeat_s=2, resize_s=100)


def test_clocks_of_turns(books):
    a = books.record("a")
    books.request(a, "actor_infer", GEN, 8)
    books.snapshot()
    assert a.waiting_since == 100
    carry_out(books)
    books._clock.now = 110.0
    books.snapshot()
    assert a.waiting_since is None
    books._clock.now = 130.0
    books.resize_started("a", (0, 1), shrink=True)
    books.snapshot()
    assert (a.served_since, a.served_s, a.waiting_since) == (None, 20.0, 130.0)


def test_silence_is_counted_in_heartbeats(books):
    assert books.silent(109.9, 5) == []
    books.record("b").last_seen = 105.0
    assert books.silent(110.5, 5) == [("a", 10.5)]


def test_event_log_is_bounded_and_numbered():
    log = EventLog(capacity=3, clock=Clock())
    for _ in range(5):
        log.add(EventKind.GRANT, "a")
    assert [event.number for event in log.since(0)] == [3, 4, 5]
    assert [event.number for event in log.since(4)] == [5]
    assert log.since(5) == []


# --- messenger -----------------------------------------------------------


def wait_for(condition):
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_newest_report_wins_while_the_control_plane_is_slow():
    sent, go = [], threading.Event()

    def send(report):
        go.wait(5)
        sent.append(report)

    messenger = Messenger(send, lambda: None, None)
    first = ProgressReport("a", 100, 0, 0.0)
    messenger.post(first)
    wait_for(lambda: not messenger._unsent)
    begin = time.monotonic()
    for done in range(1, 100):
        messenger.post(ProgressReport("a", 100, done, 0.0))
    messenger.post(None)
    assert time.monotonic() - begin < 0.5
    go.set()
    wait_for(lambda: len(sent) == 2)
    assert sent == [first, None]
    messenger.stop(5)


def test_heartbeats_go_on_until_stopped():
    beats = []
    messenger = Messenger(lambda _: None, lambda: beats.append(1), 0.01)
    wait_for(lambda: len(beats) > 3)
    messenger.stop(5)
    count = len(beats)
    time.sleep(0.05)
    assert len(beats) == count


def test_slow_answer_is_forgiven_and_a_lost_pipeline_is_told():
    answers = [DeadlineExceededError("report", 1), PipelineClosedError("evicted")]

    def send(_):
        raise answers.pop(0)

    messenger = Messenger(send, lambda: None, None)
    messenger.post(None)
    wait_for(lambda: len(answers) == 1)
    messenger.post(None)
    wait_for(lambda: not answers and not messenger._thread.is_alive())
    with pytest.raises(PipelineClosedError, match="evicted"):
        messenger.post(None)
