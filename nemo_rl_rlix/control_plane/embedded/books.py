"""Who holds what: the state of the embedded control plane, without any Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nemo_rl_rlix.control_plane.embedded.events import EventKind, EventLog
from nemo_rl_rlix.control_plane.embedded.snapshot import (
    Grant,
    PendingRequest,
    PipelineLayout,
    PipelineView,
    Plan,
    Snapshot,
    request_name,
)
from nemo_rl_rlix.control_plane.protocol import (
    INFER_CLUSTER,
    PipelineSpec,
    Priority,
    ProgressReport,
)
from nemo_rl_rlix.errors import PipelineClosedError, RLixError


class RequestRefusedError(RLixError):
    """A call that does not fit what the pipeline holds or registered.

    Args:
        what: The call, with its cluster.
        reason: Why it is refused.
        remedy: What to do instead.
    """

    def __init__(self, what: str, reason: str, remedy: str) -> None:
        super().__init__(f"{what}: {reason}. {remedy}")
        self.what = what
        self.reason = reason
        self.remedy = remedy


@dataclass
class PipelineRecord:
    """One registered pipeline; changed only through :class:`Books`."""

    spec: PipelineSpec
    layout: PipelineLayout
    heartbeat_s: float
    resize_s: float
    last_seen: float
    held: dict[str, Priority] = field(default_factory=dict)
    pending: dict[str, PendingRequest] = field(default_factory=dict)
    asked_at: dict[str, float] = field(default_factory=dict)
    active: set[int] = field(default_factory=set)
    shrinking: set[int] = field(default_factory=set)
    expanding: set[int] = field(default_factory=set)
    promised: frozenset[int] = frozenset()
    wants_generation: bool = False
    generation_granted: bool = False
    reported: int | None = None
    estimate: int = 0
    waiting_since: float | None = None
    served_since: float | None = None
    served_s: float = 0.0
    shrinks: int = 0
    expands: int = 0
    shrink_s: float = 0.0
    expand_s: float = 0.0

    @property
    def demand(self) -> int | None:
        """Trajectories wanted: the last report plus an estimate that is newer than it."""
        if self.reported is None:
            return self.estimate or None
        return self.reported + self.estimate

    @property
    def resident(self) -> set[int]:
        """Ranks that occupy GPUs, resizes under way included."""
        return self.active | self.shrinking | self.expanding

    def gpus_of(self, ranks: set[int] | tuple[int, ...]) -> tuple[int, ...]:
        """GPUs of these ranks, sorted."""
        return tuple(sorted(gpu for rank in ranks for gpu in self.layout.shards[rank]))

    def view(self) -> PipelineView:
        """The planner's picture of it."""
        return PipelineView(
            layout=self.layout,
            held=frozenset(self.held),
            active=frozenset(self.active),
            shrinking=frozenset(self.shrinking),
            expanding=frozenset(self.expanding),
            promised=self.promised,
            wants_generation=self.wants_generation,
            demand=self.demand,
            pending=tuple(self.pending.values()),
            waiting_since=self.waiting_since,
            served_since=self.served_since,
            served_s=self.served_s,
        )


