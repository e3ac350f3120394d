from __future__ import annotations

import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from trajectories import group

from nemo_rl_rlix.errors import DeadlineExceededError, PipelineClosedError
from nemo_rl_rlix.reference.buffer import (
    BufferSnapshot,
    BufferStats,
    DuplicateGroupError,
    ReplayBuffer,
    Reservation,
    StaleGroupError,
    group_name,
)
from nemo_rl_rlix.reference.trajectory import UnfinishedTrajectoryError


def reserve_all(buffer: ReplayBuffer, version: int) -> list[Reservation]:
    reservations = []
    while (reservation := buffer.reserve(version)) is not None:
        reservations.append(reservation)
    return reservations


def push(buffer: ReplayBuffer, reservation: Reservation) -> None:
    buffer.push(reservation, group(reservation.group_id, reservation.target_version))


@pytest.mark.parametrize(
    ("version", "max_age", "end", "targets"),
    [
        (0, 0, None, {0}),
        (0, 2, None, {0, 1, 2}),
        (3, 1, None, {0, 1, 2, 3, 4}),
        (1, 2, 3, {0, 1, 2}),
        (0, 5, 1, {0}),
    ],
)
def test_targets_that_may_be_filled(
    version: int, max_age: int, end: int | None, targets: set[int]
) -> None:
    buffer = ReplayBuffer(2, 2, max_age, end_version=end)
    reservations = reserve_all(buffer, version)
    assert {r.target_version for r in reservations} == targets
    assert len(reservations) == 2 * len(targets) == buffer.progress(version)[1]
    assert [r.target_version for r in reservations] == sorted(
        r.target_version for r in reservations
    )


def test_a_failed_group_comes_back_first_under_its_own_target() -> None:
    buffer = ReplayBuffer(2, 2, 1)
    first, *rest = reserve_all(buffer, 0)
    buffer.fail(first)
    again = buffer.reserve(0)
    assert again == Reservation(first.group_id, first.target_version, first.index, 1)
    for reservation in (again, *rest):
        push(buffer, reservation)
    assert [g.group_id for g in buffer.sample(0, timeout_s=0.1)] == ["v0-g0", "v0-g1"]


def test_a_reservation_is_good_once() -> None:
    buffer = ReplayBuffer(1, 2, 0)
    first = buffer.reserve(0)
    assert first is not None
    buffer.fail(first)
    second = buffer.reserve(0)
    assert second is not None
    with pytest.raises(DuplicateGroupError):
        push(buffer, first)  # the attempt that failed comes in late
    push(buffer, second)
    for late in (lambda: push(buffer, second), lambda: buffer.fail(second)):
        with pytest.raises(DuplicateGroupError):
            late()
    assert len(buffer.sample(0, timeout_s=0.1)) == 1
    with pytest.raises(DuplicateGroupError, match="sampled"):
        push(buffer, second)
    assert buffer.stats == BufferStats(reserved=2, pushed=1, failed=1, refused=4, sampled=1)


def test_what_must_not_be_trained_on_is_refused_and_can_be_made_anew() -> None:
    buffer = ReplayBuffer(1, 2, 1)
    buffer.reserve(0)
    reservation = buffer.reserve(0)
    assert reservation is not None and reservation.target_version == 1
    name = reservation.group_id
    with pytest.raises(UnfinishedTrajectoryError, match="abort"):
        buffer.push(reservation, group(name, 1, finish="abort"))
    with pytest.raises(StaleGroupError):
        buffer.push(reservation, group(name, 1, version=-1))
    with pytest.raises(ValueError, match="trajectories"):
        buffer.push(reservation, group(name, 1, size=1))
    with pytest.raises(ValueError, match="was reserved"):
        buffer.push(reservation, group("v0-g0", 0))
    buffer.push(reservation, group(name, 1, version=0))
    assert buffer.stats.aborted_tokens == 0


def test_sample_waits_for_the_last_group() -> None:
    buffer = ReplayBuffer(2, 2, 0)
    reservations = reserve_all(buffer, 0)
    push(buffer, reservations[1])
    with pytest.raises(DeadlineExceededError, match="1 of 2 groups"):
        buffer.sample(0, timeout_s=0.05)
    threading.Timer(0.1, lambda: push(buffer, reservations[0])).start()
    started = time.monotonic()
    assert [g.group_id for g in buffer.sample(0, timeout_s=5)] == ["v0-g0", "v0-g1"]
    assert time.monotonic() - started < 2
    with pytest.raises(ValueError, match="1 is next"):
        buffer.sample(0, timeout_s=0.1)


def test_a_wait_can_be_ended() -> None:
    buffer = ReplayBuffer(1, 2, 0)
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    with pytest.raises(PipelineClosedError, match="cancelled"):
        buffer.sample(0, timeout_s=10, cancelled=stop.is_set)
    threading.Timer(0.05, lambda: buffer.close("shards are gone")).start()
    with pytest.raises(PipelineClosedError, match="shards are gone"):
        buffer.sample(0, timeout_s=10)


