"""Plain data that the planner reads and writes."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from functools import cached_property

from nemo_rl_rlix.control_plane.protocol import INFER_CLUSTER, PipelineSpec, Priority, cluster_id
from nemo_rl_rlix.errors import SettingError

_PIPELINE_ID = re.compile(r"[A-Za-z0-9_-]{1,200}")


@dataclass(frozen=True)
class PipelineLayout:
    """The fixed part of a pipeline: which GPUs belong to which cluster and shard.

    Build it once per registration with :meth:`of`; planning cycles share it.

    Attributes:
        pipeline_id: Pipeline it describes.
        clusters: Cluster -> sorted logical GPU ids; clusters without GPUs are left out.
        tp: GPUs of one inference shard.
        priority_weight: Multiplies the demand in the generation shares (> 0).
    """

    pipeline_id: str
    clusters: dict[str, tuple[int, ...]]
    tp: int
    priority_weight: float = 1.0

    @classmethod
    def of(cls, spec: PipelineSpec, num_gpus: int | None = None) -> PipelineLayout:
        """Check a registration and lay it out.

        Args:
            spec: What the pipeline registers.
            num_gpus: Logical GPUs that exist; ``None`` when that is not known.

        Raises:
            SettingError: The registration cannot work.
        """
        _check_names(spec)
        for cluster, gpus in spec.device_mappings.items():
            _check_mapping(cluster, gpus, spec.tp_sizes[cluster], num_gpus)
        if not spec.device_mappings[INFER_CLUSTER]:
            raise SettingError(
                f"device_mappings.{INFER_CLUSTER}", (), "no GPU to generate on", "Name at least one"
            )
        return cls(
            pipeline_id=spec.pipeline_id,
            clusters={
                name: tuple(sorted(gpus)) for name, gpus in spec.device_mappings.items() if gpus
            },
            tp=spec.tp_sizes[INFER_CLUSTER],
            priority_weight=spec.priority_weight,
        )

    @cached_property
    def shards(self) -> tuple[tuple[int, ...], ...]:
        """GPUs of each inference shard, by dp rank."""
        gpus = self.clusters[INFER_CLUSTER]
        return tuple(gpus[i : i + self.tp] for i in range(0, len(gpus), self.tp))

    @cached_property
    def rank_of(self) -> dict[int, int]:
        """GPU -> dp rank of the shard that may use it."""
        return {gpu: rank for rank, shard in enumerate(self.shards) for gpu in shard}

    @cached_property
    def preference(self) -> tuple[int, ...]:
        """Ranks, those first that the pipeline's own training does not preempt."""
        own = {g for name, gpus in self.clusters.items() if name != INFER_CLUSTER for g in gpus}
        return tuple(
            sorted(
                range(len(self.shards)),
                key=lambda rank: (not own.isdisjoint(self.shards[rank]), rank),
            )
        )


@dataclass(frozen=True)
class PendingRequest:
    """A request that waits.

    Attributes:
        cluster: Cluster of the pipeline.
        priority: Its priority.
        arrival: Grows with every request of the control plane; earlier goes first.
    """

    cluster: str
    priority: Priority
    arrival: int


@dataclass(frozen=True)
class PipelineView:
    """One pipeline at one moment.

    Attributes:
        layout: The fixed part.
        held: Clusters whose whole mapping is held at a priority above GENERATION.
        active: dp ranks that generate and are not being resized.
        shrinking: dp ranks whose removal is running; their GPUs are not free yet.
        expanding: dp ranks whose addition is running; they cannot be taken yet.
        promised: dp ranks that an earlier plan took GPUs from others for.
        wants_generation: Whether a GENERATION request is open (waiting or granted).
        demand: Trajectories wanted now; ``None`` when the pipeline never said.
        pending: Requests that wait.
        waiting_since: Monotonic seconds since when it has demand and no shard.
        served_since: Seconds, same clock, since when it has had a shard.
        served_s: Seconds of earlier turns, in all; decides between equal waits.
    """

    layout: PipelineLayout
    held: frozenset[str] = frozenset()
    active: frozenset[int] = frozenset()
    shrinking: frozenset[int] = frozenset()
    expanding: frozenset[int] = frozenset()
    promised: frozenset[int] = frozenset()
    wants_generation: bool = False
    demand: int | None = None
    pending: tuple[PendingRequest, ...] = ()
    waiting_since: float | None = None
    served_since: float | None = None
    served_s: float = 0.0

    @property
    def eager(self) -> bool:
        """Whether it must be given a shard: it wants one, and may have work for it."""
        waiting = any(request.priority is Priority.GENERATION for request in self.pending)
        return self.wants_generation and (self.demand is None or self.demand > 0 or waiting)

    @property
    def known_demand(self) -> int:
        """Trajectories wanted, 0 when unknown or not generating."""
        return (self.demand or 0) if self.wants_generation else 0


