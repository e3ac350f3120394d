"""The stand-ins as the host of a session, and how NeMo RL is made to use them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from nemo_rl_rlix.errors import ShardFailedError
from nemo_rl_rlix.nemo_rl import leaders
from nemo_rl_rlix.nemo_rl.host import megatron_trainer
from nemo_rl_rlix.nemo_rl.session import Host
from nemo_rl_rlix.nemo_rl.stand_in.config import StandIn, shard_worker_config
from nemo_rl_rlix.reference.guards import OwnerGuard, ShardGuards, trainer_owner
from nemo_rl_rlix.reference.shard import RayReferenceShard
from nemo_rl_rlix.shards.protocol import InferenceShard

_FOLDER = "nemo_rl_rlix.nemo_rl.stand_in"
GENERATION_WORKERS = {
    "nemo_rl.models.generation.vllm.vllm_worker_async.VllmAsyncGenerationWorker": (
        f"{_FOLDER}.generation_worker.StandInGenerationWorker"
    )
}
POLICY_WORKERS = {
    "nemo_rl.models.policy.workers.megatron_policy_worker.MegatronPolicyWorker": (
        f"{_FOLDER}.policy_worker.StandInPolicyWorker"
    )
}


class StandInShard(RayReferenceShard):
    """A reference shard whose process NeMo RL has made."""

    def build(self, *, timeout_s: float) -> None:
        """Take over the worker that was announced; it is asleep at level 2.

        Raises:
            ShardFailedError: It is gone; NeMo RL makes no second one.
        """
        handle = leaders.find(self.dp_rank)
        with self._lock:
            self._handle = handle
        identity = self._call("identity", timeout_s=timeout_s)
        with self._lock:
            if self._handle is not handle:
                raise ShardFailedError(self.dp_rank, "it was ended while it was built")
            self._identity = identity


def make_shards(
    stand_in: StandIn, pipeline_id: str, ranks: tuple[int, ...]
) -> Mapping[int, InferenceShard]:
    """Control surfaces of the stand-in engines."""
    return {
        rank: StandInShard(shard_worker_config(stand_in, pipeline_id, rank), {}) for rank in ranks
    }


def stand_in_host(stand_in: StandIn) -> Host:
    """A host whose GPUs are logical and keep books on who uses them."""
    shards = {rank: [stand_in.gpu(gpu)] for rank, gpu in enumerate(stand_in.infer_gpus)}
    return Host(
        make_shards=functools.partial(make_shards, stand_in),
        make_trainer=megatron_trainer,
        make_shard_guard=functools.partial(ShardGuards, stand_in.name, shards),
        train_guard=OwnerGuard(
            [stand_in.gpu(gpu) for gpu in stand_in.train_gpus], trainer_owner(stand_in.name)
        ),
    )
