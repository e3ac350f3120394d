"""How many trajectories NeMo RL wants at a moment, and when that is worth a report. Pure.

One unit everywhere: trajectories, which are prompt groups times generations per prompt.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

REPORT_SHARE = 0.02
"""Demand is reported when this share of it has been met since the last report."""


@dataclass(frozen=True)
class BufferView:
    """What a replay buffer knows of demand.

    Attributes:
        counts: Target version -> prompt groups that are there for it.
        consumed: Last target version that training has taken, -1 for none.
        polled: Target versions that training has asked for.
        extra: Trajectories that are wanted beside those of the buffer (validation).
    """

    counts: Mapping[int, int] = field(default_factory=dict)
    consumed: int = -1
    polled: frozenset[int] = frozenset()
    extra: int = 0


@dataclass(frozen=True)
class Demand:
    """A snapshot of demand.

    Attributes:
        collected: Trajectories that are there.
        target: Trajectories that are wanted, those that are there included.
    """

    collected: int
    target: int

    @property
    def remaining(self) -> int:
        """Trajectories still wanted."""
        return self.target - self.collected


def wanted_targets(
    allowed: Iterable[int], generating: Iterable[int], view: BufferView
) -> frozenset[int]:
    """Target versions whose trajectories are wanted.

    Args:
        allowed: Versions that the collector may fill now.
        generating: Versions that it is filling, allowed any more or not.
        view: The buffer.
    """
    every = {*allowed, *generating, *view.polled}
    return frozenset(target for target in every if target > view.consumed)


def measure(
    targets: Iterable[int],
    view: BufferView,
    *,
    groups_per_target: int,
    generations: int,
    open_requests: int,
) -> Demand:
    """The demand at this moment.

    Args:
        targets: See :func:`wanted_targets`.
        view: The buffer.
        groups_per_target: Prompt groups of one training step.
        generations: Trajectories of a prompt group.
        open_requests: Requests that wait for a shard or its answer. Those that no
            missing trajectory accounts for are wanted on top.
    """
    wanted = set(targets)
    complete = groups_per_target * generations
    target = len(wanted) * complete
    there = (min(view.counts.get(version, 0), groups_per_target) for version in wanted)
    collected = sum(there) * generations
    unaccounted = max(0, open_requests - (target - collected))
    return Demand(collected, target + unaccounted + view.extra)


def worth_reporting(last: Demand | None, now: Demand) -> bool:
    """Whether a snapshot says something that the last report did not.

    Another target, a step back, an end of the demand and every 2 % forward do.
    """
    if last is None or now.target != last.target or now.collected < last.collected:
        return True
    gained = now.collected - last.collected
    return gained > 0 and (now.remaining == 0 or gained >= REPORT_SHARE * now.target)