def test_valid_count() -> None:
    buffer = ReplayBuffer(2, 2, 2)
    for reservation in reserve_all(buffer, 0):
        push(buffer, reservation)
    counts = [buffer.valid_count(version, age) for version, age in ((0, 2), (0, 0), (1, 1), (3, 2))]
    assert counts == [6, 2, 4, 0]


def test_restart_does_again_what_was_in_progress() -> None:
    buffer = ReplayBuffer(2, 2, 1)
    reservations = reserve_all(buffer, 0)
    for reservation in reservations[:3]:
        push(buffer, reservation)
    buffer.sample(0, timeout_s=0.1)
    resumed = ReplayBuffer(2, 2, 1)
    snapshot = buffer.snapshot()
    assert BufferSnapshot.from_json(snapshot.to_json()) == snapshot
    resumed.restore(snapshot)
    with pytest.raises(DuplicateGroupError):
        push(resumed, reservations[3])  # from before the restart
    again = reserve_all(resumed, 0)
    assert [r.group_id for r in again] == ["v1-g1"]
    push(resumed, again[0])
    assert [g.group_id for g in resumed.sample(1, timeout_s=0.1)] == ["v1-g0", "v1-g1"]
    assert resumed.stats.lost_groups == resumed.stats.duplicated_groups == 0
    assert resumed.stats.sampled == 4


def test_a_snapshot_of_another_workload_is_refused() -> None:
    buffer = ReplayBuffer(3, 2, 0)
    for reservation in reserve_all(buffer, 0):
        push(buffer, reservation)
    with pytest.raises(ValueError, match="workload"):
        ReplayBuffer(2, 2, 0).restore(buffer.snapshot())


@given(st.integers(1, 3), st.integers(0, 2), st.integers(2, 6))
@settings(max_examples=10)
def test_many_threads_fill_it_once(per_version: int, max_age: int, workers: int) -> None:
    buffer = ReplayBuffer(per_version, 2, max_age, end_version=4)
    version, errors = [0], []

    def work() -> None:
        while version[0] < 4:
            reservation = buffer.reserve(version[0])
            if reservation is None:
                time.sleep(0.0005)
                continue
            try:
                push(buffer, reservation)
            except Exception as error:
                errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(workers)]
    for thread in threads:
        thread.start()
    got = []
    for step in range(4):
        got += [g.group_id for g in buffer.sample(step, timeout_s=10)]
        version[0] = step + 1
    for thread in threads:
        thread.join()
    assert not errors
    assert got == [group_name(step, i) for step in range(4) for i in range(per_version)]


class BufferMachine(RuleBasedStateMachine):
    """Any interleaving of reserve, push, fail, late calls, sample and restart."""

    @initialize(per_version=st.integers(1, 3), max_age=st.integers(0, 2))
    def make(self, per_version: int, max_age: int) -> None:
        self.sizes = (per_version, 2, max_age)
        self.buffer = ReplayBuffer(*self.sizes, end_version=6)
        self.version = 0
        self.current: list[Reservation] = []
        self.void: list[Reservation] = []
        self.trained: list[str] = []

    @rule()
    def reserve(self) -> None:
        reservation = self.buffer.reserve(self.version)
        if reservation is not None:
            assert reservation.group_id not in [r.group_id for r in self.current]
            assert self.version <= reservation.target_version <= self.version + self.sizes[2]
            self.current.append(reservation)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def push(self, data: st.DataObject) -> None:
        reservation = self.current.pop(data.draw(st.integers(0, len(self.current) - 1)))
        push(self.buffer, reservation)
        self.void.append(reservation)

    @precondition(lambda self: self.current)
    @rule(data=st.data())
    def fail(self, data: st.DataObject) -> None:
        reservation = self.current.pop(data.draw(st.integers(0, len(self.current) - 1)))
        self.buffer.fail(reservation)
        self.void.append(reservation)

    @precondition(lambda self: self.void)
    @rule(data=st.data(), act=st.sampled_from(["push", "fail"]))
    def late(self, data: st.DataObject, act: str) -> None:
        reservation = data.draw(st.sampled_from(self.void))
        with pytest.raises(DuplicateGroupError):
            push(self.buffer, reservation) if act == "push" else self.buffer.fail(reservation)

    @rule()
    def sample(self) -> None:
        if self.buffer.valid_count(self.version, 0) == self.sizes[0]:
            taken = self.buffer.sample(self.version, timeout_s=0.01)
            self.trained += [g.group_id for g in taken]
            self.version += 1
        elif self.version < 6:
            with pytest.raises(DeadlineExceededError):
                self.buffer.sample(self.version, timeout_s=0.0)

    @rule()
    def restart(self) -> None:
        resumed = ReplayBuffer(*self.sizes, end_version=6)
        resumed.restore(self.buffer.snapshot())
        self.buffer = resumed
        self.void += self.current
        self.current = []

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        expected = [group_name(v, i) for v in range(self.version) for i in range(self.sizes[0])]
        assert self.trained == expected
        stats = self.buffer.stats
        assert (stats.lost_groups, stats.duplicated_groups, stats.aborted_tokens) == (0, 0, 0)
        ready, wanted = self.buffer.progress(self.version)
        assert 0 <= ready + len(self.current) <= wanted


TestBuffer = BufferMachine.TestCase
TestBuffer.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
