"""The coordinator without Ray: what the scheduler, the trainer and routers call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from fakes.pipeline import SHORT, wait_until
from fakes.shard import DIE, HANG, LEAVE, FakeShard, cache_handle

from nemo_rl_rlix.control_plane.coordinator import (
    CONCURRENCY_GROUPS,
    CoordinatorPlan,
    PipelineCoordinator,
)
from nemo_rl_rlix.control_plane.protocol import ActionResponse
from nemo_rl_rlix.errors import (
    CacheNotReadyError,
    ControlPlaneLostError,
    DeadlineExceededError,
    ShardFailedError,
)
from nemo_rl_rlix.settings import RLixSettings


@dataclass
class Guard:
    """A book of devices that remembers what it was told."""

    granted: set[int] = field(default_factory=set)
    log: list[str] = field(default_factory=list)

    def grant(self, dp_rank: int) -> None:
        self.granted.add(dp_rank)
        self.log.append(f"grant {dp_rank}")

    def revoke(self, dp_rank: int) -> None:
        self.granted.discard(dp_rank)
        self.log.append(f"revoke {dp_rank}")


@dataclass
class Beats:
    """A control plane that counts heartbeats and may fail them."""

    count: int = 0
    errors: list[Exception] = field(default_factory=list)

    def heartbeat(self) -> None:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)


@dataclass
class World:
    coordinator: PipelineCoordinator
    shards: dict[int, FakeShard]
    guard: Guard

    @property
    def states(self) -> dict[int, str]:
        return self.coordinator.status().routing.states

    def store(self, version: int) -> None:
        slot = self.coordinator.begin_cache_build()
        self.coordinator.commit_cache(cache_handle(version, slot=slot))

    def start(self, *ranks: int) -> None:
        self.coordinator.build_shards()
        self.store(0)
        self.coordinator.resize_infer(dp_ranks_to_remove=[], dp_ranks_to_add=list(ranks))


@contextmanager
def coordinated(heartbeat_s: float = 0.02) -> Iterator[World]:
    shards = {rank: FakeShard(rank) for rank in (0, 1)}
    guard = Guard()
    plan = CoordinatorPlan(
        pipeline_id="p",
        settings=RLixSettings(heartbeat_s=heartbeat_s, deadlines=SHORT),
        shard_gpus={0: (0,), 1: (1,)},
        make_shards=lambda: shards,
        make_guard=lambda: guard,
    )
    coordinator = PipelineCoordinator(plan)
    try:
        yield World(coordinator, shards, guard)
    finally:
        coordinator.close()
        for shard in shards.values():
            shard.close()


def test_shards_are_built_under_a_grant_and_end_asleep_without_one() -> None:
    with coordinated() as w:
        seen: list[set[int]] = []
        for shard in w.shards.values():
            shard.before["build"] = lambda: seen.append(set(w.guard.granted))
        w.coordinator.build_shards()
        assert seen == [{0, 1}, {0, 1}]
        assert w.states == {0: "ASLEEP", 1: "ASLEEP"}
        assert w.guard.granted == set()


def test_a_resize_grants_before_the_first_call_and_revokes_after_the_last() -> None:
    with coordinated() as w:
        w.start()
        seen: list[tuple[str, bool]] = []
        for call in ("close_admission", "wake_weights", "sleep"):
            w.shards[0].before[call] = lambda call=call: seen.append((call, 0 in w.guard.granted))
        assert w.coordinator.resize_infer([], [0]) == ActionResponse(success=True)
        assert w.states == {0: "ACTIVE", 1: "ASLEEP"}
        w.coordinator.resize_infer(dp_ranks_to_remove=[0], dp_ranks_to_add=[])
        assert w.states == {0: "ASLEEP", 1: "ASLEEP"}
        assert 0 not in w.guard.granted
        assert seen and all(granted for _, granted in seen)


@pytest.mark.parametrize(
    ("remove", "add", "states"),
    [
        ([], [], {0: "ACTIVE", 1: "ASLEEP"}),
        ([0, 0], [], {0: "ASLEEP", 1: "ASLEEP"}),
        ([1], [], {0: "ACTIVE", 1: "ASLEEP"}),
        ([], [0, 0], {0: "ACTIVE", 1: "ASLEEP"}),
        ([7], [8], {0: "ACTIVE", 1: "ASLEEP"}),
        ([0], [1], {0: "ASLEEP", 1: "ACTIVE"}),
        ([0], [0], {0: "ACTIVE", 1: "ASLEEP"}),
    ],
)
def test_resizes_that_ask_for_little_or_nothing(
    remove: list[int], add: list[int], states: dict[int, str]
) -> None:
    with coordinated() as w:
        w.start(0)
        w.coordinator.resize_infer(remove, add)
        assert w.states == states
        assert w.guard.granted == {rank for rank, state in states.items() if state == "ACTIVE"}


def test_an_engine_that_fails_a_resize_does_not_fail_the_resize() -> None:
    with coordinated() as w:
        w.start(0, 1)
        w.shards[0].faults["drain"] = [HANG]
        assert w.coordinator.resize_infer([0], []).success
        assert w.states[0] == "FAILED"
        assert "drain" in w.coordinator.status().cause_of_failures[0]
        w.shards[0].faults["build"] = [DIE]
        assert w.coordinator.resize_infer([], [0]).success
        wait_until(lambda: w.states[0] == "ACTIVE")
        assert w.coordinator.status().failures == 2


def test_only_memory_that_cannot_be_got_back_fails_a_resize() -> None:
    with coordinated() as w:
        w.start(0)
        w.shards[0].faults |= {"sleep": [LEAVE], "kill": [LEAVE]}
        with pytest.raises(ShardFailedError, match="still holds"):
            w.coordinator.resize_infer([0], [])
        assert 0 in w.guard.granted  # not handed over


def test_resizes_after_the_end_are_no_faults_and_leave_no_grant() -> None:
    with coordinated() as w:
        w.start(0, 1)
        w.coordinator.close()
        assert w.coordinator.resize_infer([0], []).success
        assert w.coordinator.resize_infer([], [0, 1]).success
        assert w.guard.granted == set()
        w.coordinator.close()


def test_a_resize_that_crosses_the_end_leaves_no_grant() -> None:
    with coordinated() as w:
        w.start()
        grant = w.guard.grant

        def end_and_grant(dp_rank: int) -> None:
            w.coordinator.close()
            grant(dp_rank)

        w.guard.grant = end_and_grant  # type: ignore[method-assign]
        assert w.coordinator.resize_infer([], [0]).success
        assert w.guard.log[-2:] == ["grant 0", "revoke 0"]
        assert w.guard.granted == set()


def test_versions_go_from_the_cache_to_the_shards() -> None:
    with coordinated() as w:
        w.start(0)
        with pytest.raises(CacheNotReadyError):
            w.coordinator.refresh_and_publish(1)
        w.store(1)
        assert w.coordinator.status().routing.published_version == 0
        report = w.coordinator.refresh_and_publish(1)
        assert [outcome.state for outcome in report.outcomes] == ["ACTIVE"]
        routing = w.coordinator.status().routing
        assert (routing.published_version, routing.weights_versions[0]) == (1, 1)


def test_a_build_that_is_given_up_leaves_the_earlier_version_readable() -> None:
    with coordinated() as w:
        w.start()
        slot = w.coordinator.begin_cache_build()
        w.coordinator.abort_cache(slot)
        w.coordinator.resize_infer([], [0])
        assert w.states[0] == "ACTIVE"
        assert w.coordinator.begin_cache_build() == slot


def test_a_poll_ends_with_a_resize() -> None:
    with coordinated() as w:
        w.start()
        epoch = w.coordinator.status().routing.epoch
        timer = threading.Timer(0.03, w.coordinator.resize_infer, ([], [1]))
        timer.start()
        assert w.coordinator.poll(epoch, 5.0).epoch > epoch
        timer.join()


def test_polls_have_threads_of_their_own() -> None:
    group = PipelineCoordinator.poll.__ray_concurrency_group__
    assert group != PipelineCoordinator.resize_infer.__ray_concurrency_group__
    methods = [getattr(PipelineCoordinator, name) for name in dir(PipelineCoordinator)]
    groups = [getattr(method, "__ray_concurrency_group__", None) for method in methods]
    assert groups.count(group) == 1
    assert {name for name in groups if name} == set(CONCURRENCY_GROUPS)


def test_a_hung_engine_does_not_silence_the_heartbeat() -> None:
    """The scheduler ends a pipeline that is silent for five intervals."""
    with coordinated() as w:
        w.start(0)
        hanging = threading.Event()
        w.shards[0].before["ping"] = lambda: hanging.wait(5)
        beats = Beats()
        w.coordinator.attach(beats)
        wait_until(lambda: "ping" in w.shards[0].calls)
        before = beats.count
        wait_until(lambda: beats.count >= before + 5, 2.0)
        hanging.set()


def test_dead_shards_are_found_without_a_request() -> None:
    with coordinated() as w:
        w.start(0, 1)
        w.coordinator.attach(Beats())
        w.shards[1].faults["ping"] = [DIE]
        wait_until(lambda: w.coordinator.status().failures == 1)
        wait_until(lambda: w.states[1] == "ACTIVE")


def test_late_answers_of_the_control_plane_are_borne() -> None:
    with coordinated() as w:
        w.start(0)
        beats = Beats(errors=[DeadlineExceededError("heartbeat", 1.0)])
        w.coordinator.attach(beats)
        w.coordinator.attach(beats)  # once is enough
        wait_until(lambda: beats.count >= 3)
        assert w.coordinator.status().routing.failure == ""


@pytest.mark.parametrize("error", [ControlPlaneLostError("gone"), TypeError("gone")])
def test_a_control_plane_that_is_gone_ends_the_waits_with_the_cause(error: Exception) -> None:
    with coordinated() as w:
        w.start(0)
        w.coordinator.attach(Beats(errors=[error]))
        wait_until(lambda: "gone" in w.coordinator.status().routing.failure)


def test_switches_are_counted_in_both_directions() -> None:
    with coordinated() as w:
        w.start(0)
        w.shards[0].before["sleep"] = lambda: time.sleep(0.03)
        w.shards[0].before["probe"] = lambda: time.sleep(0.03)
        w.coordinator.resize_infer([0], [])
        w.coordinator.resize_infer([], [0])
        seconds = w.coordinator.status().switch_seconds
        assert [len(values) for values in seconds.values()] == [2, 1]
        assert seconds["switch_out_s"][0] >= 0.03
        assert seconds["switch_in_s"][1] >= 0.03
        assert w.coordinator.status().resizes == 3
