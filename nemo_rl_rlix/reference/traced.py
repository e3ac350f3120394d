"""The trainer as the hooks see it, with its acts on its GPU's trace track."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_rlix.observe.trace import Tracer
from nemo_rl_rlix.reference.trainer import TrainMetrics
from nemo_rl_rlix.reference.trainer_worker import ReferenceTrainer
from nemo_rl_rlix.reference.trajectory import PromptGroup
from nemo_rl_rlix.shards.protocol import MemoryReport
from nemo_rl_rlix.weights.types import CacheHandle


class TracedTrainer:
    """The trainer with its acts on its GPU's track.

    Args:
        trainer: The trainer.
        tracer: Where spans go.
        track: Track of its GPU.
    """

    def __init__(self, trainer: ReferenceTrainer, tracer: Tracer, track: str) -> None:
        self._trainer, self._tracer, self._track = trainer, tracer, track

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> CacheHandle:
        """Snapshot the weights."""
        with self._tracer.span(self._track, "build_cache", version=step):
            return self._trainer.build_cpu_weight_cache(step, slot=slot, timeout_s=timeout_s)

    def onload(self, *, timeout_s: float) -> None:
        """Bring every tensor to the device."""
        with self._tracer.span(self._track, "onload"):
            self._trainer.onload(timeout_s=timeout_s)

    def offload(self, *, timeout_s: float) -> MemoryReport:
        """Move every tensor to the host."""
        with self._tracer.span(self._track, "offload"):
            return self._trainer.offload(timeout_s=timeout_s)

    def train(self, step: int, groups: Sequence[PromptGroup], *, timeout_s: float) -> TrainMetrics:
        """Train one step."""
        with self._tracer.span(self._track, "train", step=step):
            return self._trainer.train(step, groups, timeout_s=timeout_s)
