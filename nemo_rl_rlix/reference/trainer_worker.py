"""The process of the reference trainer, and the handle that the pipeline holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_rlix.control_plane.protocol import pipeline_namespace
from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.ray_errors import GONE, Callee, unwrap
from nemo_rl_rlix.reference.audit import TrainingAccount, unfinished_tokens
from nemo_rl_rlix.reference.device import LogicalGpu, LogicalGpuSpec
from nemo_rl_rlix.reference.grpo import GrpoConfig
from nemo_rl_rlix.reference.memory import DeviceAccount
from nemo_rl_rlix.reference.task import Workload, make_task
from nemo_rl_rlix.reference.tokenizer import EOS_ID
from nemo_rl_rlix.reference.trainer import GrpoTrainer, TrainMetrics
from nemo_rl_rlix.reference.trajectory import PromptGroup
from nemo_rl_rlix.reference.warmup import WarmupConfig, base_weights, model_config
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.shards.protocol import MemoryReport
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.types import CacheHandle


class TrainerLostError(RLixError):
    """The trainer's process is gone."""

    def __init__(self, name: str, method: str) -> None:
        super().__init__(
            f"{method}: the process of {name} is gone; resume the run from its last checkpoint"
        )
        self.name = name


@dataclass(frozen=True)
class TrainerWorkerConfig:
    """What the trainer's process needs to know. Picklable.

    Attributes:
        pipeline_id: Pipeline of the trainer.
        owner: Name that holds the GPU's grant while it trains.
        gpu: Its logical GPU; ``None`` charges and checks nothing.
        base_dir: Folder in which base models are kept.
        workload: Sizes of prompts and responses, and the temperature.
        data: File of problems, ``None`` for the generated task.
        warmup: How the base model is made.
        grpo: How the policy is updated.
        weight_cache: The ``rlix.weight_cache`` block.
        pin: Whether to tie the process to the GPU's core.
    """

    pipeline_id: str
    owner: str
    gpu: LogicalGpuSpec | None
    base_dir: Path
    workload: Workload = field(default_factory=Workload)
    data: Path | None = None
    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    weight_cache: WeightCacheSettings = field(default_factory=WeightCacheSettings)
    pin: bool = True

    @property
    def resident(self) -> str:
        """Name of the actor, and under which device memory is charged."""
        return f"{self.pipeline_id}-trainer"


class TrainerWorker:
    """Trainer and weight cache of one pipeline. Starts offloaded, with the base model.

    One call at a time: Ray queues them.
    """

    def __init__(self, config: TrainerWorkerConfig) -> None:
        gpu = LogicalGpu(config.gpu) if config.gpu is not None else None
        if gpu is not None and config.pin:
            gpu.pin()
        self._gpu = gpu
        self._max_new_tokens = config.workload.max_new_tokens
        self._account = TrainingAccount()
        task = make_task(config.data, config.workload, config.warmup.seed)
        size = model_config(task, config.workload)
        self._trainer = GrpoTrainer(
            size,
            config.grpo,
            base_weights(task, size, config.warmup, config.base_dir),
            temperature=config.workload.temperature,
            account=DeviceAccount(gpu, config.owner, config.resident),
        )
        self._cache = CpuWeightCache(
            config.pipeline_id, config.weight_cache, ray.get_runtime_context().get_node_id()
        )
        self._cache.plan(self._trainer.tensor_specs(), self._trainer.ties())

    def next_step(self) -> int:
        """Training step that comes next, which is the version of the weights."""
        return self._trainer.next_step

    def build_cpu_weight_cache(self, step: int, slot: int) -> CacheHandle:
        """Snapshot the weights into a slot."""
        return self._cache.build(step, slot, self._trainer.named_weights())

    def onload(self) -> None:
        """Bring every tensor to the device."""
        self._trainer.onload()

    def offload(self) -> MemoryReport:
        """Move every tensor to the host."""
        report = self._trainer.offload()
        if self._gpu is not None:
            self._gpu.flush()
        return report

    def train(self, step: int, groups: Sequence[PromptGroup]) -> TrainMetrics:
        """Train one step."""
        metrics = self._trainer.train(step, groups)
        cut_off = unfinished_tokens(groups, stop_id=EOS_ID, max_new_tokens=self._max_new_tokens)
        self._account = TrainingAccount(
            (*self._account.groups, *(group.group_id for group in groups)),
            self._account.unfinished_tokens + cut_off,
        )
        return metrics

    def account(self) -> TrainingAccount:
        """What this process has trained on."""
        return self._account

    def save(self, directory: Path, extra: bytes) -> Path:
        """Write a checkpoint."""
        return self._trainer.save(directory, extra)

    def load(self, path: Path) -> bytes:
        """Continue from a checkpoint."""
        return self._trainer.load(path)

    def close(self) -> None:
        """Offload and free the weight cache; nothing can be read from it any more."""
        self.offload()
        self._cache.close()