class Books:
    """All pipelines, and the GPUs of those that ended but may still hold memory.

    Not thread-safe: the scheduler calls it from one event loop.

    Args:
        num_gpus: Logical GPUs of the cluster; ``None`` when unknown.
        clock: Monotonic seconds.
        events: Where changes are recorded.
    """

    def __init__(self, num_gpus: int | None, clock: Callable[[], float], events: EventLog) -> None:
        self.pipelines: dict[str, PipelineRecord] = {}
        self.ended: dict[str, str] = {}
        self.num_gpus = num_gpus
        self._clock = clock
        self._events = events
        self._lost: dict[str, set[int]] = {}
        self._arrivals = 0

    # --- registration ----------------------------------------------------

    def register(self, spec: PipelineSpec, *, heartbeat_s: float, resize_s: float) -> None:
        """Make a pipeline known.

        Raises:
            SettingError: The registration cannot work.
            RequestRefusedError: The id or the namespace is taken.
        """
        layout = PipelineLayout.of(spec, self.num_gpus)
        pid = spec.pipeline_id
        if pid in self.pipelines or pid in self._lost:
            raise RequestRefusedError(
                f"register {pid}", "it is registered already", "Unregister it, or use another id"
            )
        twin = [
            r.spec for r in self.pipelines.values() if r.spec.ray_namespace == spec.ray_namespace
        ]
        if twin:
            raise RequestRefusedError(
                f"register {pid}",
                f"namespace {spec.ray_namespace} belongs to {twin[0].pipeline_id}",
                "Give each pipeline the namespace of control_plane.protocol.pipeline_namespace",
            )
        self.pipelines[pid] = PipelineRecord(spec, layout, heartbeat_s, resize_s, self._clock())
        self.ended.pop(pid, None)
        gpus = tuple(sorted({gpu for gpus in layout.clusters.values() for gpu in gpus}))
        self._events.add(EventKind.REGISTER, pid, gpus=gpus)

    def record(self, pipeline_id: str) -> PipelineRecord:
        """The pipeline's record.

        Raises:
            PipelineClosedError: It is not registered (any more); says why.
        """
        record = self.pipelines.get(pipeline_id)
        if record is None:
            cause = self.ended.get(pipeline_id, "it was never registered")
            raise PipelineClosedError(f"pipeline {pipeline_id} is unknown: {cause}")
        return record

    def resolve(self, name: str) -> tuple[PipelineRecord, str]:
        """Split a cluster id into its pipeline's record and the cluster.

        Raises:
            PipelineClosedError: No such pipeline.
            RequestRefusedError: The pipeline registered no such cluster with GPUs.
        """
        for pid, record in self.pipelines.items():
            cluster = name.removeprefix(f"{pid}_")
            if cluster != name and cluster in record.layout.clusters:
                return record, cluster
        owners = [pid for pid in self.pipelines if name.startswith(f"{pid}_")]
        if owners:
            known = ", ".join(self.pipelines[owners[0]].layout.clusters)
            raise RequestRefusedError(
                f"cluster {name}", "not registered, or without GPUs", f"Use one of: {known}"
            )
        causes = [cause for pid, cause in self.ended.items() if name.startswith(f"{pid}_")]
        cause = causes[0] if causes else "no registered pipeline has it"
        raise PipelineClosedError(f"cluster {name} is unknown: {cause}")

    # --- requests --------------------------------------------------------

    def request(
        self, record: PipelineRecord, cluster: str, priority: Priority, estimate: int | None
    ) -> list[int] | None:
        """Enter a request; returns the GPUs when it holds them already, else ``None``.

        Raises:
            RequestRefusedError: It does not fit what the pipeline holds.
        """
        pid = record.spec.pipeline_id
        what = f"request {pid}_{cluster} at {priority.name}"
        generation = priority is Priority.GENERATION
        if cluster == INFER_CLUSTER and priority not in (
            Priority.GENERATION,
            Priority.INITIALIZATION,
        ):
            raise RequestRefusedError(
                what, "inference GPUs are for initialization or generation", "Use GENERATION"
            )
        if generation and cluster != INFER_CLUSTER:
            raise RequestRefusedError(what, "only inference generates", f"Use {INFER_CLUSTER}")
        if cluster in record.pending:
            raise RequestRefusedError(what, "a request is waiting already", "Wait for that one")
        if cluster in record.held and record.held[cluster] is not priority:
            raise RequestRefusedError(
                what, f"held at {record.held[cluster].name}", "Release it first"
            )
        if not generation and cluster == INFER_CLUSTER and record.resident:
            raise RequestRefusedError(
                what, f"shards {sorted(record.resident)} are in place", "Release generation first"
            )
        if cluster in record.held:
            return list(record.layout.clusters[cluster])
        if generation:
            record.wants_generation = True
            record.estimate = estimate or 0
            if not record.estimate and not record.reported:
                record.reported = None
            if record.active:
                return list(record.gpus_of(record.active))
        self._arrivals += 1
        record.pending[cluster] = PendingRequest(cluster, priority, self._arrivals)
        record.asked_at[cluster] = self._clock()
        self._events.add(
            EventKind.REQUEST,
            pid,
            cluster=cluster,
            gpus=record.layout.clusters[cluster],
            detail=priority.name,
        )
        return None

    def withdraw(self, record: PipelineRecord, cluster: str) -> bool:
        """Take a waiting request back; whether there was one."""
        request = record.pending.pop(cluster, None)
        if request is None:
            return False
        if request.priority is Priority.GENERATION and not record.generation_granted:
            self.stop_generation(record)
        self._events.add(
            EventKind.WITHDRAW,
            record.spec.pipeline_id,
            cluster=cluster,
            detail=request.priority.name,
        )
        return True

    def grant(self, grant: Grant) -> None:
        """Book what a plan granted."""
        record = self.pipelines[grant.pipeline_id]
        del record.pending[grant.cluster]
        if grant.priority is Priority.GENERATION:
            record.generation_granted = True
        else:
            record.held[grant.cluster] = grant.priority
        self._events.add(
            EventKind.GRANT,
            grant.pipeline_id,
            cluster=grant.cluster,
            gpus=grant.gpus,
            detail=grant.priority.name,
            seconds=self._clock() - record.asked_at.pop(grant.cluster),
        )

    def release(self, record: PipelineRecord, cluster: str) -> None:
        """Book GPUs back whose memory the pipeline has freed itself.

        Raises:
            RequestRefusedError: Nothing of the cluster is held, or a shard of it is
                being resized.
        """
        pid = record.spec.pipeline_id
        what = f"release {pid}_{cluster}"
        if cluster in record.held:
            gpus = record.layout.clusters[cluster]
            priority = record.held.pop(cluster)
        elif cluster == INFER_CLUSTER and record.generation_granted:
            if record.shrinking or record.expanding:
                raise RequestRefusedError(
                    what, "a resize is running", "Use await_release_gpus, which waits for it"
                )
            gpus, priority = record.gpus_of(record.active), Priority.GENERATION
            record.active.clear()
            self.stop_generation(record)
        else:
            raise RequestRefusedError(what, "it holds nothing", "Release once per grant")
        self._events.add(EventKind.RELEASE, pid, cluster=cluster, gpus=gpus, detail=priority.name)

    def stop_generation(self, record: PipelineRecord) -> None:
        """Forget demand; shards in place will be taken and none comes until a new request."""
        record.wants_generation = record.generation_granted = False
        record.promised = frozenset()
        self.clear_progress(record)

    # --- progress --------------------------------------------------------

    def report(self, record: PipelineRecord, report: ProgressReport) -> bool:
        """Take over a demand snapshot; whether the demand changed."""
        before = record.demand
        record.reported, record.estimate = report.remaining, 0
        return before != record.demand

    def clear_progress(self, record: PipelineRecord) -> None:
        """The pipeline wants nothing until its next report or request."""
        record.reported, record.estimate = 0, 0

    # --- planning and resizes --------------------------------------------

    def snapshot(self) -> Snapshot:
        """What the planner decides on."""
        self._run_clocks()
        lost = frozenset(gpu for gpus in self._lost.values() for gpu in gpus)
        views = {pid: record.view() for pid, record in self.pipelines.items()}
        return Snapshot(self._clock(), views, lost)

    def _run_clocks(self) -> None:
        now = self._clock()
        for record in self.pipelines.values():
            served = bool(record.active or record.expanding)
            waits = not served and record.view().eager
            if record.served_since is not None and not served:
                record.served_s += now - record.served_since
            record.waiting_since = (record.waiting_since or now) if waits else None
            record.served_since = (record.served_since or now) if served else None

    def keep_promises(self, plan: Plan) -> None:
        """Remember for whom GPUs are being freed."""
        for pid, record in self.pipelines.items():
            record.promised = frozenset(plan.promised.get(pid, ()))

    def resize_started(self, pid: str, ranks: tuple[int, ...], *, shrink: bool) -> None:
        """Book that ``resize_infer`` is being called."""
        record = self.pipelines[pid]
        if shrink:
            record.active.difference_update(ranks)
            record.shrinking.update(ranks)
        else:
            record.expanding.update(ranks)
        self._events.add(
            EventKind.SHRINK_START if shrink else EventKind.EXPAND_START,
            pid,
            cluster=INFER_CLUSTER,
            gpus=record.gpus_of(ranks),
            dp_ranks=ranks,
        )

    def resize_ended(
        self, record: PipelineRecord, ranks: tuple[int, ...], *, shrink: bool, seconds: float
    ) -> None:
        """Book that ``resize_infer`` returned; also for a pipeline that closed meanwhile."""
        pid = record.spec.pipeline_id
        if shrink:
            record.shrinking.difference_update(ranks)
            record.shrinks += 1
            record.shrink_s += seconds
        else:
            record.expanding.difference_update(ranks)
            record.active.update(ranks)
            record.expands += 1
            record.expand_s += seconds
        self._events.add(
            EventKind.SHRINK_END if shrink else EventKind.EXPAND_END,
            pid,
            cluster=INFER_CLUSTER,
            gpus=record.gpus_of(ranks),
            dp_ranks=ranks,
            seconds=seconds,
        )

    # --- the end of a pipeline -------------------------------------------

    def close(self, pid: str, cause: str, *, lost: set[int] | None) -> PipelineRecord:
        """Forget a pipeline.

        Args:
            pid: The pipeline.
            cause: Completes "the pipeline is unknown: ...", for calls that come late.
            lost: GPUs that stay out of reach until :meth:`recover`, as does the
                pipeline's id; ``None`` when nothing of it is left running.
        """
        record = self.pipelines.pop(pid)
        self.ended[pid] = cause
        record.pending.clear()
        if lost is not None:
            self._lost[pid] = lost
        return record

    def occupied_by(self, record: PipelineRecord) -> set[int]:
        """Every GPU on which the pipeline may hold memory."""
        held = {gpu for cluster in record.held for gpu in record.layout.clusters[cluster]}
        return held | set(record.gpus_of(record.resident))

    def recover(self, pid: str, gpus: set[int] | None = None) -> None:
        """Return GPUs of a closed pipeline to the others: these, or all."""
        left = self._lost.get(pid, set()) - gpus if gpus is not None else set()
        if left:
            self._lost[pid] = left
        else:
            self._lost.pop(pid, None)

    def silent(self, now: float, intervals: int) -> list[tuple[str, float]]:
        """Pipelines that have not been heard of for so many heartbeats, with the seconds."""
        return [
            (pid, now - record.last_seen)
            for pid, record in self.pipelines.items()
            if now - record.last_seen > intervals * record.heartbeat_s
        ]

    def status(self) -> dict[str, object]:
        """The state as plain data."""
        owner: dict[int, list[str]] = {}
        for pid, record in self.pipelines.items():
            for cluster in record.held:
                for gpu in record.layout.clusters[cluster]:
                    owner.setdefault(gpu, []).append(f"{pid}_{cluster}")
            for rank in record.resident:
                for gpu in record.layout.shards[rank]:
                    owner.setdefault(gpu, []).append(f"{pid}_{INFER_CLUSTER}[{rank}]")
        for pid, gpus in self._lost.items():
            for gpu in gpus:
                owner.setdefault(gpu, []).append(f"{pid} (ending)")
        return {
            "num_gpus": self.num_gpus,
            "gpus": owner,
            "pipelines": {pid: _describe(record) for pid, record in self.pipelines.items()},
            "ended": dict(self.ended),
        }


def _describe(record: PipelineRecord) -> dict[str, object]:
    pid = record.spec.pipeline_id
    return {
        "held": {cluster: priority.name for cluster, priority in record.held.items()},
        "pending": [request_name(pid, request) for request in record.pending.values()],
        "active": sorted(record.active),
        "shrinking": sorted(record.shrinking),
        "expanding": sorted(record.expanding),
        "wants_generation": record.wants_generation,
        "demand": record.demand,
        "shrinks": record.shrinks,
        "expands": record.expands,
        "seconds_per_shrink": record.shrink_s / max(record.shrinks, 1),
        "seconds_per_expand": record.expand_s / max(record.expands, 1),
    }
