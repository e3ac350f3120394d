"""The transition table, pair by pair, and the table that applies it."""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import (
    DeadlineExceededError,
    IllegalTransitionError,
    PipelineClosedError,
)
from nemo_rl_rlix.shards.owner import MAX_FAILURES, fatal_cause, is_worn, rebuild_delay
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot
from nemo_rl_rlix.shards.state import (
    HOLDS_DEVICE_MEMORY,
    SERVING,
    TAKEABLE,
    TRANSITIONS,
    UNKNOWN_VERSION,
    ShardRecord,
    ShardState,
    abandoned,
    needs_sync,
    revoked,
    slept,
    synced,
    transition,
)
from nemo_rl_rlix.shards.table import ShardTable, Transition

S = ShardState

LEGAL = {
    "UNBUILT": "ASLEEP FAILED",
    "ASLEEP": "WAKING FAILED",
    "WAKING": "SYNCING DRAINING FAILED",
    "SYNCING": "ACTIVE DRAINING FAILED",
    "ACTIVE": "REFRESHING DRAINING FAILED",
    "REFRESHING": "ACTIVE DRAINING FAILED",
    "DRAINING": "ASLEEP FAILED",
    "FAILED": "REBUILDING",
    "REBUILDING": "ASLEEP FAILED",
}


def record(state: ShardState, **changes: object) -> ShardRecord:
    whole = ShardRecord(3, state, weights_version=5, weights_discarded=False, granted=True)
    return replace(whole, **changes)


@pytest.mark.parametrize(("before", "after"), list(itertools.product(S, S)))
def test_exactly_the_drawn_transitions_are_legal(before: ShardState, after: ShardState) -> None:
    if after.value in LEGAL[before].split():
        assert transition(record(before), after).state is after
    else:
        with pytest.raises(IllegalTransitionError, match=f"shard 3: {before} -> {after}"):
            transition(record(before), after)


def test_every_state_has_a_row_and_can_be_reached() -> None:
    assert set(TRANSITIONS) == set(S)
    assert set().union(*TRANSITIONS.values()) == set(S) - {S.UNBUILT}


def test_no_state_serves_without_holding_memory_and_all_serving_ones_can_be_taken() -> None:
    assert SERVING < TAKEABLE < HOLDS_DEVICE_MEMORY
    assert all(S.DRAINING in TRANSITIONS[state] for state in TAKEABLE)


@pytest.mark.parametrize("before", [S.SYNCING, S.REFRESHING])
@pytest.mark.parametrize(
    "lacking", [{"weights_discarded": True}, {"weights_version": UNKNOWN_VERSION}]
)
def test_nothing_serves_without_complete_weights(
    before: ShardState, lacking: dict[str, object]
) -> None:
    with pytest.raises(IllegalTransitionError, match="without weights"):
        transition(record(before, **lacking), S.ACTIVE)


def test_a_failure_forgets_the_weights_and_counts() -> None:
    failed = transition(record(S.ACTIVE, failures=1), S.FAILED, cause="gone")
    assert failed == record(
        S.FAILED,
        weights_version=UNKNOWN_VERSION,
        weights_discarded=True,
        failures=2,
        cause="gone",
    )


def test_serving_again_forgets_earlier_failures() -> None:
    served = transition(record(S.SYNCING, failures=3, cause="gone"), S.ACTIVE)
    assert (served.failures, served.cause) == (0, "")


@pytest.mark.parametrize(("level", "version", "discarded"), [(1, 5, False), (2, -1, True)])
def test_only_a_level_2_sleep_discards_weights(level: int, version: int, discarded: bool) -> None:
    asleep = slept(record(S.DRAINING), level)
    assert (asleep.state, asleep.weights_version, asleep.weights_discarded) == (
        S.ASLEEP,
        version,
        discarded,
    )


@pytest.mark.parametrize("state", S)
def test_weights_arrive_only_where_they_are_expected(state: ShardState) -> None:
    before = record(state, weights_version=-1, weights_discarded=True)
    if state in (S.SYNCING, S.REFRESHING):
        after = synced(before, 7)
        assert (after.weights_version, after.weights_discarded) == (7, False)
    else:
        with pytest.raises(IllegalTransitionError, match=r"synced\(7\)"):
            synced(before, 7)


@pytest.mark.parametrize(
    ("version", "discarded", "wanted", "expected"),
    [(5, False, 5, False), (5, False, 6, True), (5, False, 4, False), (5, True, 5, True)],
)
def test_needs_sync(version: int, discarded: bool, wanted: int, expected: bool) -> None:
    held = record(S.SYNCING, weights_version=version, weights_discarded=discarded)
    assert needs_sync(held, wanted) is expected


