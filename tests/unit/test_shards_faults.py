"""Each call of the protocol hangs, raises, dies or half works, in each act: bounded, known state."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from fakes.engine import FakeEngine, reference_tokens
from fakes.pipeline import SHORT, Background, FakePipeline, fake_pipeline, wait_until
from fakes.shard import BUDGET_BYTES, DIE, HANG, LEAVE, RAISE

from nemo_rl_rlix.errors import NoLiveShardError, ShardFailedError
from nemo_rl_rlix.shards.owner import MAX_FAILURES
from nemo_rl_rlix.shards.requests import GenerationRequest
from nemo_rl_rlix.shards.state import ShardState

S = ShardState
FAULTS = (HANG, RAISE, DIE)
SHRINK_CALLS = ("close_admission", "drain", "sleep")
EXPAND_CALLS = (
    "close_admission",
    "drain",
    "wake_weights",
    "receive",
    "finalize_weights",
    "wake_kv_cache",
    "reset_prefix_cache",
    "probe",
    "open_admission",
)
REFRESH_CALLS = (
    "pause_keep",
    "receive",
    "finalize_weights",
    "reset_prefix_cache",
    "open_admission",
    "resume",
)
BOUND_S = 2.0
"""Seconds that an act may take with one fault under the short deadlines."""


def request(name: str = "r", tokens: int = 6) -> GenerationRequest:
    return GenerationRequest(name, (5, 6, len(name)), tokens, temperature=0.0)


def check_answers(p: FakePipeline, version: int) -> None:
    """The pipeline serves, and from the right weights."""
    asked = request("check")
    output = asyncio.run(asyncio.wait_for(p.answer(asked), 5))
    assert output.token_ids == reference_tokens(version, asked.prompt_ids, asked.max_new_tokens)
    assert p.violations() == []


@pytest.mark.parametrize(
    ("call", "fault"),
    [*((call, fault) for call in SHRINK_CALLS for fault in FAULTS), ("sleep", LEAVE)],
)
def test_shrink_hands_the_gpu_over_whatever_the_engine_does(call: str, fault: str) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        background = Background()
        asked = [background.start(p.answer(request(f"r{i}", 60))) for i in range(6)]
        wait_until(lambda: p.router.in_flight().get(1, 0) > 0)
        p.shards[1].faults[call] = [fault]
        started = time.monotonic()
        report = p.owner.shrink([1])
        assert time.monotonic() - started < BOUND_S
        assert p.shards[1].held_bytes <= BUDGET_BYTES
        assert not p.shards[1].alive
        assert report.outcomes[0].state == "FAILED"
        assert report.outcomes[0].cause
        assert p.state(1) is S.FAILED  # not granted, so not rebuilt
        outputs = [future.result(5) for future in asked]
        assert all(output.dp_rank == 0 for output in outputs if output.dispatches > 1)
        assert [len(output.token_ids) for output in outputs] == [60] * 6
        p.owner.expand([1])
        wait_until(lambda: p.state(1) is S.ACTIVE)
        check_answers(p, 0)
        background.stop()


@pytest.mark.parametrize(
    ("call", "fault"),
    [*((call, fault) for call in EXPAND_CALLS for fault in FAULTS), ("reset_prefix_cache", LEAVE)],
)
def test_a_shard_that_fails_on_the_way_in_is_rebuilt_and_never_served_before(
    call: str, fault: str
) -> None:
    rebuild = threading.Event()
    with fake_pipeline(1, rebuild_pause=lambda _: rebuild.wait(5)) as p:
        p.shards[0].faults[call] = [fault]
        started = time.monotonic()
        report = p.owner.expand([0])
        assert time.monotonic() - started < BOUND_S
        assert report.outcomes[0].state == "FAILED"
        assert report.outcomes[0].cause
        assert S.ACTIVE not in {change.after for change in p.history}
        rebuild.set()
        wait_until(lambda: p.state(0) is S.ACTIVE)
        check_answers(p, 0)


@pytest.mark.parametrize(
    ("call", "fault", "clear_cache"),
    [
        *((call, fault, False) for call in REFRESH_CALLS for fault in FAULTS),
        ("resume", LEAVE, False),
        ("reset_prefix_cache", LEAVE, True),
        ("receive", RAISE, True),
    ],
)
def test_a_refresh_that_fails_closes_the_shard_until_it_is_rebuilt(
    call: str, fault: str, clear_cache: bool
) -> None:
    with fake_pipeline(2, active=(0, 1), clear_cache=clear_cache) as p:
        background = Background()
        asked = [background.start(p.answer(request(f"r{i}", 40))) for i in range(4)]
        wait_until(lambda: p.router.in_flight().get(0, 0) > 0)
        p.shards[0].faults[call] = [fault]
        started = time.monotonic()
        p.publish(1)
        assert time.monotonic() - started < BOUND_S
        assert p.table.published_version == 1
        assert p.table.get(1).weights_version == 1
        wait_until(lambda: p.state(0) is S.ACTIVE)
        after = [change.after for change in p.history if change.dp_rank == 0]
        failed_at = after.index(S.FAILED)
        assert after[failed_at - 1] is S.REFRESHING
        assert after[failed_at + 1] is S.REBUILDING
        assert p.table.get(0).weights_version == 1
        assert [len(future.result(5).token_ids) for future in asked] == [40] * 4
        check_answers(p, 1)
        background.stop()


@pytest.mark.parametrize(("clear_cache", "state"), [(False, "ACTIVE"), (True, "FAILED")])
def test_a_prefix_cache_that_is_not_cleared_ends_a_refresh_only_where_it_was_to_be(
    clear_cache: bool, state: str
) -> None:
    rebuild = threading.Event()
    with fake_pipeline(
        1, active=(0,), clear_cache=clear_cache, rebuild_pause=lambda _: rebuild.wait(5)
    ) as p:
        p.shards[0].faults["reset_prefix_cache"] = [LEAVE]
        p.publish(1)
        assert p.states() == {0: state}
        rebuild.set()


def test_no_byte_of_weights_before_the_pause_is_acknowledged() -> None:
    """The engine is in a long step when it is asked to pause."""
    with fake_pipeline(1, active=(0,), make_engine=lambda: FakeEngine(step_s=0.15)) as p:
        background = Background()
        asked = background.start(p.answer(request("r", 3)))
        wait_until(lambda: p.shards[0].engine._stepping)
        stepping: list[bool] = []
        p.shards[0].before["receive"] = lambda: stepping.append(p.shards[0].engine._stepping)
        p.publish(1)
        assert stepping == [False]
        assert len(asked.result(5).token_ids) == 3
        background.stop()


def test_a_pause_that_is_not_acknowledged_lets_no_weights_pass() -> None:
    rebuild = threading.Event()
    with fake_pipeline(1, active=(0,), rebuild_pause=lambda _: rebuild.wait(5)) as p:
        p.shards[0].faults["pause_keep"] = [HANG]
        receives = p.shards[0].calls.count("receive")
        p.publish(1)
        assert p.shards[0].calls.count("receive") == receives
        rebuild.set()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_shard_that_is_found_gone_is_rebuilt(fault: str) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        p.shards[0].faults["ping"] = [fault]
        p.owner.check_serving()
        assert S.FAILED in {change.after for change in p.history if change.dp_rank == 0}
        wait_until(lambda: p.state(0) is S.ACTIVE)
        assert p.state(1) is S.ACTIVE
        check_answers(p, 0)


def test_a_build_may_fail_a_few_times() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        p.shards[0].faults |= {"ping": [DIE], "build": [RAISE, HANG]}
        p.owner.suspect(0)
        wait_until(lambda: p.state(0) is S.ACTIVE)
        assert p.table.get(0).failures == 0


def test_when_every_shard_is_beyond_rebuilding_the_run_ends_with_the_cause() -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        background = Background()
        for shard in p.shards.values():
            shard.faults |= {"ping": [DIE], "build": [RAISE] * MAX_FAILURES}
        p.owner.check_serving()
        asked = background.start(p.answer(request()))
        with pytest.raises(NoLiveShardError, match="the engine does not start"):
            asked.result(5)
        background.stop()
        assert f"failed {MAX_FAILURES} times" in p.table.snapshot().failure


@pytest.mark.parametrize("fault", [LEAVE, HANG, RAISE])
def test_memory_that_even_a_kill_leaves_behind_is_not_handed_over(fault: str) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        p.shards[0].faults |= {"drain": [HANG], "kill": [fault]}
        started = time.monotonic()
        with pytest.raises(ShardFailedError, match="shard 0"):
            p.owner.shrink([0])
        assert time.monotonic() - started < BOUND_S
        assert p.shards[0].held_bytes > 0
        assert p.state(0) is S.FAILED
        p.owner.shrink([0])  # this kill works
        assert p.shards[0].held_bytes == 0


@pytest.mark.parametrize("call", ["wake_weights", "receive", "probe", "pause_keep"])
def test_a_shrink_interrupts_what_hangs(call: str) -> None:
    """WAKING, SYNCING and REFRESHING shards are taken within the drain's deadline."""
    limits = SHORT.model_copy(update={"drain_s": 0.3})
    refreshing = call == "pause_keep"
    active = (0,) if refreshing else ()
    with fake_pipeline(1, deadlines=limits, active=active, hang_share=1.0) as p:
        background = Background()
        seen = len(p.shards[0].calls)
        p.shards[0].faults[call] = [HANG]
        act = (
            asyncio.to_thread(p.publish, 1)
            if refreshing
            else asyncio.to_thread(p.owner.expand, [0])
        )
        running = background.start(act)
        wait_until(lambda: call in p.shards[0].calls[seen:])
        started = time.monotonic()
        p.owner.shrink([0])
        assert time.monotonic() - started < 1.5
        assert p.shards[0].held_bytes <= BUDGET_BYTES
        running.result(5)
        time.sleep(0.02)
        assert p.state(0) in (S.FAILED, S.ASLEEP)
        assert not p.table.get(0).granted
        background.stop()


