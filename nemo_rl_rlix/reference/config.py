"""What one pipeline of the reference job is made from."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from nemo_rl_rlix.control_plane.protocol import INFER_CLUSTER, TRAIN_CLUSTER, PipelineSpec
from nemo_rl_rlix.control_plane.protocol import pipeline_namespace as namespace_of
from nemo_rl_rlix.reference.device import LogicalGpuSpec
from nemo_rl_rlix.reference.grpo import GrpoConfig
from nemo_rl_rlix.reference.task import Workload
from nemo_rl_rlix.reference.warmup import WarmupConfig
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.topology import InferenceLayout, Topology, validate_topology

GPU_FRACTION = 0.05
"""Share of a bundle's GPU that a resident takes: twenty fit, of any number of pipelines."""


@dataclass(frozen=True)
class PipelineConfig:
    """One pipeline. Picklable.

    Attributes:
        name: Readable name, on traces and tables.
        pipeline_id: Unique id.
        train_gpus: Logical GPU ids of the trainer; the reference trainer uses one.
        infer_gpus: Logical GPU ids of the inference shards, one each.
        gpus: Every logical GPU, by id.
        settings: The ``rlix:`` block.
        steps: Training steps.
        seed: Seed of problems, sampling and verifier times.
        base_dir: Folder of base models.
        run_dir: Folder of this pipeline's checkpoints.
        workload: What a step asks for.
        data: File of problems, ``None`` for the generated task.
        warmup: How the base model is made.
        grpo: How the policy is updated.
        max_age: Versions that generation may run ahead of training.
        max_num_seqs: Most requests that a shard runs at once.
        step_s: Least seconds of an engine step, see ``EngineConfig``.
        prefix_cache_bytes: Prefix cache of a shard in bytes.
        checkpoint_every: Steps between checkpoints, 0 for none.
        resume: Whether to continue from the newest checkpoint in ``run_dir``.
        train_timeout_s: Deadline of one training step in seconds.
        sample_timeout_s: Longest wait for the groups of one step in seconds.
    """

    name: str
    pipeline_id: str
    train_gpus: tuple[int, ...]
    infer_gpus: tuple[int, ...]
    gpus: tuple[LogicalGpuSpec, ...]
    settings: RLixSettings
    steps: int
    seed: int
    base_dir: Path
    run_dir: Path
    workload: Workload = field(default_factory=Workload)
    data: Path | None = None
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    max_age: int = 1
    max_num_seqs: int = 8
    step_s: float = 0.0
    prefix_cache_bytes: int = 1024 * 1024
    checkpoint_every: int = 0
    resume: bool = False
    train_timeout_s: float = 120.0
    sample_timeout_s: float = 600.0

    def topology(self) -> Topology:
        """Check the GPUs against the cluster.

        Raises:
            SettingError: Names the mapping that cannot work.
        """
        return validate_topology(
            train_device_mapping=self.train_gpus,
            infer_device_mapping=self.infer_gpus,
            infer_tp=1,
            num_gpus=len(self.gpus),
            gpus_per_node=len(self.gpus),
            allow_shrink_to_zero=self.settings.allow_shrink_to_zero,
        )

    def spec(self) -> PipelineSpec:
        """What the pipeline registers with its scheduler."""
        layout: InferenceLayout = self.topology().inference
        return PipelineSpec(
            pipeline_id=self.pipeline_id,
            ray_namespace=namespace_of(self.pipeline_id),
            device_mappings={
                TRAIN_CLUSTER: tuple(sorted(self.train_gpus)),
                INFER_CLUSTER: layout.device_mapping,
            },
            tp_sizes={TRAIN_CLUSTER: 1, INFER_CLUSTER: layout.gpus_per_shard},
            allow_shrink_to_zero=self.settings.allow_shrink_to_zero,
            priority_weight=self.settings.priority_weight,
        )
