"""The states of an inference shard and the one table of legal transitions.

Everything here is plain data: the owner applies these decisions under its lock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from nemo_rl_rlix.errors import IllegalTransitionError


class ShardState(StrEnum):
    """Where a shard is in its life."""

    UNBUILT = "UNBUILT"
    ASLEEP = "ASLEEP"
    WAKING = "WAKING"
    SYNCING = "SYNCING"
    ACTIVE = "ACTIVE"
    REFRESHING = "REFRESHING"
    DRAINING = "DRAINING"
    FAILED = "FAILED"
    REBUILDING = "REBUILDING"


_S = ShardState

TRANSITIONS: dict[ShardState, frozenset[ShardState]] = {
    _S.UNBUILT: frozenset({_S.ASLEEP, _S.FAILED}),
    _S.ASLEEP: frozenset({_S.WAKING, _S.FAILED}),
    _S.WAKING: frozenset({_S.SYNCING, _S.DRAINING, _S.FAILED}),
    _S.SYNCING: frozenset({_S.ACTIVE, _S.DRAINING, _S.FAILED}),
    _S.ACTIVE: frozenset({_S.REFRESHING, _S.DRAINING, _S.FAILED}),
    _S.REFRESHING: frozenset({_S.ACTIVE, _S.DRAINING, _S.FAILED}),
    _S.DRAINING: frozenset({_S.ASLEEP, _S.FAILED}),
    _S.FAILED: frozenset({_S.REBUILDING}),
    _S.REBUILDING: frozenset({_S.ASLEEP, _S.FAILED}),
}
"""State -> states that may follow. Nothing else is legal."""

SERVING = frozenset({_S.ACTIVE, _S.REFRESHING})
"""States in which requests are routed to the shard."""

TAKEABLE = frozenset({_S.ACTIVE, _S.REFRESHING, _S.WAKING, _S.SYNCING})
"""States from which a shrink cuts a shard's route at once."""

HOLDS_DEVICE_MEMORY = frozenset(
    {_S.WAKING, _S.SYNCING, _S.ACTIVE, _S.REFRESHING, _S.DRAINING, _S.REBUILDING}
)
"""States in which a shard may hold more than its sleeping residue."""

UNKNOWN_VERSION = -1
"""``weights_version`` of a shard that holds no complete weights."""


@dataclass(frozen=True)
class ShardRecord:
    """All that is known of one shard.

    Attributes:
        dp_rank: Rank of the shard.
        state: Its state.
        weights_version: Version of its weights, :data:`UNKNOWN_VERSION` if none.
        weights_discarded: Set by a level-2 sleep, cleared only by a complete sync.
        granted: Whether the scheduler has given this rank to the pipeline.
        failures: Failures since the shard last became ACTIVE.
        cause: Why it failed last.
    """

    dp_rank: int
    state: ShardState = ShardState.UNBUILT
    weights_version: int = UNKNOWN_VERSION
    weights_discarded: bool = True
    granted: bool = False
    failures: int = 0
    cause: str = ""


def transition(record: ShardRecord, to: ShardState, *, cause: str = "") -> ShardRecord:
    """Move a shard to another state, with what the move implies for its weights.

    Args:
        record: The shard as it is.
        to: State to enter.
        cause: Why, for ``FAILED``.

    Raises:
        IllegalTransitionError: ``to`` does not follow from the current state, or
            the shard would serve without complete weights.
    """
    if to not in TRANSITIONS[record.state]:
        raise IllegalTransitionError(record.dp_rank, record.state, to)
    if to is ShardState.FAILED:
        return replace(
            record,
            state=to,
            weights_version=UNKNOWN_VERSION,
            weights_discarded=True,
            failures=record.failures + 1,
            cause=cause,
        )
    if to is ShardState.ACTIVE:
        if record.weights_discarded or record.weights_version == UNKNOWN_VERSION:
            raise IllegalTransitionError(record.dp_rank, f"{record.state} without weights", to)
        return replace(record, state=to, failures=0, cause="")
    return replace(record, state=to)


def revoked(record: ShardRecord) -> ShardRecord:
    """Take the grant away and, from a state that may serve soon, cut the route."""
    if record.state in TAKEABLE:
        record = transition(record, ShardState.DRAINING)
    return replace(record, granted=False)


def abandoned(record: ShardRecord) -> ShardRecord:
    """End a rebuild that a shrink has overtaken; no failure of the shard's own."""
    if record.state is not ShardState.REBUILDING:
        return record
    failed = transition(record, ShardState.FAILED, cause=record.cause or "taken while rebuilding")
    return replace(failed, failures=record.failures)


def slept(record: ShardRecord, level: int) -> ShardRecord:
    """End a drain: the shard is asleep, at level 2 without its weights."""
    asleep = transition(record, ShardState.ASLEEP)
    if level >= 2:
        return replace(asleep, weights_version=UNKNOWN_VERSION, weights_discarded=True)
    return asleep


def synced(record: ShardRecord, version: int) -> ShardRecord:
    """Record a complete sync of ``version``.

    Raises:
        IllegalTransitionError: The shard is not in a state that takes weights.
    """
    if record.state not in (ShardState.SYNCING, ShardState.REFRESHING):
        raise IllegalTransitionError(record.dp_rank, record.state, f"synced({version})")
    return replace(record, weights_version=version, weights_discarded=False)


def needs_sync(record: ShardRecord, version: int) -> bool:
    """Whether the shard must receive weights before it may serve ``version``."""
    return record.weights_discarded or record.weights_version < version
