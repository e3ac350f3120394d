"""How many GPUs each generating pipeline should have, and what a GPU more is worth."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Claim:
    """What one pipeline may have of the generation GPUs, in GPUs.

    Attributes:
        weight: Remaining trajectories x tp x priority weight; 0 when unknown.
        floor: Least it should have: one shard, or 0 without demand.
        cap: Most it can use.
    """

    weight: float
    floor: float
    cap: float


def fair_targets(claims: dict[str, Claim], budget: int) -> dict[str, float]:
    """Split ``budget`` GPUs in proportion to the weights, between floor and cap.

    Finds the level at which ``sum(clamp(level * weight, floor, cap))`` equals the
    budget, so that serving the floors comes out of the larger shares: the sum of
    the targets never exceeds the budget unless the floors alone do.

    Args:
        claims: Pipeline -> its claim.
        budget: GPUs that generation may use.

    Returns:
        Pipeline -> GPUs, not rounded. Exactly the floors when the budget cannot
        even serve those.
    """

    def split(level: float) -> dict[str, float]:
        return {
            name: min(max(level * claim.weight, claim.floor), max(claim.cap, claim.floor))
            for name, claim in claims.items()
        }

    weights = [claim.weight for claim in claims.values() if claim.weight > 0]
    if not weights or sum(claim.floor for claim in claims.values()) >= budget:
        return split(0.0)
    low, high = 0.0, budget / min(weights)
    if sum(split(high).values()) <= budget:
        return split(high)
    for _ in range(64):
        middle = (low + high) / 2
        if sum(split(middle).values()) > budget:
            high = middle
        else:
            low = middle
    return split(low)


def shortfall(have: float, target: float) -> float:
    """Badness of having ``have`` GPUs of ``target``: the squared lack over the target.

    Only lack counts. So handing out an idle GPU never makes anything worse, each
    move between pipelines that pays lowers the sum, and no sequence of moves
    can come back to where it began.
    """
    lack = max(0.0, target - have)
    return lack * lack / target if target > 0 else 0.0


def gain(have: float, more: float, target: float) -> float:
    """How much the badness falls when ``more`` GPUs come (negative: are taken)."""
    return shortfall(have, target) - shortfall(have + more, target)
