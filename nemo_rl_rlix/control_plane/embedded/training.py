"""Which all-or-nothing requests can have their GPUs, and what must yield for them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from nemo_rl_rlix.control_plane.embedded.snapshot import (
    Grant,
    PendingRequest,
    PipelineView,
    Snapshot,
    request_name,
)
from nemo_rl_rlix.control_plane.protocol import Priority, cluster_id


@dataclass
class TrainingDecision:
    """Outcome of the first half of a planning cycle.

    Attributes:
        grants: Requests whose GPUs are all free.
        shrinks: Generation shards that must yield, ``(pipeline, dp rank)``.
        claimed: GPUs that now belong to a request, granted or waiting for a shrink.
        reserved: GPUs that a blocked request waits for.
        occupied: GPUs that generation can never have now: held or lost.
        blocked: Name of a request -> why it cannot be granted yet.
    """

    grants: list[Grant] = field(default_factory=list)
    shrinks: set[tuple[str, int]] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    reserved: set[int] = field(default_factory=set)
    occupied: dict[int, str] = field(default_factory=dict)
    blocked: dict[str, str] = field(default_factory=dict)


def decide_training(snapshot: Snapshot) -> TrainingDecision:
    """Go through the requests above GENERATION by priority, then arrival.

    A request that finds a GPU held above GENERATION waits and takes nothing: no
    shard is shrunk for it. It *reserves* its mapping instead: requests after it
    do not get those GPUs, so a large mapping is not starved by small ones.
    A pipeline that already holds GPUs passes reservations, because the one that
    reserves may be waiting for exactly those.
    """
    decision = TrainingDecision(occupied=_occupied(snapshot))
    generating = _generating(snapshot)
    for pid, view, request in _in_order(snapshot.pipelines):
        need = view.layout.clusters[request.cluster]
        name = request_name(pid, request)
        reason = _obstacle(need, decision, passes_reservations=bool(view.held))
        if reason:
            decision.blocked[name] = reason
            decision.reserved.update(need)
            continue
        decision.claimed.update(need)
        in_the_way = {generating[gpu] for gpu in need if gpu in generating}
        for other, rank in in_the_way:
            if rank in snapshot.pipelines[other].active:
                decision.shrinks.add((other, rank))
        if in_the_way:
            decision.blocked[name] = f"waits for the shards {sorted(in_the_way)} to yield"
        else:
            decision.grants.append(Grant(pid, request.cluster, request.priority, need))
    decision.reserved -= decision.claimed
    return decision


def _in_order(
    pipelines: dict[str, PipelineView],
) -> list[tuple[str, PipelineView, PendingRequest]]:
    waiting = [
        (pid, view, request)
        for pid, view in pipelines.items()
        for request in view.pending
        if request.priority is not Priority.GENERATION
    ]
    return sorted(waiting, key=lambda entry: (entry[2].priority, entry[2].arrival))


def _occupied(snapshot: Snapshot) -> dict[int, str]:
    occupied = dict.fromkeys(snapshot.lost_gpus, "a pipeline that is being ended")
    for pid, view in snapshot.pipelines.items():
        for cluster in view.held:
            occupied.update(dict.fromkeys(view.layout.clusters[cluster], cluster_id(pid, cluster)))
    return occupied


def _generating(snapshot: Snapshot) -> dict[int, tuple[str, int]]:
    return {
        gpu: (pid, rank)
        for pid, view in snapshot.pipelines.items()
        for ranks in (view.active, view.shrinking, view.expanding)
        for rank in ranks
        for gpu in view.layout.shards[rank]
    }


def _obstacle(need: Iterable[int], decision: TrainingDecision, *, passes_reservations: bool) -> str:
    for gpu in need:
        if gpu in decision.occupied:
            return f"GPU {gpu} is held by {decision.occupied[gpu]}"
        if gpu in decision.claimed:
            return f"GPU {gpu} goes to an earlier request"
        if gpu in decision.reserved and not passes_reservations:
            return f"GPU {gpu} is reserved for an earlier request"
    return ""