def test_every_call_has_the_deadline_that_the_settings_give_it() -> None:
    limits = SHORT.model_copy(
        update={
            "drain_s": 1.1, "sleep_s": 1.2, "wake_s": 1.3, "receive_s": 1.4, "finalize_s": 1.5,
            "probe_s": 1.6, "control_s": 1.7, "build_s": 1.8, "kill_s": 1.9,
        }
    )  # fmt: skip
    expected = {
        "drain": 1.1, "sleep": 1.2, "wake_weights": 1.3, "wake_kv_cache": 1.3, "receive": 1.4,
        "finalize_weights": 1.5, "probe": 1.6, "close_admission": 1.7, "open_admission": 1.7,
        "reset_prefix_cache": 1.7, "pause_keep": 1.7, "resume": 1.7, "ping": 1.7, "build": 1.8,
        "kill": 1.9,
    }  # fmt: skip
    with fake_pipeline(1, active=(0,), deadlines=limits) as p:
        p.publish(1)
        p.owner.shrink([0])
        p.owner.expand([0])
        p.shards[0].faults["ping"] = [DIE]
        p.owner.check_serving()
        wait_until(lambda: p.state(0) is S.ACTIVE)
        given = p.shards[0].timeouts
    assert {call for call, _ in given} == set(expected)
    assert [(call, seconds) for call, seconds in given if seconds != expected[call]] == []


def test_what_is_left_of_a_resize_bounds_its_calls() -> None:
    limits = SHORT.model_copy(update={"resize_s": 0.4})
    with fake_pipeline(1, deadlines=limits, hang_share=1.0) as p:
        p.shards[0].faults["receive"] = [HANG]
        started = time.monotonic()
        assert p.owner.expand([0]).outcomes[0].state == "FAILED"
        assert time.monotonic() - started < 1.5
