"""The one place that holds the shards' states.

Lock order: a shard's operation lock is taken first and held over remote calls;
the table's mutex is taken last and never held over anything that blocks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from nemo_rl_rlix.errors import DeadlineExceededError, PipelineClosedError
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot
from nemo_rl_rlix.shards.state import (
    SERVING,
    ShardRecord,
    ShardState,
    revoked,
    synced,
    transition,
)


@dataclass(frozen=True)
class Transition:
    """One change of one shard, for traces and tests.

    Attributes:
        dp_rank: Rank of the shard.
        before: State it left.
        after: State it entered.
        epoch: Epoch of the change.
        wall_s: Unix time of the change in seconds.
        weights_version: Version that the shard holds after it.
        cause: Why, for failures.
    """

    dp_rank: int
    before: ShardState
    after: ShardState
    epoch: int
    wall_s: float
    weights_version: int
    cause: str = ""


TransitionListener = Callable[[Transition], None]


class ShardTable:
    """Thread-safe states, epoch and published version of a pipeline's shards.

    Args:
        dp_ranks: Ranks of the shards.
        published_version: Version that the first activation must hold.
        listener: Called after each change, in order, under the mutex: it must
            not block.
    """

    def __init__(
        self,
        dp_ranks: Iterable[int],
        *,
        published_version: int = 0,
        listener: TransitionListener | None = None,
    ) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._records = {rank: ShardRecord(rank) for rank in sorted(dp_ranks)}
        self._operation = {rank: threading.Lock() for rank in self._records}
        self._epoch = 1
        self._published = published_version
        self._closed = False
        self._failure = ""
        self._listener = listener

    @property
    def dp_ranks(self) -> tuple[int, ...]:
        """All ranks, ascending."""
        return tuple(self._records)

    @property
    def published_version(self) -> int:
        """Version that a shard must hold to become active."""
        with self._changed:
            return self._published

    @contextmanager
    def operation(self, dp_rank: int, timeout_s: float) -> Iterator[None]:
        """Hold the right to act on one shard.

        Raises:
            DeadlineExceededError: Another act kept it for longer than ``timeout_s``.
        """
        lock = self._operation[dp_rank]
        if not lock.acquire(timeout=max(timeout_s, 0.0)):
            raise DeadlineExceededError(
                f"the act before this one on shard {dp_rank}", timeout_s, self.get(dp_rank).state
            )
        try:
            yield
        finally:
            lock.release()

    def get(self, dp_rank: int) -> ShardRecord:
        """The record of one shard at this moment."""
        with self._changed:
            return self._records[dp_rank]

    def move(
        self,
        dp_rank: int,
        to: ShardState,
        *,
        only_from: Iterable[ShardState] | None = None,
        cause: str = "",
    ) -> int | None:
        """Change the state of a shard.

        Args:
            dp_rank: Rank of the shard.
            to: State to enter.
            only_from: If given, do nothing unless the shard is in one of these.
            cause: Why, for failures.

        Returns:
            The new epoch, or ``None`` when ``only_from`` did not hold.

        Raises:
            IllegalTransitionError: The move is not in the table.
        """
        with self._changed:
            record = self._records[dp_rank]
            if only_from is not None and record.state not in only_from:
                return None
            return self._store(record, transition(record, to, cause=cause))

    def update(self, dp_rank: int, change: Callable[[ShardRecord], ShardRecord]) -> int:
        """Apply a pure change to a record; returns the new epoch."""
        with self._changed:
            record = self._records[dp_rank]
            return self._store(record, change(record))

    def mark_synced(self, dp_rank: int, version: int, *, only_from: ShardState) -> bool:
        """Record a complete sync, unless the shard left ``only_from`` meanwhile."""
        with self._changed:
            record = self._records[dp_rank]
            if record.state is not only_from:
                return False
            self._store(record, synced(record, version))
            return True

    def grant(self, dp_rank: int) -> None:
        """Note that the scheduler has given the rank to this pipeline."""
        self.update(dp_rank, lambda record: replace(record, granted=True))

    def revoke(self, dp_rank: int) -> None:
        """Note that the scheduler takes the rank, and cut its route, in one step.

        A shard that :meth:`begin_wake` has let wake before is DRAINING afterwards;
        none can begin to wake from here on.
        """
        self.update(dp_rank, revoked)

    def begin_wake(self, dp_rank: int) -> int | None:
        """Move a sleeping shard to WAKING, but only while its rank is granted.

        Returns:
            The new epoch, or ``None`` when it does not sleep or was taken.
        """
        return self._begin(dp_rank, ShardState.ASLEEP, ShardState.WAKING)

    def begin_rebuild(self, dp_rank: int) -> bool:
        """Move a failed shard to REBUILDING, but only while its rank is granted."""
        return self._begin(dp_rank, ShardState.FAILED, ShardState.REBUILDING) is not None

    def wants_rebuild(self, dp_rank: int) -> bool:
        """Whether the shard has failed and its rank is granted to a pipeline that lives."""
        with self._changed:
            return self._may_begin(dp_rank, ShardState.FAILED) and not self._failure

    def activate(self, dp_rank: int) -> bool:
        """Let a synced shard serve, unless it is older than the published version.

        The comparison and the move share the mutex with :meth:`publish`.

        Returns:
            ``False`` when the shard must sync again, or was taken, or the pipeline
            has ended meanwhile.
        """
        with self._changed:
            record = self._records[dp_rank]
            ready = record.state in (ShardState.SYNCING, ShardState.REFRESHING)
            if self._closed or not ready or record.weights_version < self._published:
                return False
            self._store(record, transition(record, ShardState.ACTIVE))
            return True

    def publish(self, version: int) -> list[int]:
        """Raise the published version if every serving shard holds it.

        Returns:
            Ranks that serve older weights; when not empty, nothing was published.
        """
        with self._changed:
            stale = [
                rank
                for rank, record in self._records.items()
                if record.state in SERVING and record.weights_version < version
            ]
            if not stale and version > self._published:
                self._published = version
                self._bump()
            return stale

    def close(self) -> None:
        """End the pipeline: waiting requests end, no shard becomes active again."""
        with self._changed:
            self._closed = True
            self._bump()

    def fail(self, cause: str) -> None:
        """State that no shard can serve again, and why. The first cause stays."""
        with self._changed:
            self._failure = self._failure or cause
            self._bump()

    def check_open(self) -> None:
        """Refuse new work once the pipeline is closed.

        Raises:
            PipelineClosedError: It is.
        """
        with self._changed:
            if self._closed:
                raise PipelineClosedError("the pipeline is shutting down")

    def snapshot(self) -> RoutingSnapshot:
        """The routing state at this moment."""
        with self._changed:
            return self._snapshot()

    def wait_newer(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        """The routing state as soon as it is newer than ``epoch``, or after ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._epoch <= epoch:
                left = deadline - time.monotonic()
                if left <= 0 or not self._changed.wait(left):
                    break
            return self._snapshot()

    def _may_begin(self, dp_rank: int, only_from: ShardState) -> bool:
        record = self._records[dp_rank]
        return record.state is only_from and record.granted and not self._closed

    def _begin(self, dp_rank: int, only_from: ShardState, to: ShardState) -> int | None:
        with self._changed:
            if not self._may_begin(dp_rank, only_from):
                return None
            record = self._records[dp_rank]
            return self._store(record, transition(record, to))

    def _snapshot(self) -> RoutingSnapshot:
        return RoutingSnapshot(
            epoch=self._epoch,
            states={rank: record.state.value for rank, record in self._records.items()},
            weights_versions={r: record.weights_version for r, record in self._records.items()},
            published_version=self._published,
            closed=self._closed,
            failure=self._failure,
        )

    def _store(self, before: ShardRecord, after: ShardRecord) -> int:
        self._records[after.dp_rank] = after
        self._bump()
        if self._listener is not None and before.state is not after.state:
            self._listener(
                Transition(
                    after.dp_rank,
                    before.state,
                    after.state,
                    self._epoch,
                    time.time(),
                    after.weights_version,
                    after.cause,
                )
            )
        return self._epoch

    def _bump(self) -> None:
        self._epoch += 1
        self._changed.notify_all()
