"""A vLLM shard in a Ray actor under the core's own owner, with every call timed."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from nemo_rl_rlix.settings import Deadlines, WeightCacheSettings
from nemo_rl_rlix.shards.owner import ShardOwner
from nemo_rl_rlix.shards.sequences import SequenceContext
from nemo_rl_rlix.shards.table import ShardTable
from nemo_rl_rlix.vllm.options import ShardSettings
from nemo_rl_rlix.vllm.shard import VllmShard
from nemo_rl_rlix.vllm.standalone import StandaloneShardWorker
from nemo_rl_rlix.vllm.worker import CONTROL_CONCURRENCY, CONTROL_GROUP
from nemo_rl_rlix.weights.book import CacheBook
from nemo_rl_rlix.weights.cache import CpuWeightCache

ROOT = Path(__file__).resolve().parents[1]
MIB = 1 << 20
ENVIRONMENT = {
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # NeMo RL's own calls carry dtypes
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "RAY_worker_niceness": "0",
}


class BenchWorker(StandaloneShardWorker):
    """A worker that also tells how many callers it has, and takes NeMo RL's refit info."""

    async def callers(self) -> int:
        """Callers behind the gate."""
        return self._rlix().gate.in_flight

    async def prepare_ipc(self, info: dict[str, Any]) -> str:
        """Tell the extension what a CUDA-IPC sender will send; the socket's address."""
        await self.llm.collective_rpc("prepare_refit_info", args=(info,))
        return (await self.llm.collective_rpc("get_zmq_address"))[0]


class TimedShard(VllmShard):
    """Notes ``(method, start, end)`` of each remote call."""

    def __init__(self, dp_rank: int, leader: Any) -> None:
        super().__init__(dp_rank, leader)
        self.calls: list[tuple[str, float, float]] = []

    def _call(self, method: str, *args: object, timeout_s: float) -> Any:
        started = time.perf_counter()
        try:
            return super()._call(method, *args, timeout_s=timeout_s)
        finally:
            self.calls.append((method, started, time.perf_counter()))

    def take_calls(self) -> list[tuple[str, float, float]]:
        """The calls since the last look."""
        calls, self.calls = self.calls, []
        return calls


def seconds_of(calls: list[tuple[str, float, float]], *methods: str) -> float:
    """Time spent in some of the calls."""
    return sum(end - start for method, start, end in calls if method in methods)


@dataclass
class Stand:
    """One pipeline with one shard."""

    shard: TimedShard
    owner: ShardOwner
    table: ShardTable
    book: CacheBook
    cache: CpuWeightCache
    versions: int = 0

    def build(self, named_tensors: Any) -> Any:
        """Build the cache of the next version; nobody is told yet."""
        slot = self.book.begin_build(30.0)
        handle = self.cache.build(self.versions, slot, named_tensors)
        self.book.commit(handle)
        self.versions += 1
        return handle

    def refresh(self) -> Any:
        """Update what serves to the newest cache, and publish it."""
        return self.owner.refresh_and_publish(self.versions - 1)

    def publish(self, named_tensors: Any) -> Any:
        """Build and publish the next version."""
        handle = self.build(named_tensors)
        self.refresh()
        return handle


def engine_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Arguments of an engine with random weights."""
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_sleep_mode": True,
        "enforce_eager": True,
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "gpu_memory_utilization": 0.5,
        "kv_cache_memory_bytes": 8 << 30,
        "dtype": "bfloat16",
        "disable_log_stats": True,
        **changes,
    }


@contextlib.contextmanager
def ray_of_its_own() -> Iterator[None]:
    """A private Ray cluster with the GPUs of this machine."""
    os.environ.update(ENVIRONMENT)
    known = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(part for part in known if part)
    temp_dir = tempfile.mkdtemp(prefix="nrr-", dir="/tmp")
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * MIB,
        _temp_dir=temp_dir,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def stand(
    folder: Path,
    shapes: Any,
    *,
    bucket_mib: int,
    slots: int = 1,
    sleep_level: int = 2,
    extension_cls: str = "",
    **engine: Any,
) -> Iterator[Stand]:
    """Build one shard; it sleeps, and nothing is published yet."""
    deadlines = Deadlines(build_s=240.0, receive_s=120.0)
    cache = CpuWeightCache(
        "bench",
        WeightCacheSettings(bucket_mib=bucket_mib, slots=slots),
        str(ray.get_runtime_context().get_node_id()),
    )
    cache.plan(shapes)
    settings = ShardSettings("bench", sleep_level=sleep_level, build_timeout_s=240.0)
    actor = ray.remote(concurrency_groups={CONTROL_GROUP: CONTROL_CONCURRENCY})(BenchWorker)
    leader = actor.options(num_cpus=1, num_gpus=0.01, max_concurrency=1000).remote(
        engine_arguments(folder, **engine), settings, extension_cls
    )
    shard = TimedShard(0, leader)
    table, book = ShardTable([0]), CacheBook(slots)
    context = SequenceContext(table, book, deadlines, sleep_level, True)
    owner = ShardOwner({0: shard}, context, name="bench")
    try:
        owner.build()
        yield Stand(shard, owner, table, book, cache)
    finally:
        owner.close()
        ray.kill(leader)
        cache.close()
