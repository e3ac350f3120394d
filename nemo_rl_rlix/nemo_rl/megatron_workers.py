"""NeMo RL's Megatron policy worker in a time-shared run. Found by name in its actors."""

from __future__ import annotations

from typing import Any

import ray
from nemo_rl.models.policy.utils import get_runtime_env_for_policy_worker
from nemo_rl.models.policy.workers.megatron_policy_worker import MegatronPolicyWorkerImpl

from nemo_rl_rlix.megatron.worker_extension import TimeSharingWorkerMixin
from nemo_rl_rlix.nemo_rl.worker_actor import worker_actor
from nemo_rl_rlix.vllm.ipc import ipc_address


class RlixMegatronPolicyWorkerImpl(TimeSharingWorkerMixin, MegatronPolicyWorkerImpl):
    """One training rank."""

    def rlix_configure(self, pipeline_id: str, rlix_block: dict[str, Any]) -> None:
        """Tell this rank its pipeline, before anything else."""
        node_id = ray.get_runtime_context().get_node_id()
        self.configure_time_sharing(pipeline_id, node_id, rlix_block)

    def rlix_onload(self, timeout_s: float) -> None:
        """Communicators first, while memory is free; a no-op when it is on its GPU."""
        self.reinit_nccl_groups(timeout_s)
        self.onload_training_gpu()

    def rlix_offload(self, timeout_s: float) -> None:
        """Every tensor to the host, then no communicators; a no-op when it is off."""
        self.offload_training_gpu()
        self.destroy_nccl_groups(timeout_s)

    def get_zmq_address(self) -> str:
        """Socket of this pipeline on this GPU."""
        return ipc_address(self._rlix_pipeline[0], self.report_device_id())


@worker_actor(
    runtime_env=get_runtime_env_for_policy_worker("megatron_policy_worker")
)  # pragma: no cover
class RlixMegatronPolicyWorker(RlixMegatronPolicyWorkerImpl):
    """Actor of the training rank."""
