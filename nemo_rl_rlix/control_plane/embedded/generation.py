"""Who generates on the GPUs that training leaves.

Works on a virtual allocation that starts from the shards in place and ends in the
one wanted; the difference is the plan. Four steps, repeated until nothing moves:

1. GPUs promised by an earlier plan go to whom they were freed for.
2. A pipeline that wants a shard and has none gets one: a free one, else from a
   pipeline without demand, else from the one furthest above its share, else (more
   pipelines than shards) in turns by longest wait.
3. Free GPUs go to the pipeline that lacks most.
4. A shard changes hands when that lowers the sum of shortfalls (see ``shares``) by
   more than the cost of a switch.

Every step can only be taken a bounded number of times: step 2 once per pipeline,
step 3 lowers the free GPUs and raises no shortfall, step 4 lowers the shortfalls.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from nemo_rl_rlix.control_plane.embedded.shares import Claim, fair_targets, gain
from nemo_rl_rlix.control_plane.embedded.snapshot import PipelineView, Snapshot
from nemo_rl_rlix.control_plane.embedded.training import TrainingDecision

Shard = tuple[str, int]
Score = tuple[float, ...]
MAX_ROUNDS = 100


@dataclass(frozen=True)
class PlannerConfig:
    """What a switch must be worth.

    Attributes:
        min_gain: Least fall of the summed shortfall, per GPU moved, for which a shard
            changes hands. 0.1 means: at a target of 2 shards move when 0.45 of a shard
            is missing, at 10 when 1 is, at 100 when 6 are.
        turn_s: With more pipelines than shards, seconds that a pipeline waits and
            that a shard serves before it passes on.
    """

    min_gain: float = 0.1
    turn_s: float = 30.0


def decide_generation(
    snapshot: Snapshot, training: TrainingDecision, config: PlannerConfig
) -> Allocation:
    """Settle who generates where, given what training takes."""
    allocation = Allocation(snapshot, training, config)
    allocation.honour_promises()
    # Rest comes after a few rounds; the limit keeps a fault here from stopping every pipeline.
    for _ in range(MAX_ROUNDS):
        moved = allocation.serve_the_unserved()
        moved |= allocation.hand_out(allocation.free)
        moved |= allocation.rebalance()
        if not moved:
            break
    return allocation


class Allocation:
    """A virtual assignment of shards to GPUs, and the moves it took to get there.

    Attributes:
        owner: GPU -> the shard that (virtually) has it.
        free: GPUs that nobody has, those that are being freed included.
        have: Pipeline -> its shards, virtually.
        taken: Active shards to shrink.
        given: Shards to expand, now or when their GPUs are free.
        target: Pipeline -> GPUs it should have.
    """

    def __init__(
        self, snapshot: Snapshot, training: TrainingDecision, config: PlannerConfig
    ) -> None:
        self._views = snapshot.pipelines
        self._now = snapshot.now
        self._config = config
        self._off_limits = training.claimed | training.occupied.keys()
        self._reserved = training.reserved
        self.owner: dict[int, Shard] = {}
        self.free: set[int] = set()
        self.taken: set[Shard] = set(training.shrinks)
        self.given: set[Shard] = set()
        self._pinned: set[Shard] = set()
        self._received: set[str] = set()
        self.have: dict[str, int] = dict.fromkeys(self._views, 0)
        for pid, view in self._views.items():
            self._place(pid, view)
        self.freeing = {
            gpu
            for pid, view in self._views.items()
            for rank in view.shrinking
            for gpu in view.layout.shards[rank]
        }
        self._usable = {
            gpu
            for view in self._views.values()
            if view.wants_generation
            for gpu in view.layout.rank_of
        } - self._off_limits
        self.free = self._usable - self.owner.keys()
        self.target = self._targets()

    def _place(self, pid: str, view: PipelineView) -> None:
        for rank in view.active | view.expanding:
            shard = (pid, rank)
            if rank in view.active and (shard in self.taken or not view.wants_generation):
                self.taken.add(shard)
                continue
            self.have[pid] += 1
            self.owner.update(dict.fromkeys(view.layout.shards[rank], shard))
            if rank in view.expanding:
                self._pinned.add(shard)

    def _targets(self) -> dict[str, float]:
        claims = {}
        budget: set[int] = set()
        for pid, view in self._views.items():
            if not view.eager:
                continue
            tp = view.layout.tp
            fits = sum(self._off_limits.isdisjoint(shard) for shard in view.layout.shards)
            demand = view.known_demand
            claims[pid] = Claim(
                weight=demand * tp * view.layout.priority_weight,
                floor=min(fits, 1) * tp,
                cap=min(fits, max(demand, 1)) * tp,
            )
            budget.update(view.layout.rank_of.keys())
        budget &= self._usable
        budget -= self._reserved - self.owner.keys()
        return fair_targets(claims, len(budget))

    # --- elementary acts -------------------------------------------------

    def _gpus(self, pid: str) -> int:
        return self.have[pid] * self._views[pid].layout.tp

    def _remove(self, shard: Shard) -> None:
        pid, rank = shard
        if shard in self.given:
            self.given.discard(shard)
        else:
            self.taken.add(shard)
        self.have[pid] -= 1
        for gpu in self._views[pid].layout.shards[rank]:
            del self.owner[gpu]
            if gpu in self._usable:
                self.free.add(gpu)

    def _assign(self, pid: str, rank: int) -> set[int]:
        """Give a shard its GPUs, from whoever has them; returns GPUs freed beyond those."""
        gpus = self._views[pid].layout.shards[rank]
        freed: set[int] = set()
        for gpu in gpus:
            holder = self.owner.get(gpu)
            if holder is not None:
                self._remove(holder)
                freed.update(self._views[holder[0]].layout.shards[holder[1]])
        shard = (pid, rank)
        self.owner.update(dict.fromkeys(gpus, shard))
        self.free.difference_update(gpus)
        self.have[pid] += 1
        if shard in self.taken:
            self.taken.discard(shard)
        else:
            self.given.add(shard)
        return freed.difference(gpus)

    def _all_free(self, pid: str, rank: int) -> bool:
        return self.free.issuperset(self._views[pid].layout.shards[rank])

    def _holders(self, pid: str, rank: int) -> set[Shard] | None:
        """Shards that must yield for this one; ``None`` when some cannot."""
        holders = set()
        for gpu in self._views[pid].layout.shards[rank]:
            holder = self.owner.get(gpu)
            if holder is None:
                if gpu not in self.free:
                    return None
            elif holder in self._pinned or holder[0] == pid:
                return None
            else:
                holders.add(holder)
        return holders

    # --- the four steps --------------------------------------------------

    def honour_promises(self) -> None:
        """Let GPUs that were freed for a shard go to it, if it still wants them."""
        for pid, view in self._views.items():
            if not view.eager:
                continue
            for rank in sorted(view.promised - view.active - view.expanding):
                if self._all_free(pid, rank) and self._gpus(pid) < max(
                    self.target[pid], view.layout.tp
                ):
                    self._assign(pid, rank)
                    self._received.add(pid)

    def serve_the_unserved(self) -> bool:
        """Give one shard to each pipeline that wants one and has none."""
        unserved = [pid for pid, view in self._views.items() if view.eager and not self.have[pid]]
        moved = False
        for pid in sorted(unserved, key=lambda p: (-self._waited(p), self._views[p].served_s)):
            best: tuple[Score, int] | None = None
            for rank in self._views[pid].layout.preference:
                score = self._floor_score(pid, rank)
                if score is not None and (best is None or score < best[0]):
                    best = (score, rank)
                    if score == (0.0, 0.0, 0.0):
                        break
            if best is not None:
                self._assign(pid, best[1])
                self._received.add(pid)
                moved = True
        return moved

    def _waited(self, pid: str) -> float:
        since = self._views[pid].waiting_since
        return 0.0 if since is None else self._now - since

    def _floor_score(self, pid: str, rank: int) -> Score | None:
        """How bad it is to take this shard's GPUs, lower is better; ``None``: impossible.

        First figure: 0 free, 1 from pipelines without demand, 2 from those with more
        than one shard, 3 from one whose turn is over.
        """
        holders = self._holders(pid, rank)
        if holders is None:
            return None
        if not holders:
            gpus = self._views[pid].layout.shards[rank]
            waits = any(gpu in self.freeing for gpu in gpus)
            return (0.0, float(not self._reserved.isdisjoint(gpus)), float(waits))
        losses: dict[str, int] = defaultdict(int)
        for donor, _ in holders:
            losses[donor] += 1
        worst: Score = (0.0,)
        for donor, lost in losses.items():
            view = self._views[donor]
            if not view.eager:
                score: Score = (1.0, 0.0)
            elif self.have[donor] > lost:
                score = (2.0, -self._gpus(donor) / self.target[donor])
            elif self._turn_is_over(donor) and self._waited(pid) >= self._config.turn_s:
                assert view.served_since is not None
                score = (3.0, view.served_since)
            else:
                return None
            worst = max(worst, score)
        return (*worst, float(len(holders)))

    def _turn_is_over(self, pid: str) -> bool:
        since = self._views[pid].served_since
        served = since is not None and self._now - since >= self._config.turn_s
        return served and pid not in self._received

    def hand_out(self, gpus: Iterable[int]) -> bool:
        """Give free GPUs to those that lack most, or, all being served, least above share."""
        moved = False
        for gpu in sorted(gpus):
            if gpu not in self.free:
                continue
            takers = [
                (self._need(pid), pid)
                for pid, view in self._views.items()
                if view.eager
                and (rank := view.layout.rank_of.get(gpu)) is not None
                and self._all_free(pid, rank)
                and self._reserved.isdisjoint(view.layout.shards[rank])
                and self.have[pid] < (view.known_demand or len(view.layout.shards))
            ]
            if takers:
                _, pid = max(takers)
                self._assign(pid, self._views[pid].layout.rank_of[gpu])
                moved = True
        return moved

    def _need(self, pid: str) -> Score:
        """Sorts pipelines by what an additional shard would be worth to them."""
        tp = self._views[pid].layout.tp
        have, target = self._gpus(pid), self.target[pid]
        known = float(self._views[pid].known_demand > 0)
        return (known, gain(have, tp, target) / tp, -(have + tp) / max(target, 1e-9))

    def rebalance(self) -> bool:
        """Move shards from above their share to below it while that pays for the switch."""
        bar = self._config.min_gain
        if any(self.have[pid] and not view.eager for pid, view in self._views.items()):
            bar = 0.0
        markets = {
            pid: self._market(pid)
            for pid, view in self._views.items()
            if view.known_demand > 0
            and self.have[pid]
            and gain(self._gpus(pid), view.layout.tp, self.target[pid]) > bar * view.layout.tp
        }
        queue = [(*(-figure for figure in self._need(pid)), pid) for pid in markets]
        heapq.heapify(queue)
        moved = False
        while queue:
            pid = str(heapq.heappop(queue)[-1])
            if not self._buy(pid, markets[pid]):
                continue
            moved = True
            if self._gpus(pid) < self.target[pid]:
                heapq.heappush(queue, (*(-figure for figure in self._need(pid)), pid))
        return moved

    def _market(self, pid: str) -> list[tuple[Score, int, list[int]]]:
        """Shards that the pipeline could take over, grouped by who would lose what."""
        groups: dict[tuple[tuple[str, int], ...], list[int]] = defaultdict(list)
        for rank in reversed(self._views[pid].layout.preference):
            holders = self._holders(pid, rank)
            if holders and self._reserved.isdisjoint(self._views[pid].layout.shards[rank]):
                groups[_losses(holders)].append(rank)
        market = []
        for number, (losses, ranks) in enumerate(groups.items()):
            price = self._price(losses)
            if price is not None:
                market.append((price, number, ranks))
        heapq.heapify(market)
        return market

    def _price(self, losses: tuple[tuple[str, int], ...]) -> Score | None:
        """What the donors lose: shortfall, then (negated) surplus; ``None``: not to be had."""
        cost, surplus = 0.0, float("inf")
        for donor, count in losses:
            view = self._views[donor]
            if not view.eager:
                continue
            have, less, target = self._gpus(donor), count * view.layout.tp, self.target[donor]
            if self.have[donor] <= count or have <= target:
                return None
            cost -= gain(have, -less, target)
            surplus = min(surplus, have / target)
        return (cost, -surplus)

    def _buy(self, pid: str, market: list[tuple[Score, int, list[int]]]) -> bool:
        """Take the cheapest shard if it is worth it; forgets what cannot be had."""
        tp = self._views[pid].layout.tp
        worth = gain(self._gpus(pid), tp, self.target[pid])
        while market:
            price, number, ranks = heapq.heappop(market)
            if not ranks:
                continue
            holders = self._holders(pid, ranks[-1])
            if holders is None:
                ranks.pop()
                heapq.heappush(market, (price, number, ranks))
                continue
            now = self._price(_losses(holders))
            if now is None:
                if holders:
                    continue
                now = (0.0, float("-inf"))
            if now > price:
                heapq.heappush(market, (now, number, ranks))
                continue
            idle_donors = all(not self._views[donor].eager for donor, _ in holders)
            if worth - now[0] <= (0.0 if idle_donors else self._config.min_gain * tp):
                return False
            left_over = self._assign(pid, ranks.pop())
            heapq.heappush(market, (now, number, ranks))
            self.hand_out(left_over)
            return True
        return False


def _losses(holders: set[Shard]) -> tuple[tuple[str, int], ...]:
    counts: dict[str, int] = defaultdict(int)
    for donor, _ in holders:
        counts[donor] += 1
    return tuple(sorted(counts.items()))
