"""Control of a real engine: aborts, admission, pauses, weights."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_bench import Checkpoint, LoopThread, engine_arguments

from nemo_rl_rlix.errors import CoverageError, ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.weights.sync import check_coverage

pytestmark = pytest.mark.timeout(300)

PROMPT = [5, 9, 17, 33, 65, 129]
NODE = "node-of-this-test"


@dataclass
class Bench:
    """An engine with gate and control, and what the trainer would have."""

    loop: LoopThread
    engine: Any
    serving: Any
    control: Any
    handles: dict[int, Any]

    def sync(self, version: int, handle: Any = None) -> Any:
        report = self.loop.run(self.control.receive(handle or self.handles[version], timeout_s=30))
        check_coverage(0, report)
        self.loop.run(self.control.finalize_weights(timeout_s=30))
        return report

    def open(self, version: int) -> None:
        self.serving.open(self.serving.gate.epoch + 1, version)

    async def ask(self, count: int, started: asyncio.Event | None = None, gate: Any = None) -> Any:
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False, logprobs=0
        )
        last = None
        with self.serving.admit() as admitted:
            async for output in self.engine.generate(
                prompt={"prompt_token_ids": PROMPT},
                sampling_params=params,
                request_id=f"ask-{id(admitted)}",
            ):
                last = output
                if started is not None and len(output.outputs[0].token_ids) >= 3:
                    started.set()
        return list(last.outputs[0].token_ids), (admitted.records or [None])[0]

    def answer(self, count: int = 16) -> list[int]:
        return self.loop.run(self.ask(count))[0]


def make_engine(loop: LoopThread, folder: Path, **changes: Any) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def make() -> Any:
        arguments = AsyncEngineArgs(**engine_arguments(folder, **changes))
        return AsyncLLM.from_engine_args(arguments)

    return loop.run(make(), 200)


@pytest.fixture(scope="module")
def bench(checkpoints: dict[int, Checkpoint]) -> Iterator[Bench]:
    from nemo_rl_rlix.vllm.engine_control import EngineControl
    from nemo_rl_rlix.vllm.extension import ExtensionConfig
    from nemo_rl_rlix.vllm.serving import Serving
    from nemo_rl_rlix.weights.cache import CpuWeightCache
    from nemo_rl_rlix.weights.dtypes import spec_of

    loop = LoopThread()
    settings = WeightCacheSettings(bucket_mib=1, slots=2)
    cache = CpuWeightCache("test", settings, NODE)
    cache.plan([spec_of(name, tensor) for name, tensor in checkpoints[1].weights])
    handles = {
        version: cache.build(version, version - 1, checkpoint.weights)
        for version, checkpoint in checkpoints.items()
    }
    engine = make_engine(loop, checkpoints[1].folder)
    serving = Serving(0)

    async def bind() -> Any:
        return serving.bind(
            engine,
            lambda gate: EngineControl(engine, dp_rank=0, gate=gate, sleeping_budget_bytes=0),
        )

    control = loop.run(bind())
    config = ExtensionConfig("test", 0, 2, {socket.gethostname(): NODE})
    loop.run(control.worker_rpc("rlix_attach", config, timeout_s=20))
    yield Bench(loop, engine, serving, control, handles)
    loop.run(control.kill(timeout_s=20))
    loop.stop()
    cache.close()


@pytest.fixture
def serving_1(bench: Bench) -> Bench:
    """Version 1, open."""
    bench.sync(1)
    bench.open(1)
    return bench


def test_an_abort_in_mid_generation_carries_the_tokens_so_far(serving_1: Bench) -> None:
    bench = serving_1
    whole = bench.answer(40)

    async def preempt() -> tuple[list[Any], Any]:
        events = [asyncio.Event() for _ in range(4)]
        asks = [asyncio.ensure_future(bench.ask(1500, event)) for event in events]
        await asyncio.gather(*(event.wait() for event in events))
        bench.serving.gate.close(7)
        report = await bench.control.drain(timeout_s=10)
        return await asyncio.gather(*asks, return_exceptions=True), report

    answers, report = bench.loop.run(preempt())
    assert report.idle
    assert report.aborted == 4
    for answer in answers:
        assert isinstance(answer, ShardPreemptedError)
        tokens = answer.partial.token_ids
        assert 3 <= len(tokens) < 1500
        assert list(tokens[:40]) == whole[: len(tokens)]
        assert len(answer.partial.logprobs) == len(tokens)
        assert all(value <= 0 for value in answer.partial.logprobs)
        assert [segment.weights_version for segment in answer.partial.segments] == [1]
        assert answer.epoch == 7
    assert bench.control.idle
    with pytest.raises(ShardPreemptedError):
        bench.answer(1)
    bench.loop.run(bench.engine.resume_generation())


def test_a_request_on_its_way_into_the_table_does_not_survive(
    serving_1: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = serving_1
    add_request = bench.engine.add_request

    async def late(*args: Any, **kwargs: Any) -> Any:
        await asyncio.sleep(0.15)
        return await add_request(*args, **kwargs)

    monkeypatch.setattr(bench.engine, "add_request", late)

    async def preempt() -> tuple[Any, Any]:
        ask = asyncio.ensure_future(bench.ask(1500))
        await asyncio.sleep(0.02)  # past the gate, in no table
        bench.serving.gate.close(bench.serving.gate.epoch)
        report = await bench.control.drain(timeout_s=10)
        return report, (await asyncio.gather(ask, return_exceptions=True))[0]

    report, outcome = bench.loop.run(preempt())
    assert report.idle and report.seconds > 0.12
    assert isinstance(outcome, ShardPreemptedError)
    bench.loop.run(bench.engine.resume_generation())


@pytest.mark.parametrize("clear_cache", [True, False])
def test_an_update_in_place_aborts_nobody_and_changes_the_tokens_after(
    serving_1: Bench, clear_cache: bool
) -> None:
    bench = serving_1
    undisturbed = bench.answer(200)

    async def refresh() -> tuple[list[int], Any, bool, bool]:
        event = asyncio.Event()
        ask = asyncio.ensure_future(bench.ask(200, event))
        await event.wait()
        epoch = await bench.control.pause_keep(clear_cache=clear_cache, timeout_s=10)
        check_coverage(0, await bench.control.receive(bench.handles[2], timeout_s=30))
        await bench.control.finalize_weights(timeout_s=30)
        forgotten = await bench.control.reset_prefix_cache(timeout_s=10)
        bench.open(2)
        resumed = await bench.control.resume(pause_epoch=epoch, timeout_s=10)
        tokens, record = await ask
        return tokens, record, forgotten, resumed

    tokens, record, forgotten, resumed = bench.loop.run(refresh())
    assert resumed
    # Running requests hold blocks unless the pause took them away.
    assert forgotten == clear_cache
    assert len(tokens) == 200
    assert [segment.weights_version for segment in record.segments] == [1, 2]
    kept = record.segments[0].num_tokens
    assert tokens[:kept] == undisturbed[:kept]
    assert tokens != undisturbed
    bench.loop.run(bench.control.reset_prefix_cache(timeout_s=10))


def test_a_resume_after_another_act_does_nothing(serving_1: Bench) -> None:
    bench = serving_1
    epoch = bench.loop.run(bench.control.pause_keep(clear_cache=False, timeout_s=10))
    later = bench.loop.run(bench.control.pause_keep(clear_cache=False, timeout_s=10))
    assert bench.loop.run(bench.control.resume(pause_epoch=epoch, timeout_s=10)) is False
    assert bench.loop.run(bench.engine.is_paused())
    assert bench.loop.run(bench.control.resume(pause_epoch=later, timeout_s=10)) is True
    assert bench.answer(4)


def test_weights_from_shared_memory_equal_those_from_files(
    bench: Bench, checkpoints: dict[int, Checkpoint]
) -> None:
    answers = {}
    for version in (1, 2, 1):
        report = bench.sync(version)
        assert report.nbytes == sum(t.nbytes for _, t in checkpoints[version].weights)
        assert "model.layers.0.self_attn.qkv_proj.weight" in report.loaded
        assert bench.loop.run(bench.control.reset_prefix_cache(timeout_s=10))
        bench.open(version)
        answer = bench.answer(64)
        assert answers.setdefault(version, answer) == answer
    assert answers[1] != answers[2]
    # Built in the same process setup, loaded by vLLM from disk.
    fresh = make_engine(bench.loop, checkpoints[2].folder, load_format="auto")
    try:
        other = Bench(bench.loop, fresh, bench.serving, bench.control, {})
        assert other.answer(64) == answers[2]
    finally:
        fresh.shutdown()


def test_a_set_with_one_part_of_a_fused_tensor_missing_is_not_accepted(
    bench: Bench, checkpoints: dict[int, Checkpoint]
) -> None:
    from nemo_rl_rlix.weights.cache import CpuWeightCache
    from nemo_rl_rlix.weights.dtypes import spec_of

    weights = [
        item for item in checkpoints[1].weights if "layers.1.self_attn.k_proj.weight" not in item[0]
    ]
    with contextlib.closing(CpuWeightCache("part", WeightCacheSettings(slots=1), NODE)) as cache:
        cache.plan([spec_of(name, tensor) for name, tensor in weights])
        handle = cache.build(3, 0, weights)
        with pytest.raises(CoverageError) as caught:
            bench.sync(3, handle)
    assert caught.value.missing == ["model.layers.1.self_attn.qkv_proj.weight"]
    with pytest.raises(ShardFailedError):
        bench.open(3)


def test_calls_from_another_thread_and_loop_reach_the_engine(serving_1: Bench) -> None:
    bench = serving_1
    seen: list[Any] = []

    def elsewhere() -> None:
        async def act() -> Any:
            await bench.control.probe(timeout_s=20)
            return await bench.control.reset_prefix_cache(timeout_s=10)

        seen.append(asyncio.run(act()))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join(40)
    assert seen == [True]


def test_sleep_and_wake_are_idempotent_and_an_asleep_engine_is_left_alone(
    serving_1: Bench,
) -> None:
    bench, run = serving_1, serving_1.loop.run
    bench.serving.gate.close(bench.serving.gate.epoch)
    assert run(bench.control.drain(timeout_s=10)).idle
    for _ in range(2):
        assert run(bench.control.sleep(level=2, timeout_s=20)).held_bytes >= 0
    assert bench.control.asleep
    assert run(bench.control.drain(timeout_s=10)).idle
    run(bench.control.ping(timeout_s=10))
    with pytest.raises(ShardFailedError, match="asleep"):
        bench.open(1)
    run(bench.control.wake(tags=("weights",), timeout_s=20))
    assert run(bench.engine.is_paused())
    bench.sync(1)
    for _ in range(2):
        run(bench.control.wake(tags=("kv_cache",), timeout_s=20))
    assert not run(bench.engine.is_paused())
    run(bench.control.probe(timeout_s=20))
    bench.open(1)
    assert bench.answer(4)
