"""NeMo RL's own async worker behind the gate, over a real engine. Put a checkout into PYTHONPATH."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from vllm_bench import Checkpoint

from nemo_rl_rlix.errors import ShardPreemptedError
from nemo_rl_rlix.settings import WeightCacheSettings


def _nemo_rl_is_there() -> bool:
    spec = importlib.util.find_spec("nemo_rl")
    return spec is not None and spec.origin is not None  # not a folder of that name


pytestmark = [
    pytest.mark.timeout(600),
    pytest.mark.ray,
    pytest.mark.skipif(
        not _nemo_rl_is_there(),
        reason="NeMo RL is not importable: NEMO_RL_HOME=/path make test-vllm-cpu",
    ),
]

BUILD_S = 240.0
PROMPT = [5, 9, 17, 33, 65, 129]
PAD = 0


def generation_config(folder: Path) -> dict[str, Any]:
    from nemo_rl_rlix.vllm.options import SETTINGS_KEY, ShardSettings

    return {
        "model_name": str(folder),
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "max_new_tokens": 1500,
        "stop_token_ids": None,
        "stop_strings": None,
        "ignore_eos": True,
        "_pad_token_id": PAD,
        "vllm_kwargs": {"max_num_seqs": 8, "kv_cache_memory_bytes": 1 << 28},
        "vllm_cfg": {
            "async_engine": True,
            "precision": "float32",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 1,
            "gpu_memory_utilization": 0.1,
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": 2048,
            "enable_prefix_caching": True,
        },
        SETTINGS_KEY: ShardSettings("test", worker_cls="").to_config(),
    }


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
        self.epoch += 1
        shard.open_admission(epoch=self.epoch, weights_version=1, timeout_s=10)


@pytest.fixture(scope="module")
def stand(checkpoints: dict[int, Checkpoint]) -> Iterator[Stand]:
    import ray
    from cpu_nemo_worker import CpuNemoWorker

    from nemo_rl_rlix.vllm.shard import VllmShard
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
    groups = {CONTROL_GROUP: CONTROL_CONCURRENCY}
    actor = ray.remote(concurrency_groups=groups)(CpuNemoWorker).options(num_cpus=0)
    # Two bundles: with one NeMo RL binds the process to its GPU's memory.
    config = generation_config(checkpoints[1].folder)
    shard = VllmShard(0, actor.remote(config, bundle_indices=[0, 1], seed=0))
    shard.build(timeout_s=BUILD_S)
    yield Stand(shard, handle)
    shard.kill(timeout_s=30)
    ray.shutdown()
    cache.close()
    shutil.rmtree(temp_dir, ignore_errors=True)


def ask(stand: Stand, tokens: list[int], limit: int | None = None) -> Any:
    return stand.shard.leader.ask.remote(tokens, limit)


def test_answers_of_nemo_rl_carry_the_versions_of_their_tokens(stand: Stand) -> None:
    import ray

    from nemo_rl_rlix.errors import Segment

    with pytest.raises(ShardPreemptedError):
        ray.get(ask(stand, PROMPT, 4), timeout=60)
    stand.bring_in()
    index, batch, segments = ray.get(ask(stand, PROMPT, 12), timeout=120)
    assert index == 0
    assert batch["generation_lengths"] == [12]
    assert batch["truncated"] == [True]
    assert segments == [(Segment(1, 12),)]
    whole = batch["output_ids"][0]
    _, more, _ = ray.get(ask(stand, whole[:-4], 4), timeout=120)
    assert more["output_ids"][0] == whole


def test_an_abort_never_becomes_a_sample_of_nemo_rl(stand: Stand) -> None:
    import ray

    ref = ask(stand, PROMPT)
    while ray.get(stand.shard.leader.is_idle.remote(), timeout=10):
        pass
    assert ray.get(stand.shard.leader.abort_all_requests.remote(), timeout=20) == 1
    with pytest.raises(ShardPreemptedError) as caught:
        ray.get(ref, timeout=60)
    assert caught.value.dp_rank == 0
    partial = caught.value.partial
    assert len(partial.logprobs) == len(partial.token_ids)


def test_nemo_rls_own_sleep_and_wake_go_through_the_gate(stand: Stand) -> None:
    import ray

    leader = stand.shard.leader
    ray.get(leader.sleep_async.remote(), timeout=60)
    with pytest.raises(ShardPreemptedError):
        ray.get(ask(stand, PROMPT, 4), timeout=60)
    ray.get(leader.wake_up_async.remote(tags=["weights"]), timeout=60)
    ray.get(leader.wake_up_async.remote(tags=["kv_cache"]), timeout=60)
    stand.shard.receive(stand.handle, timeout_s=60)
    stand.shard.finalize_weights(timeout_s=30)
    stand.epoch += 1
    stand.shard.open_admission(epoch=stand.epoch, weights_version=1, timeout_s=10)
    assert ray.get(ask(stand, PROMPT, 4), timeout=60)[1]["generation_lengths"] == [4]
