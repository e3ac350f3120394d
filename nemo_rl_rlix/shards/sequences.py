"""The order in which a shard is put to sleep, brought in, and updated in place.

Each sequence runs under the shard's operation lock. Between two remote calls it
looks whether a shrink has taken the shard; if so it stops and leaves the shard
to the shrink, which waits for the lock. Any other error is the owner's to handle.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import CacheNotReadyError, ShardFailedError
from nemo_rl_rlix.settings import Deadlines
from nemo_rl_rlix.shards.protocol import (
    KV_CACHE_TAG,
    WEIGHTS_TAG,
    InferenceShard,
    RankOutcome,
)
from nemo_rl_rlix.shards.state import ShardState, needs_sync, slept
from nemo_rl_rlix.shards.table import ShardTable
from nemo_rl_rlix.weights.sync import sync_shard
from nemo_rl_rlix.weights.types import CacheHandle


class WeightSource(Protocol):
    """Where complete weights come from; a cache book is one."""

    @property
    def cache_ready_step(self) -> int:
        """Version of the newest complete cache, -1 without one."""
        ...

    def lease(self, *, timeout_s: float = 0.0) -> AbstractContextManager[CacheHandle]:
        """Keep the newest complete cache readable for a while, waiting for one if need be."""
        ...


class ShardTakenError(Exception):
    """A shrink has taken the shard meanwhile; not an error of the shard."""


@dataclass(frozen=True)
class SequenceContext:
    """What every sequence needs besides the shard.

    Attributes:
        table: States of the pipeline's shards.
        weights: Source of weights.
        deadlines: Deadline of each step in seconds.
        sleep_level: Level of a shrink.
        clear_cache_on_refresh: Whether an update in place drops the KV cache of
            running requests (``recompute_kv_cache_after_weight_updates``).
    """

    table: ShardTable
    weights: WeightSource
    deadlines: Deadlines
    sleep_level: int
    clear_cache_on_refresh: bool


def put_to_sleep(
    context: SequenceContext, shard: InferenceShard, epoch: int, deadline: Deadline
) -> RankOutcome:
    """Close, drain, sleep, acknowledge. The shard is DRAINING already.

    Raises:
        ShardFailedError: It did not become idle, or keeps more memory than allowed.
    """
    rank, limits = shard.dp_rank, context.deadlines
    shard.close_admission(epoch=epoch, timeout_s=deadline.left(limits.control_s))
    drained = shard.drain(timeout_s=deadline.left(limits.drain_s))
    if not drained.idle:
        # Never sleep by force: the engine would step on unmapped memory.
        raise ShardFailedError(
            rank, f"not idle after {limits.drain_s:g} s, {drained.leftover} requests left"
        )
    memory = shard.sleep(level=context.sleep_level, timeout_s=deadline.left(limits.sleep_s))
    if not memory.within_budget:
        raise ShardFailedError(
            rank,
            f"asleep it holds {memory.held_bytes} bytes of device memory,"
            f" more than the {memory.budget_bytes} allowed (rlix.sleeping_memory_mib)",
        )
    context.table.update(rank, lambda record: slept(record, context.sleep_level))
    return RankOutcome(rank, ShardState.ASLEEP.value, aborted=drained.aborted)


def bring_in(context: SequenceContext, shard: InferenceShard, deadline: Deadline) -> RankOutcome:
    """Wake, sync, finalize, prove, activate. The shard is ASLEEP.

    Raises:
        ShardTakenError: A shrink took the shard on the way, or before.
        CacheNotReadyError: There is nothing to sync from. In state ASLEEP the shard
            has not been touched.
        ShardFailedError: It would serve wrongly, or not at all.
        CoverageError: Weights are missing after the sync.
    """
    rank, table, limits = shard.dp_rank, context.table, context.deadlines
    if context.weights.cache_ready_step < 0:
        raise CacheNotReadyError("no complete weight cache yet; the next one brings the shard in")
    # Leased before the wake: a cache that goes meanwhile would leave it awake and empty.
    with context.weights.lease(timeout_s=deadline.left(context.deadlines.receive_s)) as handle:
        epoch = table.begin_wake(rank)
        if epoch is None:
            raise ShardTakenError
        # Requests that reached a sleeping engine would run on unsynced weights.
        shard.close_admission(epoch=epoch, timeout_s=deadline.left(limits.control_s))
        drained = shard.drain(timeout_s=deadline.left(limits.drain_s))
        if not drained.idle:
            raise ShardFailedError(
                rank, f"not idle before the wake, {drained.leftover} requests in its tables"
            )
        shard.wake(tags=(WEIGHTS_TAG,), timeout_s=deadline.left(limits.wake_s))
        if table.move(rank, ShardState.SYNCING, only_from=(ShardState.WAKING,)) is None:
            raise ShardTakenError
        moved = _sync(context, shard, handle, ShardState.SYNCING, deadline)
    shard.wake(tags=(KV_CACHE_TAG,), timeout_s=deadline.left(limits.wake_s))
    _reset_prefix_cache(context, shard, deadline)
    shard.probe(timeout_s=deadline.left(limits.probe_s))
    while True:
        record = table.get(rank)
        if record.state is not ShardState.SYNCING:
            raise ShardTakenError
        shard.open_admission(
            epoch=epoch,
            weights_version=record.weights_version,
            timeout_s=deadline.left(limits.control_s),
        )
        if table.activate(rank):
            return RankOutcome(rank, ShardState.ACTIVE.value, synced_bytes=moved)
        # A newer version was published between the sync and the activation.
        moved += _update_paused(context, shard, ShardState.SYNCING, epoch, deadline)


def update_in_place(
    context: SequenceContext, shard: InferenceShard, deadline: Deadline
) -> RankOutcome:
    """Bring a serving shard to the newest weights between two engine steps.

    No request is aborted. Any error leaves the engine paused: the owner ends it.

    Raises:
        ShardTakenError: A shrink took the shard on the way.
    """
    rank, table = shard.dp_rank, context.table
    epoch = table.move(rank, ShardState.REFRESHING, only_from=(ShardState.ACTIVE,))
    if epoch is None:
        raise ShardTakenError
    moved = 0
    while True:
        moved += _update_paused(context, shard, ShardState.REFRESHING, epoch, deadline)
        if table.activate(rank):
            return RankOutcome(rank, ShardState.ACTIVE.value, synced_bytes=moved)
        if table.get(rank).state is not ShardState.REFRESHING:
            raise ShardTakenError


def _update_paused(
    context: SequenceContext,
    shard: InferenceShard,
    state: ShardState,
    epoch: int,
    deadline: Deadline,
) -> int:
    rank, limits = shard.dp_rank, context.deadlines
    pause_epoch = shard.pause_keep(
        clear_cache=context.clear_cache_on_refresh, timeout_s=deadline.left(limits.control_s)
    )
    with context.weights.lease(timeout_s=deadline.left(context.deadlines.receive_s)) as handle:
        moved = _sync(context, shard, handle, state, deadline)
    if context.clear_cache_on_refresh:
        _reset_prefix_cache(context, shard, deadline)
    else:
        # Running requests hold cached blocks, so a False is expected here.
        shard.reset_prefix_cache(timeout_s=deadline.left(limits.control_s))
    shard.open_admission(
        epoch=epoch,
        weights_version=context.table.get(rank).weights_version,
        timeout_s=deadline.left(limits.control_s),
    )
    if not shard.resume(pause_epoch=pause_epoch, timeout_s=deadline.left(limits.control_s)):
        raise ShardFailedError(rank, f"paused at epoch {pause_epoch}, resumed at another")
    return moved


def _sync(
    context: SequenceContext,
    shard: InferenceShard,
    handle: CacheHandle,
    state: ShardState,
    deadline: Deadline,
) -> int:
    """Sync to a leased cache if the shard is older; returns bytes moved."""
    rank, table = shard.dp_rank, context.table
    if table.get(rank).state is not state:
        raise ShardTakenError
    if not needs_sync(table.get(rank), handle.weights_version):
        return 0
    limits = context.deadlines.model_copy(
        update={
            "receive_s": deadline.left(context.deadlines.receive_s),
            "finalize_s": deadline.left(context.deadlines.finalize_s),
        }
    )
    report = sync_shard(shard, handle, limits)
    if not table.mark_synced(rank, handle.weights_version, only_from=state):
        raise ShardTakenError
    return report.nbytes


def _reset_prefix_cache(
    context: SequenceContext, shard: InferenceShard, deadline: Deadline
) -> None:
    if not shard.reset_prefix_cache(timeout_s=deadline.left(context.deadlines.control_s)):
        raise ShardFailedError(
            shard.dp_rank, "its prefix cache could not be reset; it would answer from old weights"
        )
