"""What runs below NeMo RL's classes in a real run: vLLM engines and Megatron ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl_rlix.nemo_rl import leaders
from nemo_rl_rlix.nemo_rl.session import Host, Session
from nemo_rl_rlix.nemo_rl.trainer import WorkerGroupTrainer
from nemo_rl_rlix.shards.protocol import InferenceShard


def vllm_shards(pipeline_id: str, ranks: tuple[int, ...]) -> Mapping[int, InferenceShard]:
    """Shards whose leaders are announced before the first build."""
    from nemo_rl_rlix.vllm.shard import VllmShard

    return {rank: VllmShard(rank, None, respawn=leaders.find) for rank in ranks}


def megatron_trainer(policy: Any, session: Session) -> WorkerGroupTrainer:
    """The ranks of the policy's worker group."""
    return WorkerGroupTrainer(policy.worker_group, session.pipeline_id, session.settings)


NEMO_HOST = Host(make_shards=vllm_shards, make_trainer=megatron_trainer)
