"""NeMo RL's vLLM worker actors in a time-shared run. Found by name in their actors."""

from __future__ import annotations

from nemo_rl.distributed.worker_group_utils import get_nsight_config_if_pattern_matches
from nemo_rl.models.generation.vllm.vllm_worker import VllmGenerationWorkerImpl
from nemo_rl.models.generation.vllm.vllm_worker_async import VllmAsyncGenerationWorkerImpl

from nemo_rl_rlix.nemo_rl.worker_actor import worker_actor
from nemo_rl_rlix.vllm.worker import (
    CONTROL_CONCURRENCY,
    CONTROL_GROUP,
    AsyncShardWorkerMixin,
    SyncShardWorkerMixin,
)

MODULE = "nemo_rl_rlix.nemo_rl.vllm_workers"
EXTENSION_CLS = "nemo_rl_rlix.nemo_rl.vllm_extension.RlixVllmExtension"

WORKER_CLASSES = {
    "nemo_rl.models.generation.vllm.vllm_worker.VllmGenerationWorker": (
        f"{MODULE}.RlixVllmGenerationWorker"
    ),
    "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker": (
        f"{MODULE}.RlixVllmAsyncGenerationWorker"
    ),
}
"""NeMo RL's class -> the one that takes its place; both run in the former's environment."""


class RlixVllmGenerationWorkerImpl(SyncShardWorkerMixin, VllmGenerationWorkerImpl):
    """The sync worker."""

    rlix_extension_cls = EXTENSION_CLS


class RlixVllmAsyncGenerationWorkerImpl(AsyncShardWorkerMixin, VllmAsyncGenerationWorkerImpl):
    """The async worker: one shard."""

    rlix_extension_cls = EXTENSION_CLS


@worker_actor(
    runtime_env={**get_nsight_config_if_pattern_matches("vllm_generation_worker")}
)  # pragma: no cover
class RlixVllmGenerationWorker(RlixVllmGenerationWorkerImpl):
    """Actor of the sync worker."""


@worker_actor(
    runtime_env={**get_nsight_config_if_pattern_matches("vllm_async_generation_worker")},
    concurrency_groups={CONTROL_GROUP: CONTROL_CONCURRENCY},
)  # pragma: no cover
class RlixVllmAsyncGenerationWorker(RlixVllmAsyncGenerationWorkerImpl):
    """Actor of the async worker. Control calls never queue behind generations."""
