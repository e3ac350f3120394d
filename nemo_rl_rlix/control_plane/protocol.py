"""The calls between a pipeline and its scheduler, RLix's or the embedded one.

Names, units and meanings are those of RLix (rlops/rlix), so that the embedded
control plane and RLix can stand in for one another.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol

TRAIN_CLUSTER = "actor_train"
INFER_CLUSTER = "actor_infer"


class Priority(IntEnum):
    """Who goes first; lower is sooner. Only GENERATION can be preempted."""

    INITIALIZATION = 0
    ACTOR_TRAINING = 1
    CRITIC_TRAINING = 2
    OLD_LOG_PROBS = 3
    REF_LOG_PROBS = 4
    VALUE_COMPUTE = 5
    GENERATION = 6


def cluster_id(pipeline_id: str, cluster: str) -> str:
    """Name of a cluster of a pipeline in every call, ``{pipeline_id}_{cluster}``."""
    return f"{pipeline_id}_{cluster}"


def pipeline_namespace(pipeline_id: str) -> str:
    """Ray namespace that holds the named actors of a pipeline."""
    return f"pipeline_{pipeline_id}_NS"


def coordinator_name(pipeline_id: str) -> str:
    """Name under which the scheduler looks the coordinator up."""
    return f"rlix:coordinator:{pipeline_id}"


@dataclass(frozen=True)
class PipelineSpec:
    """What a pipeline registers.

    Attributes:
        pipeline_id: Matches ``[A-Za-z0-9_-]+``, at most 200 characters.
        ray_namespace: Namespace of the coordinator, see :func:`pipeline_namespace`.
        device_mappings: Cluster -> logical GPU ids. ``actor_infer`` is mandatory;
            its dp rank r holds ``sorted(ids)[r*tp:(r+1)*tp]``.
        tp_sizes: Cluster -> GPUs of a shard; 1 for ``actor_train`` whatever its TP.
        allow_shrink_to_zero: Whether training may take every inference shard.
        priority_weight: Multiplies this pipeline's demand in the shares (> 0).
    """

    pipeline_id: str
    ray_namespace: str
    device_mappings: dict[str, tuple[int, ...]]
    tp_sizes: dict[str, int]
    allow_shrink_to_zero: bool = True
    priority_weight: float = 1.0


@dataclass(frozen=True)
class ProgressReport:
    """A snapshot of generation demand, in trajectories.

    Attributes:
        pipeline_id: Pipeline it speaks for.
        step_target_trajectories: Trajectories wanted (> 0).
        completed: Of these, generated so far.
        fifo_timestamp: Unix seconds of the snapshot.
        metrics: Further figures (``mode``, ``waiting_requests`` ...).
    """

    pipeline_id: str
    step_target_trajectories: int
    completed: int
    fifo_timestamp: float
    metrics: dict[str, float | int | str] = field(default_factory=dict)

    @property
    def remaining(self) -> int:
        """Trajectories still wanted."""
        return self.step_target_trajectories - min(self.completed, self.step_target_trajectories)


@dataclass(frozen=True)
class ActionResponse:
    """Answer of a resize. Schedulers ignore it: a resize that fails must raise."""

    success: bool = True


class Coordinator(Protocol):
    """The one method that a scheduler calls on a pipeline, always by keyword."""

    def resize_infer(
        self, dp_ranks_to_remove: list[int], dp_ranks_to_add: list[int]
    ) -> ActionResponse:
        """Take shards away or bring shards in; exactly one list is non-empty.

        Returns from a removal only when the GPUs' memory is free; from an
        addition when the shards serve (or rebuild).
        """
        ...


class ControlPlane(Protocol):
    """A scheduler, as a pipeline sees it. Every call can raise ``ControlPlaneLostError``."""

    def register(self, spec: PipelineSpec) -> None:
        """Make the pipeline known and admit it. Registering twice is an error.

        The coordinator actor exists before this is called.
        """
        ...

    def request_gpus(
        self,
        cluster: str,
        priority: Priority,
        *,
        global_step: int | None = None,
        step_target_estimate: int | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Wait for GPUs.

        Priorities above GENERATION get the whole mapping or wait; GENERATION
        returns as soon as one shard is active. Requesting what is already held
        at the same priority returns it.

        Raises:
            DeadlineExceededError: After ``timeout_s``; the request is withdrawn
                where the scheduler allows it.
        """
        ...

    def release_gpus(self, cluster: str, *, global_step: int | None = None) -> None:
        """Give back what a request got. The memory is free already."""
        ...

    def await_release_generation(self, *, timeout_s: float) -> None:
        """Have every active shard taken through ``resize_infer``; progress is cleared first."""
        ...

    def report_progress(self, report: ProgressReport) -> None:
        """Replace the demand snapshot; never blocks."""
        ...

    def clear_progress(self) -> None:
        """Forget the demand snapshot; never blocks."""
        ...

    def unregister(self) -> None:
        """Return every GPU and forget the pipeline; waiters end with an error. Idempotent."""
        ...
