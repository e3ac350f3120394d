"""One reference shard as a Ray actor: gate, abort, kill, weights over shared memory."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import ray

from nemo_rl_rlix.errors import (
    DeadlineExceededError,
    PartialGeneration,
    ShardFailedError,
    ShardPreemptedError,
)
from nemo_rl_rlix.reference.device import LogicalGpu, create_logical_gpus
from nemo_rl_rlix.reference.engine import ContinuousBatchingEngine, EngineConfig, TokenDelta
from nemo_rl_rlix.reference.ledger import process_start_time
from nemo_rl_rlix.reference.model import ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.shard import RayReferenceShard, ShardEndpoint
from nemo_rl_rlix.reference.worker import ShardWorkerConfig
from nemo_rl_rlix.settings import Deadlines, WeightCacheSettings
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.sync import sync_shard
from nemo_rl_rlix.weights.types import CacheHandle, TensorSpec

pytestmark = pytest.mark.ray

MODEL = ModelConfig(vocab_size=32, width=32, layers=2, heads=4, hidden=48, max_len=2048)
ENGINE = EngineConfig(model=MODEL, max_num_seqs=8, prefix_cache_bytes=64 * 1024)
OWNER = "shardtest_actor_infer"
T = 20.0
LONG = GenerationRequest("long", (1, 2, 3), 2000, seed=1)
EPOCHS = itertools.count()  # the gate ignores older ones
SHORT = GenerationRequest("short", (1, 2, 3), 5, temperature=0.0)


@pytest.fixture(scope="module")
def gpu(ray_cluster: str, tmp_path_factory: pytest.TempPathFactory) -> LogicalGpu:
    directory = tmp_path_factory.mktemp("gpus")
    return LogicalGpu(create_logical_gpus(directory, 2, 64 * 1024 * 1024)[0])


@pytest.fixture(scope="module")
def built(gpu: LogicalGpu) -> Iterator[RayReferenceShard]:
    config = ShardWorkerConfig("shardtest", 0, OWNER, gpu.spec, ENGINE, admission_delay_s=0.0)
    shard = RayReferenceShard(config, {"num_cpus": 0.5, "num_gpus": 0.5})
    gpu.grant(OWNER)
    shard.build(timeout_s=60)
    yield shard
    assert shard.kill(timeout_s=T).held_bytes == 0


@pytest.fixture(scope="module")
def caches(ray_cluster: str) -> Iterator[dict[int, CacheHandle]]:
    cache = CpuWeightCache(
        "shardtest", WeightCacheSettings(slots=2), ray.get_runtime_context().get_node_id()
    )
    models = [ReferenceModel(MODEL, seed=seed) for seed in (100, 101)]
    named = [[(n, p.detach()) for n, p in model.named_parameters()] for model in models]
    cache.plan(
        [TensorSpec(n, tuple(p.shape), "float32", p.nbytes) for n, p in named[0]],
        tuple(models[0].ties().items()),
    )
    yield {version: cache.build(version, version, named[version]) for version in (0, 1)}
    cache.close()


@pytest.fixture
def shard(built: RayReferenceShard, caches: dict[int, CacheHandle]) -> Iterator[RayReferenceShard]:
    """The shard, serving version 0 at epoch 1; afterwards asleep again."""
    bring_in(built, caches[0])
    yield built
    if built.identity is None:
        built.build(timeout_s=60)
    built.close_admission(epoch=next(EPOCHS), timeout_s=T)
    assert built.drain(timeout_s=T).idle
    assert built.sleep(level=2, timeout_s=T).held_bytes == 0


def bring_in(shard: RayReferenceShard, handle: CacheHandle) -> None:
    shard.wake(tags=("weights",), timeout_s=T)
    sync_shard(shard, handle, Deadlines())
    shard.wake(tags=("kv_cache",), timeout_s=T)
    assert shard.reset_prefix_cache(timeout_s=T)
    shard.probe(timeout_s=T)
    shard.open_admission(epoch=next(EPOCHS), weights_version=handle.weights_version, timeout_s=T)


class Background:
    """Requests in a thread with an event loop of its own, as rollout threads have."""

    def __init__(self, endpoint: ShardEndpoint, requests: list[GenerationRequest]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self._future = self._pool.submit(asyncio.run, self._all(endpoint, requests))

    async def _all(self, endpoint: ShardEndpoint, requests: list[GenerationRequest]) -> list:
        async with asyncio.timeout(60):
            return await asyncio.gather(
                *(endpoint.generate(r) for r in requests), return_exceptions=True
            )

    def results(self) -> list:
        return self._future.result(60)


def generate(shard: RayReferenceShard, request: GenerationRequest) -> GenerationOutput:
    return asyncio.run(asyncio.wait_for(shard.endpoint.generate(request), 60))


def wait_until(condition, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come about"
        time.sleep(0.01)


def in_flight(shard: RayReferenceShard) -> int:
    return shard.stats(timeout_s=T).in_flight


def test_answers_equal_those_of_an_engine_that_never_slept(shard: RayReferenceShard) -> None:
    fresh = ContinuousBatchingEngine(replace(ENGINE, seed=100))
    fresh.add(SHORT)
    while fresh.step():
        pass
    (expected,) = fresh.take_outputs()
    answer = generate(shard, SHORT)
    assert answer.token_ids == expected.generation.token_ids
    assert answer.logprobs == expected.generation.logprobs, "bit-equal"
    assert answer.segments[0].weights_version == 0 and answer.dp_rank == 0
    assert (answer.request_id, answer.finish_reason) == ("short", "length")


def test_a_closed_gate_raises_a_typed_error_that_survives_pickling(
    shard: RayReferenceShard,
) -> None:
    closed = next(EPOCHS)
    shard.close_admission(epoch=closed, timeout_s=T)
    with pytest.raises(ShardPreemptedError) as caught:
        generate(shard, SHORT)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is ShardPreemptedError
    assert (again.dp_rank, again.epoch, again.partial) == (0, closed, PartialGeneration())
    shard.open_admission(epoch=next(EPOCHS), weights_version=0, timeout_s=T)
    assert len(generate(shard, SHORT).token_ids) == 5


def test_a_shrink_gives_every_caller_its_partial_answer(shard: RayReferenceShard) -> None:
    requests = [replace(LONG, request_id=f"r{i}", seed=i) for i in range(12)]
    before = shard.stats(timeout_s=T).steps
    running = Background(shard.endpoint, requests)
    wait_until(lambda: in_flight(shard) == 12 and shard.stats(timeout_s=T).steps > before + 60)
    started = time.monotonic()
    shard.close_admission(epoch=next(EPOCHS), timeout_s=T)
    report = shard.drain(timeout_s=5.0)
    assert shard.sleep(level=2, timeout_s=T).held_bytes == 0
    assert time.monotonic() - started < 5, "bounded, whatever the longest request wanted"
    assert report.idle and report.aborted == 12
    errors = running.results()
    assert all(isinstance(error, ShardPreemptedError) for error in errors)
    lengths = sorted(len(error.partial.token_ids) for error in errors)
    assert lengths[:4] == [0] * 4 and lengths[4] >= 10, "four of them were still waiting"
    for error in errors:
        assert len(error.partial.logprobs) == len(error.partial.token_ids)


def test_an_aborted_request_resumed_is_the_same_answer(shard: RayReferenceShard) -> None:
    request = LONG
    whole = generate(shard, request)
    before = shard.stats(timeout_s=T).steps
    running = Background(shard.endpoint, [request])
    wait_until(lambda: shard.stats(timeout_s=T).steps > before + 20)
    shard.close_admission(epoch=next(EPOCHS), timeout_s=T)
    assert shard.drain(timeout_s=T).idle
    (taken,) = running.results()
    shard.sleep(level=1, timeout_s=T)
    shard.wake(tags=("weights", "kv_cache"), timeout_s=T)
    shard.open_admission(epoch=next(EPOCHS), weights_version=0, timeout_s=T)
    rest = generate(shard, replace(request, prior=taken.partial))
    assert (*taken.partial.token_ids, *rest.token_ids) == whole.token_ids


def test_sleep_under_load_is_refused_and_the_engine_lives(shard: RayReferenceShard) -> None:
    running = Background(shard.endpoint, [replace(LONG, max_new_tokens=400)])
    wait_until(lambda: in_flight(shard) == 1)
    with pytest.raises(ShardFailedError, match="close and drain first"):
        shard.sleep(level=2, timeout_s=T)
    assert len(running.results()[0].token_ids) == 400


def test_control_calls_do_not_queue_behind_generations(shard: RayReferenceShard) -> None:
    requests = [replace(LONG, request_id=f"r{i}", max_new_tokens=40) for i in range(200)]
    running = Background(shard.endpoint, requests)
    wait_until(lambda: in_flight(shard) > 50)
    slowest = 0.0
    for _ in range(5):
        started = time.monotonic()
        shard.ping(timeout_s=T)
        slowest = max(slowest, time.monotonic() - started)
    assert in_flight(shard) > 0, "it was still busy"
    answers = running.results()
    assert slowest < 1.0
    assert sorted(a.request_id for a in answers) == sorted(r.request_id for r in requests)
    assert {len(a.token_ids) for a in answers} == {40}
    assert shard.stats(timeout_s=T).prefix_hits >= 150


def test_streaming_ends_with_the_answer_and_an_abort_with_the_partial(
    shard: RayReferenceShard,
) -> None:
    async def collect(stream: AsyncIterator) -> list:
        return [event async for event in stream]

    *deltas, answer = asyncio.run(collect(shard.endpoint.stream(SHORT)))
    assert all(isinstance(delta, TokenDelta) for delta in deltas)
    assert tuple(delta.token_id for delta in deltas) == answer.token_ids

    async def until_taken() -> tuple[int, ShardPreemptedError]:
        seen = 0
        try:
            async for _ in shard.endpoint.stream(LONG):
                seen += 1
                if seen == 10:
                    closing = asyncio.get_running_loop().run_in_executor(None, shrink)
        except ShardPreemptedError as error:
            await closing
            return seen, error
        raise AssertionError("it was not taken")

    def shrink() -> None:
        shard.close_admission(epoch=next(EPOCHS), timeout_s=T)
        shard.drain(timeout_s=T)

    seen, error = asyncio.run(asyncio.wait_for(until_taken(), 60))
    assert type(error) is ShardPreemptedError
    assert len(error.partial.token_ids) == seen >= 10


def test_cancelling_the_caller_aborts_the_request(shard: RayReferenceShard) -> None:
    async def cancel_soon() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await shard.endpoint.generate(LONG)

    asyncio.run(cancel_soon())
    wait_until(lambda: in_flight(shard) == 0)
    shard.ping(timeout_s=T)  # what was asked of the engine before is done
    steps = shard.stats(timeout_s=T).steps
    time.sleep(0.1)
    assert shard.stats(timeout_s=T).steps == steps, "nothing runs on for nobody"


def test_activation_is_refused_without_the_right_weights(
    shard: RayReferenceShard, caches: dict[int, CacheHandle]
) -> None:
    with pytest.raises(ShardFailedError, match="it holds version 0, not 1"):
        shard.open_admission(epoch=next(EPOCHS), weights_version=1, timeout_s=T)
    shard.close_admission(epoch=next(EPOCHS), timeout_s=T)
    shard.drain(timeout_s=T)
    for _ in range(2):
        assert shard.sleep(level=2, timeout_s=T).within_budget
    with pytest.raises(ShardFailedError, match=r"only \[\] of its memory is awake"):
        shard.open_admission(epoch=next(EPOCHS), weights_version=0, timeout_s=T)
    for _ in range(2):
        shard.wake(tags=("weights",), timeout_s=T)
    shard.wake(tags=("kv_cache",), timeout_s=T)
    with pytest.raises(ShardFailedError, match="discarded"):
        shard.open_admission(epoch=next(EPOCHS), weights_version=0, timeout_s=T)
    with pytest.raises(ShardFailedError, match="samples from garbage"):
        shard.probe(timeout_s=T)


def test_refresh_in_keep_mode_keeps_requests_and_stamps_versions(
    shard: RayReferenceShard, caches: dict[int, CacheHandle]
) -> None:
    running = Background(shard.endpoint, [replace(LONG, max_new_tokens=2000)])
    before = shard.stats(timeout_s=T).steps
    wait_until(lambda: shard.stats(timeout_s=T).steps > before + 20)
    epoch = shard.pause_keep(clear_cache=False, timeout_s=T)
    steps = shard.stats(timeout_s=T).steps
    time.sleep(0.05)
    assert shard.stats(timeout_s=T).steps == steps, "frozen"
    sync_shard(shard, caches[1], Deadlines())
    assert not shard.reset_prefix_cache(timeout_s=T)
    shard.open_admission(epoch=next(EPOCHS), weights_version=1, timeout_s=T)
    assert shard.resume(pause_epoch=epoch, timeout_s=T)
    (answer,) = running.results()
    assert [s.weights_version for s in answer.segments] == [0, 1]
    assert sum(s.num_tokens for s in answer.segments) == 2000
    assert not shard.resume(pause_epoch=epoch - 1, timeout_s=T)


def test_a_killed_process_frees_its_memory_and_the_endpoint_finds_the_next(
    shard: RayReferenceShard, caches: dict[int, CacheHandle], gpu: LogicalGpu
) -> None:
    first = shard.identity
    assert first is not None and gpu.held_bytes(shard.config.resident) > 0
    endpoint = shard.endpoint
    running = Background(endpoint, [LONG])
    wait_until(lambda: in_flight(shard) == 1)
    # Stopped, so that it cannot help: ending it must not need its cooperation.
    os.kill(first.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceededError, match="ping of shard 0"):
        shard.ping(timeout_s=0.3)
    report = shard.kill(timeout_s=T)
    assert report.held_bytes == 0 and report.within_budget
    assert process_start_time(first.pid) != first.start_time
    (taken,) = running.results()
    assert isinstance(taken, ShardPreemptedError)
    assert taken.epoch == -1 and taken.partial == PartialGeneration()
    with pytest.raises(ShardFailedError, match="build it first"):
        shard.ping(timeout_s=T)
    with pytest.raises(ShardPreemptedError):
        asyncio.run(endpoint.generate(SHORT))
    assert shard.kill(timeout_s=T).held_bytes == 0, "killing nothing is a no-op"

    shard.build(timeout_s=60)
    assert shard.identity is not None and shard.identity.pid != first.pid
    assert gpu.held_bytes(shard.config.resident) == 0, "built, it is asleep"
    with pytest.raises(ShardPreemptedError):
        asyncio.run(endpoint.generate(SHORT))  # and its gate is closed
    bring_in(shard, caches[0])
    copy = pickle.loads(pickle.dumps(endpoint))
    assert len(asyncio.run(copy.generate(SHORT)).token_ids) == 5
    assert len(asyncio.run(endpoint.generate(SHORT)).token_ids) == 5


def test_a_crashed_engine_sends_its_callers_elsewhere_and_fails_the_ping(
    shard: RayReferenceShard, gpu: LogicalGpu
) -> None:
    running = Background(shard.endpoint, [LONG])
    wait_until(lambda: in_flight(shard) == 1)
    gpu.revoke(OWNER)  # computing without the grant is a crash
    try:
        (taken,) = running.results()
        assert isinstance(taken, ShardPreemptedError) and taken.epoch == -1
        with pytest.raises(ShardFailedError, match="GrantRequiredError"):
            shard.ping(timeout_s=T)
        with pytest.raises(ShardPreemptedError):
            generate(shard, SHORT)
        assert {v.owner for v in gpu.violations()} == {OWNER}
    finally:
        gpu.grant(OWNER)
        assert shard.kill(timeout_s=T).held_bytes == 0


def test_a_request_between_gate_and_table_is_drained_too(
    gpu: LogicalGpu, caches: dict[int, CacheHandle]
) -> None:
    config = ShardWorkerConfig("delaytest", 1, OWNER, gpu.spec, ENGINE, admission_delay_s=0.3)
    shard = RayReferenceShard(config, {"num_cpus": 0.5})
    shard.build(timeout_s=60)
    try:
        bring_in(shard, caches[0])
        running = Background(shard.endpoint, [LONG])
        wait_until(lambda: in_flight(shard) == 1)
        shard.close_admission(epoch=next(EPOCHS), timeout_s=T)
        report = shard.drain(timeout_s=T)
        assert report.idle and report.aborted == 1
        assert in_flight(shard) == 0
        shard.sleep(level=2, timeout_s=T)
        (taken,) = running.results()
        assert isinstance(taken, ShardPreemptedError)
    finally:
        assert shard.kill(timeout_s=T).held_bytes == 0


def test_a_kill_from_another_thread_ends_a_call_that_hangs(
    shard: RayReferenceShard,
) -> None:
    identity = shard.identity
    assert identity is not None
    os.kill(identity.pid, signal.SIGSTOP)
    timer = threading.Timer(0.3, lambda: shard.kill(timeout_s=T))
    timer.start()
    with pytest.raises(ShardFailedError):
        shard.drain(timeout_s=60)
    timer.join()