@pytest.mark.parametrize("state", S)
def test_revoking_cuts_the_route_of_exactly_what_serves_or_soon_will(state: ShardState) -> None:
    after = revoked(record(state))
    assert not after.granted
    expected = S.DRAINING if state in TAKEABLE else state
    assert after.state is expected


@pytest.mark.parametrize("state", S)
def test_an_abandoned_rebuild_is_failed_without_a_failure(state: ShardState) -> None:
    after = abandoned(record(state, failures=2))
    assert after.failures == 2
    assert after.state is (S.FAILED if state is S.REBUILDING else state)


@pytest.mark.parametrize(
    ("failures", "seconds"), [(0, 0.0), (1, 0.0), (2, 1.0), (3, 4.0), (4, 15.0), (40, 15.0)]
)
def test_rebuild_delay(failures: int, seconds: float) -> None:
    assert rebuild_delay(failures) == seconds


def shards(*rows: tuple[ShardState, int, bool]) -> list[ShardRecord]:
    return [
        ShardRecord(rank, state, failures=failures, granted=granted, cause=f"c{rank}")
        for rank, (state, failures, granted) in enumerate(rows)
    ]


M = MAX_FAILURES


@pytest.mark.parametrize(
    ("rows", "fatal"),
    [
        ([], False),
        ([(S.ASLEEP, 0, False)], False),
        ([(S.FAILED, M, True)], True),
        ([(S.FAILED, M - 1, True)], False),
        ([(S.FAILED, M, False)], False),
        ([(S.FAILED, M, True), (S.FAILED, M, True)], True),
        ([(S.FAILED, M, True), (S.REBUILDING, M, True)], True),
        ([(S.FAILED, M, True), (S.REBUILDING, 1, True)], False),
        ([(S.FAILED, M, True), (S.ACTIVE, 0, True)], False),
        ([(S.FAILED, M, True), (S.REFRESHING, 0, True)], False),
        ([(S.FAILED, M, True), (S.SYNCING, 0, True)], False),
        ([(S.FAILED, M, True), (S.WAKING, M, True)], False),
        ([(S.FAILED, M, True), (S.ASLEEP, 0, True)], False),
        # What another pipeline has now does not help: this one holds a GPU for nothing.
        ([(S.FAILED, M, True), (S.ASLEEP, 0, False)], True),
        ([(S.FAILED, M, True), (S.FAILED, 1, False)], True),
    ],
)
def test_fatal_cause(rows: list[tuple[ShardState, int, bool]], fatal: bool) -> None:
    cause = fatal_cause(shards(*rows))
    assert bool(cause) is fatal
    if fatal:
        assert cause.startswith(f"shard 0 failed {M} times: c0")


@given(
    st.lists(st.tuples(st.sampled_from(S), st.integers(0, 2 * M), st.booleans()), max_size=5),
)
def test_a_pipeline_with_a_granted_shard_that_may_serve_is_never_given_up(
    rows: list[tuple[ShardState, int, bool]],
) -> None:
    records = shards(*rows)
    hope = [r for r in records if r.granted and not is_worn(r)]
    assert not (hope and fatal_cause(records))


