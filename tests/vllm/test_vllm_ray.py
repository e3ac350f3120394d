"""A shard in a real Ray actor: typed errors through streams, its life, its end."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from vllm_bench import Checkpoint, engine_arguments

from nemo_rl_rlix.errors import (
    PartialGeneration,
    ShardFailedError,
    ShardPreemptedError,
)
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest, join_output

pytestmark = [pytest.mark.timeout(600), pytest.mark.ray]

BUILD_S = 240.0
PROMPT = (5, 9, 17, 33, 65, 129)


@dataclass
class Stand:
    shard: Any
    handle: Any
    epoch: int = 0

    def bring_in(self) -> None:
        shard = self.shard
        shard.wake(tags=("weights",), timeout_s=30)
        report = shard.receive(self.handle, timeout_s=60)
        assert not report.missing and not report.unexpected
        shard.finalize_weights(timeout_s=30)
        shard.wake(tags=("kv_cache",), timeout_s=30)
        assert shard.reset_prefix_cache(timeout_s=30)
        shard.probe(timeout_s=60)
        self.epoch += 1
        shard.open_admission(epoch=self.epoch, weights_version=1, timeout_s=10)

    def take(self) -> Any:
        self.epoch += 1
        self.shard.close_admission(epoch=self.epoch, timeout_s=10)
        report = self.shard.drain(timeout_s=20)
        self.shard.sleep(level=2, timeout_s=30)
        return report


@pytest.fixture(scope="module")
def stand(checkpoints: dict[int, Checkpoint]) -> Iterator[Stand]:
    import ray

    from nemo_rl_rlix.vllm.options import ShardSettings
    from nemo_rl_rlix.vllm.shard import VllmShard
    from nemo_rl_rlix.vllm.standalone import StandaloneShardWorker
    from nemo_rl_rlix.vllm.worker import CONTROL_CONCURRENCY, CONTROL_GROUP
    from nemo_rl_rlix.weights.cache import CpuWeightCache
    from nemo_rl_rlix.weights.dtypes import spec_of

    temp_dir = tempfile.mkdtemp(prefix="nrr-", dir="/tmp")
    ray.init(
        address="local",
        num_cpus=4,
        object_store_memory=128 << 20,
        include_dashboard=False,
        _temp_dir=temp_dir,
    )
    node_id = ray.get_runtime_context().get_node_id()
    cache = CpuWeightCache("test", WeightCacheSettings(bucket_mib=1, slots=1), node_id)
    cache.plan([spec_of(name, tensor) for name, tensor in checkpoints[1].weights])
    handle = cache.build(1, 0, checkpoints[1].weights)
    actor_class = ray.remote(concurrency_groups={CONTROL_GROUP: CONTROL_CONCURRENCY})(
        StandaloneShardWorker
    )
    arguments = engine_arguments(checkpoints[1].folder, kv_cache_memory_bytes=1 << 28)
    leader = actor_class.options(num_cpus=0).remote(
        arguments, ShardSettings("test", worker_cls=""), "cpu_extension.CpuExtension"
    )
    shard = VllmShard(0, leader)
    shard.build(timeout_s=BUILD_S)
    yield Stand(shard, handle)
    shard.kill(timeout_s=30)
    ray.shutdown()
    cache.close()
    shutil.rmtree(temp_dir, ignore_errors=True)


def request(count: int, prior: PartialGeneration | None = None, name: str = "r") -> Any:
    return GenerationRequest(
        name, PROMPT, count, temperature=0.0, prior=prior or PartialGeneration()
    )


def answer(stand: Stand, wanted: GenerationRequest) -> GenerationOutput:
    import ray

    return ray.get(stand.shard.leader.generate.remote(wanted), timeout=120)


def test_a_shrink_reaches_the_readers_of_streams_typed_and_they_can_go_on(stand: Stand) -> None:
    import ray

    from nemo_rl_rlix.ray_errors import unwrap

    with pytest.raises(ShardPreemptedError):
        answer(stand, request(1))  # built, asleep, closed
    stand.bring_in()
    whole = answer(stand, request(60))
    assert len(whole.token_ids) == 60
    streams = [
        stand.shard.leader.generate_stream.remote(request(1800, name=f"s{n}")) for n in range(3)
    ]
    for stream in streams:
        while len(ray.get(next(stream), timeout=60).token_ids) < 5:
            pass
    assert not ray.get(stand.shard.leader.is_idle.remote(), timeout=10)
    report = stand.take()
    assert report.idle and report.aborted == 3
    assert ray.get(stand.shard.leader.is_idle.remote(), timeout=10)
    for stream in streams:
        with pytest.raises(ShardPreemptedError) as caught:
            while True:
                ray.get(next(stream), timeout=60)
        error = unwrap(caught.value)
        assert type(error) is ShardPreemptedError
        partial = error.partial
        assert 5 <= len(partial.token_ids) < 1800
        assert len(partial.logprobs) == len(partial.token_ids)
    stand.bring_in()
    short = PartialGeneration(partial.token_ids[:20], partial.logprobs[:20])
    rest = answer(stand, request(60, short))
    assert join_output(short, rest).token_ids == whole.token_ids


def test_all_requests_can_be_aborted_by_the_workers_own_table(stand: Stand) -> None:
    import ray

    ref = stand.shard.leader.generate.remote(request(1800))
    deadline = time.monotonic() + 60
    while ray.get(stand.shard.leader.is_idle.remote(), timeout=10):
        assert time.monotonic() < deadline
    assert ray.get(stand.shard.leader.abort_all_requests.remote(), timeout=20) == 1
    with pytest.raises(ShardPreemptedError):
        ray.get(ref, timeout=30)


def test_an_engine_that_is_ended_in_mid_request_can_be_built_again(stand: Stand) -> None:
    import ray

    from nemo_rl_rlix.vllm.processes import start_time

    ref = stand.shard.leader.generate.remote(request(1800))
    while ray.get(stand.shard.leader.is_idle.remote(), timeout=10):
        time.sleep(0.02)
    before = dict(stand.shard.identity.processes)
    report = stand.shard.kill(timeout_s=30)
    assert report.held_bytes == 0
    with pytest.raises(ShardPreemptedError) as caught:
        ray.get(ref, timeout=30)
    assert not caught.value.partial.token_ids
    with pytest.raises(ShardFailedError, match="build it first"):
        stand.shard.ping(timeout_s=10)
    assert stand.shard.kill(timeout_s=10).held_bytes == 0
    starting = ThreadPoolExecutor(1).submit(stand.shard.build, timeout_s=BUILD_S)
    time.sleep(4)
    assert stand.shard.kill(timeout_s=60).held_bytes == 0
    with pytest.raises(ShardFailedError):
        starting.result(30)
    stand.shard.build(timeout_s=BUILD_S)
    after = stand.shard.identity.processes
    gone = set(before) - set(after)
    assert gone and all(start_time(pid) != before[pid] for pid in gone)
    stand.shard.ping(timeout_s=30)
    stand.bring_in()
    assert len(answer(stand, request(8)).token_ids) == 8
