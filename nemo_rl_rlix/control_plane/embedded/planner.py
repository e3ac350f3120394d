"""The embedded control plane's decisions: a pure function from a snapshot to a plan."""

from __future__ import annotations

from collections import defaultdict

from nemo_rl_rlix.control_plane.embedded.generation import (
    Allocation,
    PlannerConfig,
    decide_generation,
)
from nemo_rl_rlix.control_plane.embedded.snapshot import (
    Grant,
    PipelineView,
    Plan,
    Snapshot,
    request_name,
)
from nemo_rl_rlix.control_plane.embedded.training import decide_training
from nemo_rl_rlix.control_plane.protocol import Priority
from nemo_rl_rlix.errors import RLixError

DEFAULT_CONFIG = PlannerConfig()


class PlanError(RLixError):
    """A plan contradicts the snapshot it was made from: a fault of the planner."""


def make_plan(snapshot: Snapshot, config: PlannerConfig = DEFAULT_CONFIG) -> Plan:
    """Decide what to shrink, expand and grant now.

    Stateless: what is in flight is part of the snapshot, so that it can be called
    after every event. Takes time near linear in the sum of the pipelines' GPUs.

    Args:
        snapshot: The state of every pipeline.
        config: What a switch must be worth.

    Returns:
        Acts that may start at once and side by side. An expand whose GPUs are still
        occupied is not among them: it is ``promised`` and comes up again in the
        cycle after the shrink. A pipeline gets no second shrink (or expand) while
        one is running.
    """
    training = decide_training(snapshot)
    allocation = decide_generation(snapshot, training, config)
    shrinks = _by_pipeline(allocation.taken)
    expands, promised = _split_given(snapshot, allocation)
    return Plan(
        shrinks={p: r for p, r in shrinks.items() if not snapshot.pipelines[p].shrinking},
        expands={p: r for p, r in expands.items() if not snapshot.pipelines[p].expanding},
        grants=(*training.grants, *_generation_grants(snapshot, allocation)),
        promised=promised,
        blocked=training.blocked,
    )


def _by_pipeline(shards: set[tuple[str, int]]) -> dict[str, tuple[int, ...]]:
    ranks: dict[str, list[int]] = defaultdict(list)
    for pid, rank in sorted(shards):
        ranks[pid].append(rank)
    return {pid: tuple(found) for pid, found in ranks.items()}


def _split_given(
    snapshot: Snapshot, allocation: Allocation
) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """Which new shards can start now, and which wait for GPUs to be freed."""
    busy = set(allocation.freeing)
    for pid, rank in allocation.taken:
        busy.update(snapshot.pipelines[pid].layout.shards[rank])
    waits = {
        (pid, rank)
        for pid, rank in allocation.given
        if not busy.isdisjoint(snapshot.pipelines[pid].layout.shards[rank])
    }
    return _by_pipeline(allocation.given - waits), _by_pipeline(waits)


def _generation_grants(snapshot: Snapshot, allocation: Allocation) -> list[Grant]:
    grants = []
    for pid, view in snapshot.pipelines.items():
        serving = sorted(rank for rank in view.active if (pid, rank) not in allocation.taken)
        if not serving or not view.wants_generation:
            continue
        gpus = tuple(gpu for rank in serving for gpu in view.layout.shards[rank])
        grants += [
            Grant(pid, request.cluster, request.priority, gpus)
            for request in view.pending
            if request.priority is Priority.GENERATION
        ]
    return grants


def validate_plan(snapshot: Snapshot, plan: Plan) -> None:
    """Check that a plan can be carried out.

    Raises:
        PlanError: Says which act contradicts the snapshot.
    """
    holder = _holders(snapshot)
    users: dict[int, str] = {}
    for pid, ranks in plan.shrinks.items():
        _require(len(set(ranks)) == len(ranks) > 0, f"{pid}: shrinks {ranks}")
        view = _view(snapshot, pid)
        _require(view.active.issuperset(ranks), f"{pid}: shrinks {ranks}, active {view.active}")
    for pid, ranks in plan.expands.items():
        _require(len(set(ranks)) == len(ranks) > 0, f"{pid}: expands {ranks}")
        view = _view(snapshot, pid)
        _require(view.wants_generation, f"{pid}: expands without a GENERATION request")
        for rank in ranks:
            _require(0 <= rank < len(view.layout.shards), f"{pid}: no shard {rank}")
            _take(users, holder, view.layout.shards[rank], f"{pid} shard {rank}")
    for grant in plan.grants:
        view = _view(snapshot, grant.pipeline_id)
        match = [
            r for r in view.pending if (r.cluster, r.priority) == (grant.cluster, grant.priority)
        ]
        _require(len(match) == 1, f"{grant}: no such request")
        if grant.priority is Priority.GENERATION:
            active = {gpu for rank in view.active for gpu in view.layout.shards[rank]}
            _require(bool(grant.gpus) and active.issuperset(grant.gpus), f"{grant}: not serving")
        else:
            _require(grant.gpus == view.layout.clusters[grant.cluster], f"{grant}: not the mapping")
            _take(users, holder, grant.gpus, request_name(grant.pipeline_id, match[0]))


def _holders(snapshot: Snapshot) -> dict[int, str]:
    holder = dict.fromkeys(snapshot.lost_gpus, "an ended pipeline")
    for pid, view in snapshot.pipelines.items():
        for cluster in view.held:
            holder.update(dict.fromkeys(view.layout.clusters[cluster], f"{pid} {cluster}"))
        for rank in view.active | view.shrinking | view.expanding:
            holder.update(dict.fromkeys(view.layout.shards[rank], f"{pid} shard {rank}"))
    return holder


def _take(users: dict[int, str], holder: dict[int, str], gpus: tuple[int, ...], who: str) -> None:
    for gpu in gpus:
        _require(gpu not in holder, f"{who}: GPU {gpu} is with {holder.get(gpu)}")
        _require(gpu not in users, f"{who}: GPU {gpu} also goes to {users.get(gpu)}")
        users[gpu] = who


def _view(snapshot: Snapshot, pid: str) -> PipelineView:
    _require(pid in snapshot.pipelines, f"{pid}: not registered")
    return snapshot.pipelines[pid]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise PlanError(message)
