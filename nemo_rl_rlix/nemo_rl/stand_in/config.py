"""What the stand-ins need to know, as plain data inside NeMo RL's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from nemo_rl_rlix.reference.device import LogicalGpuSpec
from nemo_rl_rlix.reference.engine import EngineConfig
from nemo_rl_rlix.reference.guards import shard_owner
from nemo_rl_rlix.reference.model import ModelConfig
from nemo_rl_rlix.reference.task import Task, Workload, make_task
from nemo_rl_rlix.reference.warmup import WarmupConfig, model_config
from nemo_rl_rlix.reference.worker import ShardWorkerConfig

KEY = "rlix_stand_in"
"""Key in ``policy`` and in ``policy.generation``."""


@dataclass(frozen=True)
class StandIn:
    """One pipeline's stand-ins.

    Attributes:
        name: Name of the pipeline in the books of the logical GPUs.
        gpu_dir: Directory of the logical GPUs.
        gpu_bytes: Memory of each, in bytes.
        train_gpus: Logical GPU ids of the trainer.
        infer_gpus: Logical GPU ids of the shards, in the order of their ranks.
        base_dir: Directory in which base models are kept.
        record: File to which the trainer writes what it was trained on, a line a step.
        seed: Seed of problems, weights and samples.
        prompts_per_step: Prompt groups of a step.
        generations_per_prompt: Trajectories of a group.
        max_new_tokens: Most tokens of a response, its end included.
        warmup_steps: Optimizer steps of the base model.
        step_s: Least seconds of an engine's step.
        lr: Learning rate.
    """

    name: str
    gpu_dir: str
    gpu_bytes: int
    train_gpus: tuple[int, ...]
    infer_gpus: tuple[int, ...]
    base_dir: str
    record: str
    seed: int = 0
    prompts_per_step: int = 2
    generations_per_prompt: int = 2
    max_new_tokens: int = 24
    warmup_steps: int = 60
    step_s: float = 0.0
    lr: float = 1e-3

    def to_config(self) -> dict[str, Any]:
        """As plain data."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StandIn:
        """Read it from ``policy`` or ``policy.generation``."""
        found = dict(config[KEY])
        for name in ("train_gpus", "infer_gpus"):
            found[name] = tuple(found[name])
        return cls(**found)

    @property
    def workload(self) -> Workload:
        """Sizes of prompts and responses."""
        return Workload(
            prompts_per_step=self.prompts_per_step,
            generations_per_prompt=self.generations_per_prompt,
            max_new_tokens=self.max_new_tokens,
            verifier_median_s=0.0,
        )

    @property
    def task(self) -> Task:
        """Where problems come from."""
        return make_task(None, self.workload, self.seed)

    @property
    def model(self) -> ModelConfig:
        """Size of the model."""
        return model_config(self.task, self.workload)

    @property
    def warmup(self) -> WarmupConfig:
        """How the base model is made."""
        return WarmupConfig(steps=self.warmup_steps, seed=self.seed)

    @property
    def engine(self) -> EngineConfig:
        """Sizes and seed of an engine."""
        return EngineConfig(model=self.model, seed=self.seed, step_s=self.step_s)

    @property
    def base_path(self) -> Path:
        """Directory in which base models are kept."""
        return Path(self.base_dir)

    def gpu(self, gpu_id: int) -> LogicalGpuSpec:
        """A logical GPU."""
        return LogicalGpuSpec(self.gpu_dir, gpu_id, self.gpu_bytes)


def shard_worker_config(stand_in: StandIn, pipeline_id: str, dp_rank: int) -> ShardWorkerConfig:
    """What the process of a shard is made from; the coordinator makes the same."""
    return ShardWorkerConfig(
        pipeline_id=pipeline_id,
        dp_rank=dp_rank,
        owner=shard_owner(stand_in.name, dp_rank),
        gpu=stand_in.gpu(stand_in.infer_gpus[dp_rank]),
        engine=stand_in.engine,
        pin=False,
        trace_name=stand_in.name,
    )
