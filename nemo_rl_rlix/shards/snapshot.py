"""What replicas and observers see of the shards' states."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class RoutingSnapshot:
    """Routing state at one epoch. Immutable, picklable, ordered by ``epoch``.

    Attributes:
        epoch: Grows by one or more with every change; never repeats.
        states: dp rank -> name of its :class:`~nemo_rl_rlix.shards.state.ShardState`.
        weights_versions: dp rank -> version the shard holds, -1 if none.
        published_version: Version that a shard must hold to be active.
        closed: Whether the pipeline has ended; waiting requests must end too.
        failure: Why no shard can ever serve again; empty while one may.
    """

    epoch: int
    states: dict[int, str] = field(default_factory=dict)
    weights_versions: dict[int, int] = field(default_factory=dict)
    published_version: int = -1
    closed: bool = False
    failure: str = ""

    @property
    def active(self) -> frozenset[int]:
        """Ranks that requests may be sent to (``_active_dp_ranks`` of the RFC)."""
        return frozenset(r for r, s in self.states.items() if s in ("ACTIVE", "REFRESHING"))

    @property
    def preempted(self) -> frozenset[int]:
        """Ranks inside their abort window (``_preempted_shards`` of the RFC)."""
        return frozenset(r for r, s in self.states.items() if s == "DRAINING")