@dataclass(frozen=True)
class Snapshot:
    """Everything a planning cycle looks at.

    Attributes:
        now: Seconds, on the clock of ``waiting_since``.
        pipelines: Pipeline id -> its view.
        lost_gpus: GPUs of pipelines that ended and whose processes may still hold memory.
    """

    now: float
    pipelines: dict[str, PipelineView]
    lost_gpus: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Grant:
    """A waiting request whose GPUs are free (training) or serving (generation)."""

    pipeline_id: str
    cluster: str
    priority: Priority
    gpus: tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """What to do now.

    Attributes:
        shrinks: Pipeline -> dp ranks to take; start all of them at once.
        expands: Pipeline -> dp ranks to bring in; their GPUs are free already.
        grants: Requests to answer.
        promised: Pipeline -> dp ranks that will get GPUs which are being freed;
            put into the next snapshot, so that nobody else takes them.
        blocked: Name of a request (:func:`request_name`) -> why it cannot be granted yet.
    """

    shrinks: dict[str, tuple[int, ...]] = field(default_factory=dict)
    expands: dict[str, tuple[int, ...]] = field(default_factory=dict)
    grants: tuple[Grant, ...] = ()
    promised: dict[str, tuple[int, ...]] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do now."""
        return not (self.shrinks or self.expands or self.grants)


def _check_names(spec: PipelineSpec) -> None:
    if not _PIPELINE_ID.fullmatch(spec.pipeline_id):
        raise SettingError(
            "pipeline_id", spec.pipeline_id, "not a usable name", "Use 1 to 200 of A-Z a-z 0-9 _ -"
        )
    if INFER_CLUSTER not in spec.device_mappings:
        raise SettingError(
            "device_mappings", sorted(spec.device_mappings), f"{INFER_CLUSTER} is missing", "Add it"
        )
    if spec.device_mappings.keys() != spec.tp_sizes.keys():
        raise SettingError(
            "tp_sizes",
            sorted(spec.tp_sizes),
            f"clusters differ from device_mappings {sorted(spec.device_mappings)}",
            "Name the same clusters in both",
        )
    if not 0 < spec.priority_weight < math.inf:  # nan compares as false
        raise SettingError(
            "priority_weight", spec.priority_weight, "not a positive number", "Use 1.0"
        )


def _check_mapping(cluster: str, gpus: tuple[int, ...], tp: int, num_gpus: int | None) -> None:
    name = f"device_mappings.{cluster}"
    if tp < 1 or len(gpus) % tp:
        raise SettingError(
            f"tp_sizes.{cluster}", tp, f"does not divide {len(gpus)} GPUs", "Use a divisor"
        )
    if len(set(gpus)) != len(gpus):
        raise SettingError(name, gpus, "names a GPU twice", "Name each GPU once")
    strange = [g for g in gpus if type(g) is not int]
    if strange:
        raise SettingError(name, gpus, f"{strange} are not GPU ids", "Use whole numbers")
    outside = [g for g in gpus if g < 0 or (num_gpus is not None and g >= num_gpus)]
    if outside:
        raise SettingError(
            name,
            gpus,
            f"GPUs {outside} do not exist",
            f"Use ids below {num_gpus or 'the number of GPUs'}",
        )


def request_name(pipeline_id: str, request: PendingRequest) -> str:
    """Name of a waiting request in reports, ``{cluster id}@{priority}``."""
    return f"{cluster_id(pipeline_id, request.cluster)}@{request.priority.name}"
