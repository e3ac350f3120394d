"""Acts on an engine: their order does not matter here, what each leaves behind does."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest
from fake_async_llm import EngineDeadError, FakeAsyncLLM
from fakes.engine import reference_tokens

from nemo_rl_rlix.errors import DeadlineExceededError, ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.engine_control import EngineControl
from nemo_rl_rlix.vllm.serving import Serving

PROMPT = (3, 1, 4)
Scenario = Callable[["Stand"], Coroutine[Any, Any, None]]


@pytest.fixture(autouse=True)
def no_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "dead_error", lambda: EngineDeadError)
    monkeypatch.setattr(compat, "require", lambda symbols: None)


class Stand:
    """A serving engine of version 1."""

    def __init__(self, **options: Any) -> None:
        self.engine = FakeAsyncLLM(**options)
        self.serving = Serving(0)
        self.control = self.serving.bind(
            self.engine,
            lambda gate: EngineControl(
                self.engine, dp_rank=0, gate=gate, sleeping_budget_bytes=150_000
            ),
        )
        self.control.weights_version = 1
        self.serving.open(1, 1)

    async def ask(self, count: int, name: str = "r") -> tuple[int, ...]:
        params = SimpleNamespace(max_tokens=count, output_kind=SimpleNamespace(name="CUMULATIVE"))
        last = None
        with self.serving.admit():
            async for output in self.engine.generate(
                {"prompt_token_ids": PROMPT}, params, request_id=name
            ):
                last = output
        assert last is not None
        return tuple(last.outputs[0].token_ids)

    async def shrink(self) -> None:
        self.serving.gate.close(2)
        assert (await self.control.drain(timeout_s=2)).idle
        await self.control.sleep(level=2, timeout_s=2)


def run(scenario: Scenario, **options: Any) -> None:
    async def main() -> None:
        stand = Stand(**options)
        await scenario(stand)
        assert not stand.engine.fake.violation

    asyncio.run(main())


def test_a_shrink_ends_every_request_typed_and_none_steps_after_it() -> None:
    async def scenario(stand: Stand) -> None:
        asks = [asyncio.ensure_future(stand.ask(10_000, f"r{n}")) for n in range(5)]
        await asyncio.sleep(0.03)
        stand.serving.gate.close(2)
        report = await stand.control.drain(timeout_s=2)
        assert report.idle and report.aborted == 5
        memory = await stand.control.sleep(level=2, timeout_s=2)
        assert memory.within_budget and memory.held_bytes == 100_000
        steps = stand.engine.fake.steps
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, ShardPreemptedError) for answer in answers)
        assert all(answer.partial.token_ids for answer in answers)  # type: ignore[union-attr]
        await asyncio.sleep(0.02)
        assert stand.engine.fake.steps == steps
        with pytest.raises(ShardPreemptedError):
            await stand.ask(1)

    run(scenario)


def test_a_request_that_is_still_preprocessed_is_waited_for_and_aborted_by_internal_id() -> None:
    async def scenario(stand: Stand) -> None:
        ask = asyncio.ensure_future(stand.ask(10_000))
        await asyncio.sleep(0.01)
        stand.serving.gate.close(2)
        report = await stand.control.drain(timeout_s=2)
        assert report.idle and report.aborted == 1
        assert report.seconds > 0.05
        assert isinstance(
            (await asyncio.gather(ask, return_exceptions=True))[0], ShardPreemptedError
        )
        assert stand.engine.aborted and all(internal for _, internal in stand.engine.aborted)

    run(scenario, admission_delay_s=0.1)


def test_all_requests_are_aborted_though_one_is_not_in_the_table_yet() -> None:
    async def scenario(stand: Stand) -> None:
        asks = [asyncio.ensure_future(stand.ask(10_000, f"r{n}")) for n in range(2)]
        await asyncio.sleep(0.01)
        assert await stand.serving.abort_all(timeout_s=2) == 2
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, ShardPreemptedError) for answer in answers)
        assert stand.serving.gate.is_open

    run(scenario, admission_delay_s=0.1)


def test_a_drain_that_cannot_finish_says_what_is_left_and_does_not_sleep() -> None:
    async def scenario(stand: Stand) -> None:
        ask = asyncio.ensure_future(stand.ask(10_000))
        await asyncio.sleep(0.01)
        stand.engine.delay_s["pause"] = 5.0
        stand.serving.gate.close(2)
        report = await stand.control.drain(timeout_s=0.2)
        assert not report.idle and report.leftover == 1 and report.seconds < 1
        with pytest.raises(ShardFailedError, match="busy"):
            await stand.control.sleep(level=2, timeout_s=1)
        assert not stand.control.asleep
        ask.cancel()

    run(scenario)


def test_a_sleeping_engine_is_looked_at_and_not_touched() -> None:
    async def scenario(stand: Stand) -> None:
        await stand.shrink()
        before = list(stand.engine.aborted)
        parked = asyncio.ensure_future(stand.engine.fake.generate("parked", PROMPT, 3))
        await asyncio.sleep(0.01)
        report = await stand.control.drain(timeout_s=0.1)
        assert report.leftover == 1 and not report.idle
        assert stand.engine.aborted == before
        with pytest.raises(ShardFailedError, match="sleeps"):
            await stand.serving.abort_all(timeout_s=1)
        with pytest.raises(ShardFailedError, match="sleeps"):
            await stand.control.pause_keep(clear_cache=True, timeout_s=1)
        parked.cancel()

    run(scenario)


@pytest.mark.parametrize("resumes_early", [False, True])
def test_no_step_between_two_wakes_whichever_version(resumes_early: bool) -> None:
    async def scenario(stand: Stand) -> None:
        await stand.shrink()
        await stand.control.wake(tags=("weights",), timeout_s=1)
        assert stand.engine.fake.paused
        parked = asyncio.ensure_future(stand.engine.fake.generate("parked", PROMPT, 3))
        await asyncio.sleep(0.02)
        parked.cancel()
        await asyncio.sleep(0)
        report = await stand.control.receive(_handle(2), timeout_s=1)
        assert not report.missing
        await stand.control.finalize_weights(timeout_s=1)
        for _ in range(2):
            await stand.control.wake(tags=("weights", "kv_cache"), timeout_s=1)
        assert not stand.engine.fake.paused
        stand.serving.open(3, 2)
        assert await stand.ask(6) == reference_tokens(2, PROMPT, 6)
        assert stand.engine.finalized == 1

    run(scenario, resumes_early=resumes_early)


def test_a_shard_taken_between_its_two_wakes_gives_all_memory_back() -> None:
    async def scenario(stand: Stand) -> None:
        await stand.shrink()
        await stand.control.wake(tags=("weights",), timeout_s=1)
        assert (await stand.control.drain(timeout_s=1)).idle
        memory = await stand.control.sleep(level=2, timeout_s=1)
        assert memory.within_budget and stand.engine.fake.asleep

    run(scenario)


def _handle(version: int) -> Any:
    """What the fake workers need of a cache handle; pickled on the way."""
    return _Version(version)


class _Version(int):
    @property
    def weights_version(self) -> int:
        return int(self)


@pytest.mark.parametrize(
    ("prepare", "match"),
    [("asleep", "asleep"), ("incomplete", "version -1"), ("older", "version 1, not 2")],
)
def test_admission_opens_only_for_complete_weights_of_that_version(
    prepare: str, match: str
) -> None:
    async def scenario(stand: Stand) -> None:
        if prepare != "older":
            await stand.shrink()
        if prepare == "incomplete":
            await stand.control.wake(tags=("weights", "kv_cache"), timeout_s=1)
            stand.engine.missing = frozenset({"head"})
            assert (await stand.control.receive(_handle(2), timeout_s=1)).missing == ["head"]
        with pytest.raises(ShardFailedError, match=match):
            stand.serving.open(3, 2)

    run(scenario)


def test_an_update_in_place_keeps_requests_and_a_late_resume_wakes_nobody() -> None:
    async def scenario(stand: Stand) -> None:
        ask = asyncio.ensure_future(stand.ask(300))
        await asyncio.sleep(0.03)
        epoch = await stand.control.pause_keep(clear_cache=True, timeout_s=1)
        await stand.control.receive(_handle(2), timeout_s=1)
        stand.serving.open(2, 2)
        assert await stand.control.resume(pause_epoch=epoch, timeout_s=1)
        assert not await stand.control.resume(pause_epoch=epoch, timeout_s=1)
        tokens = await ask
        assert len(tokens) == 300
        assert tokens != reference_tokens(1, PROMPT, 300)
        epoch = await stand.control.pause_keep(clear_cache=False, timeout_s=1)
        later = await stand.control.pause_keep(clear_cache=False, timeout_s=1)
        assert not await stand.control.resume(pause_epoch=epoch, timeout_s=1)
        assert stand.engine.fake.paused
        assert await stand.control.resume(pause_epoch=later, timeout_s=1)
        epoch = await stand.control.pause_keep(clear_cache=False, timeout_s=1)
        await stand.shrink()
        assert not await stand.control.resume(pause_epoch=epoch, timeout_s=1)
        assert stand.engine.fake.paused

    run(scenario)


@pytest.mark.parametrize(
    ("late", "act"),
    [
        ("pause", lambda c: c.pause_keep(clear_cache=True, timeout_s=0.1)),
        ("rlix_receive_shm", lambda c: c.receive(_handle(2), timeout_s=0.1)),
        ("rlix_finalize", lambda c: c.finalize_weights(timeout_s=0.1)),
        ("sleep", lambda c: c.sleep(level=2, timeout_s=0.1)),
        ("rlix_memory", lambda c: c.memory(timeout_s=0.1)),
        ("rlix_ping", lambda c: c.ping(timeout_s=0.1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_call_has_a_deadline(late: str, act: Any) -> None:
    async def scenario(stand: Stand) -> None:
        stand.engine.delay_s[late] = 30.0
        with pytest.raises(DeadlineExceededError, match="shard 0"):
            await act(stand.control)

    run(scenario)


def test_a_dead_engine_sends_its_callers_elsewhere_and_fails_control_calls() -> None:
    async def scenario(stand: Stand) -> None:
        ask = asyncio.ensure_future(stand.ask(10_000))
        await asyncio.sleep(0.02)
        stand.engine.fake.stop("killed by the kernel")
        answer = (await asyncio.gather(ask, return_exceptions=True))[0]
        assert isinstance(answer, ShardPreemptedError) and not answer.partial.token_ids
        with pytest.raises(ShardPreemptedError):
            await stand.ask(1)
        with pytest.raises(ShardFailedError, match="has ended"):
            await stand.control.ping(timeout_s=1)

    run(scenario)


def test_a_kill_ends_callers_and_what_another_act_waits_for() -> None:
    async def scenario(stand: Stand) -> None:
        asks = [asyncio.ensure_future(stand.ask(10_000, f"r{n}")) for n in range(3)]
        await asyncio.sleep(0.02)
        stand.engine.delay_s["rlix_ping"] = 0.5
        stuck = asyncio.ensure_future(stand.control.ping(timeout_s=5))
        await asyncio.sleep(0.01)
        assert await stand.control.kill(timeout_s=2) == 0
        answers = await asyncio.gather(*asks, return_exceptions=True)
        assert all(isinstance(answer, ShardPreemptedError) for answer in answers)
        assert isinstance(
            (await asyncio.gather(stuck, return_exceptions=True))[0], ShardFailedError
        )
        assert stand.engine.shut_down and stand.control.dead
        assert stand.serving.gate.in_flight == 0

    run(scenario)


def test_calls_from_other_threads_run_on_the_engines_loop() -> None:
    async def scenario(stand: Stand) -> None:
        here, seen = threading.get_ident(), []
        reset = stand.engine.fake.reset_prefix_cache

        def recording() -> bool:
            seen.append(threading.get_ident())
            return reset()

        stand.engine.fake.reset_prefix_cache = recording  # type: ignore[method-assign]

        def elsewhere() -> bool:
            return asyncio.run(stand.control.reset_prefix_cache(timeout_s=2))

        assert await asyncio.to_thread(elsewhere)
        assert seen == [here]

    run(scenario)


def test_a_request_may_be_given_fewer_tokens_than_the_recipe_allows() -> None:
    async def scenario(stand: Stand) -> None:
        params = SimpleNamespace(max_tokens=50, output_kind=SimpleNamespace(name="CUMULATIVE"))
        with stand.serving.admit(max_new_tokens=4) as admitted:
            async for _ in stand.engine.generate(
                prompt={"prompt_token_ids": PROMPT}, sampling_params=params, request_id="r"
            ):
                pass
        assert len(admitted.records[0].token_ids) == 4
        assert admitted.records[0].segments[0].weights_version == 1

    run(scenario)
