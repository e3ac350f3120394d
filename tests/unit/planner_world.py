"""A world that carries out plans, for the planner's tests."""

from __future__ import annotations

from dataclasses import replace

from nemo_rl_rlix.control_plane.embedded.planner import (
    PlannerConfig,
    make_plan,
    validate_plan,
)
from nemo_rl_rlix.control_plane.embedded.snapshot import (
    PendingRequest,
    PipelineLayout,
    PipelineView,
    Plan,
    Snapshot,
)
from nemo_rl_rlix.control_plane.protocol import PipelineSpec, Priority

CONFIG = PlannerConfig(min_gain=0.1, turn_s=30.0)


def layout(pid, infer, train=(), tp=1, weight=1.0, **more):
    mappings = {"actor_infer": tuple(infer), "actor_train": tuple(train), **more}
    spec = PipelineSpec(
        pid, f"{pid}_ns", mappings, {c: tp if c == "actor_infer" else 1 for c in mappings}
    )
    return PipelineLayout.of(replace(spec, priority_weight=weight))


class World:
    """Pipelines whose resizes take no time, or wait for :meth:`finish`."""

    def __init__(self, *layouts, config=CONFIG):
        self.views = {one.pipeline_id: PipelineView(one) for one in layouts}
        self.now = 1000.0
        self.arrivals = 0
        self.config = config
        self.log = []
        self.shrink_count = 0

    def set(self, pid, **changes):
        self.views[pid] = replace(self.views[pid], **changes)

    def request(self, pid, cluster, priority):
        self.arrivals += 1
        request = PendingRequest(cluster, Priority(priority), self.arrivals)
        self.set(pid, pending=(*self.views[pid].pending, request))
        if priority == Priority.GENERATION:
            self.set(pid, wants_generation=True)
        self._clocks()

    def generate(self, pid, demand=8):
        self.set(pid, demand=demand)
        self.request(pid, "actor_infer", Priority.GENERATION)

    def release(self, pid, cluster="actor_train"):
        assert cluster in self.views[pid].held
        self.set(pid, held=self.views[pid].held - {cluster})

    def _clocks(self):
        for pid, view in self.views.items():
            served = bool(view.active or view.expanding)
            waits = view.eager and not served
            if view.served_since is not None and not served:
                self.set(pid, served_s=view.served_s + self.now - view.served_since)
            self.set(
                pid,
                waiting_since=(view.waiting_since or self.now) if waits else None,
                served_since=(view.served_since or self.now) if served else None,
            )

    def snapshot(self):
        self._clocks()
        return Snapshot(self.now, dict(self.views))

    def step(self) -> Plan:
        """Plan once and carry the plan out; shrinks and expands end at once."""
        plan = self.start()
        self.finish()
        return plan

    def start(self) -> Plan:
        snapshot = self.snapshot()
        plan = make_plan(snapshot, self.config)
        validate_plan(snapshot, plan)
        for pid in self.views:
            self.set(pid, promised=frozenset(plan.promised.get(pid, ())))
        for grant in plan.grants:
            view = self.views[grant.pipeline_id]
            left = tuple(r for r in view.pending if r.cluster != grant.cluster)
            self.set(grant.pipeline_id, pending=left)
            if grant.priority is not Priority.GENERATION:
                self.set(grant.pipeline_id, held=view.held | {grant.cluster})
            self.log.append(("grant", grant.pipeline_id, grant.cluster, grant.gpus))
        for pid, ranks in plan.shrinks.items():
            view = self.views[pid]
            self.set(pid, active=view.active - set(ranks), shrinking=view.shrinking | set(ranks))
            self.shrink_count += len(ranks)
            self.log.append(("shrink", pid, ranks))
        for pid, ranks in plan.expands.items():
            self.set(pid, expanding=self.views[pid].expanding | set(ranks))
            self.log.append(("expand", pid, ranks))
        self._clocks()
        return plan

    def finish(self, *pids):
        for pid in pids or self.views:
            view = self.views[pid]
            self.set(
                pid,
                active=view.active | view.expanding,
                expanding=frozenset(),
                shrinking=frozenset(),
            )
        self._clocks()

    def settle(self, limit=6):
        """Plan until nothing moves; returns the number of plans that did something."""
        for count in range(limit):
            if self.step().empty:
                return count
        raise AssertionError(f"no rest after {limit} plans: {self.log}")

    def active(self, pid):
        return sorted(self.views[pid].active)
