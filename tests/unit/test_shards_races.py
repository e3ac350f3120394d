"""Acts that cross each other: every one ends, and the last word about a grant holds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from fakes.pipeline import SHORT, FakePipeline, fake_pipeline, wait_until
from fakes.shard import DIE, HANG, LEAVE, RAISE

from nemo_rl_rlix.errors import ShardFailedError
from nemo_rl_rlix.shards.state import TRANSITIONS, ShardState
from nemo_rl_rlix.shards.table import ShardTable


class Act(threading.Thread):
    """Something that runs beside the test; its error is raised by :meth:`end`."""

    def __init__(self, act: Callable[..., Any], *args: Any) -> None:
        super().__init__(daemon=True)
        self._act, self._args = act, args
        self._error: BaseException | None = None
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._act(*self._args)
        except BaseException as error:
            self._error = error

    def end(self, timeout_s: float = 8.0) -> Any:
        self.join(timeout_s)
        assert not self.is_alive(), "the act does not end"
        if self._error is not None:
            raise self._error
        return self.result


def fail(pipeline: FakePipeline, rank: int) -> None:
    """Have the owner find the process of a serving shard gone."""
    pipeline.shards[rank].faults["ping"] = [DIE]
    pipeline.owner.suspect(rank)


def test_a_late_bring_in_does_not_wake_a_shard_that_was_taken_meanwhile() -> None:
    with fake_pipeline(2, cache=-1) as p:
        p.owner.expand([0])  # granted, no cache yet
        p.weights.cache_ready_step = 1
        with p.table.operation(0, 1.0):
            refresh = Act(p.owner.refresh_and_publish, 1)
            time.sleep(0.05)
            p.owner.shrink([0])
        refresh.end()
        assert p.state(0) is ShardState.ASLEEP
        assert p.shards[0].engine.asleep


def test_an_expand_that_crosses_a_shrink_that_came_later_does_not_wake() -> None:
    with fake_pipeline(1) as p:
        with p.table.operation(0, 1.0):
            expand = Act(p.owner.expand, [0])
            wait_until(lambda: p.table.get(0).granted)
            p.owner.shrink([0])
        expand.end()
        assert p.state(0) is ShardState.ASLEEP
        assert p.shards[0].engine.asleep


def test_an_expand_that_comes_after_a_shrink_has_the_last_word() -> None:
    """The shrink has cut the route and waits for its turn when the expand acts."""
    with fake_pipeline(1, active=(0,)) as p:
        p.table.revoke(0)
        assert p.state(0) is ShardState.DRAINING
        p.owner.expand([0])
        assert p.state(0) is ShardState.ACTIVE
        assert p.violations() == []


def test_an_expand_that_finds_its_shard_failed_when_its_turn_comes_has_it_rebuilt() -> None:
    with fake_pipeline(1) as p:
        with p.table.operation(0, 1.0):
            expand = Act(p.owner.expand, [0])
            wait_until(lambda: p.table.get(0).granted)
            time.sleep(0.03)
            p.table.move(0, ShardState.FAILED, cause="by the act before it")
        expand.end()
        wait_until(lambda: p.state(0) is ShardState.ACTIVE)


def test_expand_of_a_shard_that_is_being_rebuilt_returns_at_once() -> None:
    with fake_pipeline(1, active=(0,), hang_share=1.0) as p:
        p.shards[0].faults["build"] = [HANG]  # for 20 s
        fail(p, 0)
        wait_until(lambda: p.state(0) is ShardState.REBUILDING)
        started = time.monotonic()
        report = p.owner.expand([0])
        assert time.monotonic() - started < 4.0
        assert report.outcomes[0].state == "REBUILDING"
        assert p.table.get(0).failures == 1


def test_a_grant_that_meets_a_rebuild_about_to_give_up_is_rebuilt() -> None:
    backed_off, met = threading.Event(), threading.Event()
    with fake_pipeline(1, active=(0,), rebuild_pause=lambda _: backed_off.wait(3)) as p:
        begin = p.table.begin_rebuild

        def begin_and_be_granted(rank: int) -> bool:
            begun = begin(rank)
            if not begun and not met.is_set():
                met.set()
                p.owner.expand([0])
            return begun

        p.table.begin_rebuild = begin_and_be_granted  # type: ignore[method-assign]
        fail(p, 0)
        p.owner.shrink([0])
        backed_off.set()
        assert met.wait(2.0)
        wait_until(lambda: p.state(0) is ShardState.ACTIVE, 2.0)


def test_a_shard_ended_twice_while_it_is_rebuilt_is_rebuilt_again() -> None:
    """A late failure of an earlier act kills the half-built engine."""
    with fake_pipeline(1, active=(0,)) as p:
        p.shards[0].faults["build"] = [HANG]
        fail(p, 0)
        wait_until(lambda: p.state(0) is ShardState.REBUILDING)
        p.owner._end(0, RuntimeError("an act that was stuck has ended"))
        wait_until(lambda: p.state(0) is ShardState.ACTIVE, 3.0)


@pytest.mark.parametrize("first_kill", [[], [LEAVE]])
def test_shrink_waits_until_a_failing_expand_has_given_the_memory_back(
    first_kill: list[str],
) -> None:
    with fake_pipeline(1) as p:
        shard, at_receive, go_on = p.shards[0], threading.Event(), threading.Event()

        def at_the_receive() -> None:
            at_receive.set()
            go_on.wait(3)

        shard.before["receive"] = at_the_receive
        shard.before["kill"] = lambda: time.sleep(0.15)
        shard.faults |= {"receive": [RAISE], "kill": first_kill}
        expand = Act(p.owner.expand, [0])
        assert at_receive.wait(3)
        shrink = Act(p.owner.shrink, [0])
        wait_until(lambda: p.state(0) is ShardState.DRAINING)
        go_on.set()
        shrink.end()
        assert not shard.alive
        assert shard.held_bytes == 0
        expand.end()
        assert p.state(0) is ShardState.FAILED


def test_shrink_returns_or_raises_only_when_every_rank_is_through() -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        p.shards[0].faults |= {"drain": [RAISE], "kill": [LEAVE]}
        p.shards[1].before["sleep"] = lambda: time.sleep(0.2)
        with pytest.raises(ShardFailedError, match="still holds"):
            p.owner.shrink([0, 1])
        assert p.state(1) is ShardState.ASLEEP


def test_shrink_never_queues_behind_other_acts() -> None:
    limits = SHORT.model_copy(update={"receive_s": 4.0, "drain_s": 0.5})
    with fake_pipeline(1, deadlines=limits, hang_share=1.0) as p:
        p.shards[0].faults["receive"] = [HANG]
        expands = [Act(p.owner.expand, [0]) for _ in range(8)]
        wait_until(lambda: "receive" in p.shards[0].calls)
        started = time.monotonic()
        p.owner.shrink([0])
        assert time.monotonic() - started < 2.0
        assert p.shards[0].held_bytes == 0
        for expand in expands:
            expand.end()


@pytest.mark.parametrize("act", ["shrink", "kill while shrinking"])
def test_a_resize_that_meets_the_end_of_the_pipeline_ends_well(act: str) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        if act == "shrink":
            p.owner.close()
            p.owner.shrink([0, 1])
        else:
            p.shards[0].before["drain"] = lambda: time.sleep(0.1)
            shrink = Act(p.owner.shrink, [0, 1])
            wait_until(lambda: "drain" in p.shards[0].calls)
            p.owner.close()
            shrink.end()
        assert not any(shard.alive for shard in p.shards.values())
        p.owner.close()


def test_nothing_becomes_active_once_the_pipeline_has_ended() -> None:
    with fake_pipeline(1) as p:
        shard, reached, go_on = p.shards[0], threading.Event(), threading.Event()

        def at_the_probe() -> None:
            reached.set()
            go_on.wait(3)

        shard.before["probe"] = at_the_probe
        expand = Act(p.owner.expand, [0])
        assert reached.wait(3)
        close = Act(p.owner.close)
        wait_until(lambda: p.table.snapshot().closed)
        go_on.set()
        expand.end()
        close.end()
        assert ShardState.ACTIVE not in {change.after for change in p.history}
        assert not shard.alive


def test_the_table_lets_nothing_serve_once_it_is_closed() -> None:
    table = ShardTable([0])
    table.move(0, ShardState.ASLEEP)
    table.grant(0)
    assert table.begin_wake(0)
    table.move(0, ShardState.SYNCING)
    table.mark_synced(0, 0, only_from=ShardState.SYNCING)
    table.close()
    assert not table.activate(0)


def test_a_rebuild_without_a_cache_waits_asleep_for_the_next_one() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        p.weights.cache_ready_step = -1  # one slot, and it is being built
        fail(p, 0)
        wait_until(lambda: p.state(0) is ShardState.ASLEEP)
        time.sleep(0.05)
        assert p.state(0) is ShardState.ASLEEP
        assert p.shards[0].engine.asleep
        p.publish(1)
        assert p.state(0) is ShardState.ACTIVE
        assert p.table.get(0).weights_version == 1


def test_a_cache_that_goes_while_an_expand_begins_costs_no_engine() -> None:
    with fake_pipeline(1) as p:
        with p.table.operation(0, 1.0):
            expand = Act(p.owner.expand, [0])
            time.sleep(0.03)
            p.weights.cache_ready_step = -1
        expand.end()
        assert p.state(0) is ShardState.ASLEEP
        assert "kill" not in p.shards[0].calls
        p.publish(1)
        assert p.state(0) is ShardState.ACTIVE


def test_a_rebuild_that_a_shrink_ends_is_no_failure_of_the_shard() -> None:
    with fake_pipeline(2, active=(0,)) as p:
        fail_count = 6
        p.shards[0].faults["build"] = [HANG] * fail_count
        fail(p, 0)
        for _ in range(fail_count):
            wait_until(lambda: p.state(0) is ShardState.REBUILDING)
            p.owner.shrink([0])
            assert p.state(0) is ShardState.FAILED
            p.owner.expand([0])
        assert p.table.get(0).failures == 1
        assert p.table.snapshot().failure == ""
        wait_until(lambda: p.state(0) is ShardState.ACTIVE)


def test_a_hung_kill_found_by_the_watch_is_reported_and_not_taken_for_busy() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        p.shards[0].faults |= {"ping": [HANG], "kill": [HANG]}
        p.owner.check_serving()
        assert "shard 0" in p.table.snapshot().failure


def test_the_watch_outlives_errors_of_any_kind() -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        p.shards[0].faults["ping"] = [RAISE]
        p.owner.check_serving()
        assert ("ping" in p.shards[1].calls) and p.state(1) is ShardState.ACTIVE
        wait_until(lambda: p.state(0) is ShardState.ACTIVE)


@pytest.mark.parametrize("kill", [LEAVE, HANG, RAISE])
def test_an_engine_that_cannot_be_ended_does_not_break_an_expand(kill: str) -> None:
    """A resize that raises ends every pipeline; only a shrink may, for the GPU's sake."""
    with fake_pipeline(1) as p:
        p.shards[0].faults |= {"wake_kv_cache": [RAISE], "kill": [kill]}
        report = p.owner.expand([0])
        assert report.outcomes[0].state == "FAILED"
        assert "shard 0" in p.table.snapshot().failure
        p.shards[0].faults["kill"] = [kill]
        with pytest.raises(ShardFailedError):
            p.owner.shrink([0])
        p.owner.shrink([0])  # it can be ended now


def test_a_second_refresh_at_the_same_time_waits_for_the_first() -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        p.weights.cache_ready_step = 1
        acts = [Act(p.owner.refresh_and_publish, 1) for _ in range(3)]
        for act in acts:
            act.end()
        assert p.table.published_version == 1
        assert p.states() == {0: "ACTIVE", 1: "ACTIVE"}
        assert p.shards[0].calls.count("receive") == 2  # at the start, and once more


def test_every_change_was_legal_and_epochs_grow(  # also of the listener's account
) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        fail(p, 0)
        p.owner.shrink([1])
        p.owner.expand([1])
        wait_until(lambda: p.state(0) is ShardState.ACTIVE)
        p.publish(1)
    epochs = [change.epoch for change in p.history]
    assert epochs == sorted(set(epochs))
    assert all(change.after in TRANSITIONS[change.before] for change in p.history)