class ReferenceTrainer:
    """The trainer of a pipeline (a ``Trainer``), in a process of its own.

    Args:
        config: What the process needs.
        options: Options of the actor: resources, scheduling strategy, environment.
    """

    def __init__(self, config: TrainerWorkerConfig, options: Mapping[str, Any]) -> None:
        self.config = config
        self._handle = ReferenceTrainerWorker.options(
            **options, name=config.resident, namespace=pipeline_namespace(config.pipeline_id)
        ).remote(config)

    def wait_ready(self, *, timeout_s: float) -> int:
        """Wait until the base model is there; returns the step that comes next."""
        return int(self._call("next_step", timeout_s=timeout_s))

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> CacheHandle:
        """Snapshot the weights into ``slot`` of the CPU cache."""
        handle: CacheHandle = self._call("build_cpu_weight_cache", step, slot, timeout_s=timeout_s)
        return handle

    def onload(self, *, timeout_s: float) -> None:
        """Bring parameters, gradients and optimizer state to the device."""
        self._call("onload", timeout_s=timeout_s)

    def offload(self, *, timeout_s: float) -> MemoryReport:
        """Move every tensor to the host."""
        report: MemoryReport = self._call("offload", timeout_s=timeout_s)
        return report

    def train(self, step: int, groups: Sequence[PromptGroup], *, timeout_s: float) -> TrainMetrics:
        """Train one step on its groups."""
        metrics: TrainMetrics = self._call("train", step, list(groups), timeout_s=timeout_s)
        return metrics

    def account(self, *, timeout_s: float) -> TrainingAccount:
        """What its process has trained on."""
        account: TrainingAccount = self._call("account", timeout_s=timeout_s)
        return account

    def save(self, directory: Path, extra: bytes = b"", *, timeout_s: float) -> Path:
        """Write a checkpoint; ``extra`` comes back from :meth:`load`."""
        path: Path = self._call("save", directory, extra, timeout_s=timeout_s)
        return path

    def load(self, path: Path, *, timeout_s: float) -> bytes:
        """Continue from a checkpoint."""
        extra: bytes = self._call("load", path, timeout_s=timeout_s)
        return extra

    def close(self, *, timeout_s: float) -> None:
        """End the process, memory first. Idempotent."""
        try:
            self._call("close", timeout_s=timeout_s)
        finally:
            ray.kill(self._handle, no_restart=True)

    def _call(self, method: str, *args: object, timeout_s: float) -> Any:
        callee = Callee(f"{method} of {self.config.resident}", None, timeout_s)
        try:
            return ray.get(getattr(self._handle, method).remote(*args), timeout=timeout_s)
        except GONE as error:
            raise TrainerLostError(self.config.resident, method) from error
        except RayError as error:
            raise unwrap(error, callee) from error


ReferenceTrainerWorker: Any = ray.remote(max_restarts=0, max_task_retries=0)(TrainerWorker)
"""The Ray actor class. A trainer that Ray restarted would have lost its policy."""