class TestTable:
    def test_every_change_raises_the_epoch(self) -> None:
        table = ShardTable([1, 0])
        seen = [table.snapshot().epoch]
        for act in (
            lambda: table.move(0, S.ASLEEP),
            lambda: table.grant(0),
            lambda: table.begin_wake(0),
            lambda: table.move(0, S.SYNCING),
            lambda: table.mark_synced(0, 0, only_from=S.SYNCING),
            lambda: table.activate(0),
            lambda: table.revoke(0),
            lambda: table.update(0, lambda r: slept(r, 2)),
            lambda: table.publish(1),
            lambda: table.fail("why"),
            lambda: table.close(),
        ):
            act()
            seen.append(table.snapshot().epoch)
        assert seen == sorted(set(seen))
        assert table.dp_ranks == (0, 1)

    def test_a_move_that_does_not_apply_changes_nothing(self) -> None:
        table = ShardTable([0])
        before = table.snapshot()
        assert table.move(0, S.WAKING, only_from=(S.ASLEEP,)) is None
        assert not table.mark_synced(0, 1, only_from=S.SYNCING)
        assert not table.activate(0)
        assert table.begin_wake(0) is None
        assert not table.begin_rebuild(0)
        with pytest.raises(IllegalTransitionError):
            table.move(0, S.ACTIVE)
        assert table.snapshot() == before

    @pytest.mark.parametrize("granted", [True, False])
    @pytest.mark.parametrize("closed", [True, False])
    def test_waking_and_rebuilding_begin_only_under_a_grant(
        self, granted: bool, closed: bool
    ) -> None:
        table = ShardTable([0, 1])
        table.move(0, S.ASLEEP)
        table.move(1, S.FAILED)
        for rank in (0, 1):
            table.grant(rank)
            if not granted:
                table.revoke(rank)
        if closed:
            table.close()
        may = granted and not closed
        assert table.wants_rebuild(1) is may
        assert (table.begin_wake(0) is not None) is may
        assert table.begin_rebuild(1) is may

    def test_nothing_is_rebuilt_for_a_pipeline_beyond_saving(self) -> None:
        table = ShardTable([0])
        table.move(0, S.FAILED)
        table.grant(0)
        table.fail("beyond saving")
        assert not table.wants_rebuild(0)

    def test_activation_and_publication_exclude_each_other(self) -> None:
        table = serving_table(version=0)
        assert table.publish(1) == [0]
        assert table.published_version == 0
        table.move(0, S.REFRESHING)
        table.mark_synced(0, 1, only_from=S.REFRESHING)
        assert table.publish(1) == []
        assert table.activate(0)
        # One that was synced before the publication must sync again.
        table.move(0, S.REFRESHING)
        assert table.publish(2) == [0]
        table.move(0, S.DRAINING)
        assert table.publish(2) == []
        table.update(0, lambda r: slept(r, 1))
        table.begin_wake(0)
        table.move(0, S.SYNCING)
        assert not table.activate(0)

    def test_publishing_never_goes_back(self) -> None:
        table = ShardTable([0], published_version=4)
        epoch = table.snapshot().epoch
        assert table.publish(3) == []
        assert (table.published_version, table.snapshot().epoch) == (4, epoch)

    def test_a_poll_ends_with_the_change_or_with_its_time(self) -> None:
        table = ShardTable([0])
        epoch = table.snapshot().epoch
        started = time.monotonic()
        assert table.wait_newer(epoch, 0.05).epoch == epoch
        assert 0.04 < time.monotonic() - started < 1.0
        threading.Timer(0.05, table.move, (0, S.ASLEEP)).start()
        started = time.monotonic()
        assert table.wait_newer(epoch, 5.0).states == {0: "ASLEEP"}
        assert time.monotonic() - started < 2.0
        assert table.wait_newer(epoch, 5.0).epoch > epoch

    def test_acts_on_one_shard_exclude_each_other_and_do_not_wait_for_ever(self) -> None:
        table = ShardTable([0, 1])
        with table.operation(0, 1.0), table.operation(1, 0.0):
            with pytest.raises(DeadlineExceededError, match="shard 0"):
                with table.operation(0, 0.02):
                    pass
        with table.operation(0, 0.0):
            pass

    def test_closing_refuses_new_work_and_the_first_failure_stays(self) -> None:
        table = ShardTable([0])
        table.check_open()
        table.fail("first")
        table.fail("second")
        table.close()
        assert (table.snapshot().failure, table.snapshot().closed) == ("first", True)
        with pytest.raises(PipelineClosedError):
            table.check_open()

    def test_the_listener_hears_of_changes_of_state_only_in_order(self) -> None:
        heard: list[Transition] = []
        table = ShardTable([0], listener=heard.append)
        table.move(0, S.ASLEEP)
        table.grant(0)
        table.begin_wake(0)
        table.revoke(0)
        assert [(change.before.value, change.after.value) for change in heard] == [
            ("UNBUILT", "ASLEEP"),
            ("ASLEEP", "WAKING"),
            ("WAKING", "DRAINING"),
        ]


def serving_table(version: int) -> ShardTable:
    table = ShardTable([0], published_version=version)
    table.move(0, S.ASLEEP)
    table.grant(0)
    table.begin_wake(0)
    table.move(0, S.SYNCING)
    table.mark_synced(0, version, only_from=S.SYNCING)
    assert table.activate(0)
    return table


def test_the_views_of_a_snapshot() -> None:
    snapshot = RoutingSnapshot(7, {rank: state.value for rank, state in enumerate(S)})
    names = list(S)
    assert {names[rank] for rank in snapshot.active} == set(SERVING)
    assert {names[rank] for rank in snapshot.preempted} == {S.DRAINING}
