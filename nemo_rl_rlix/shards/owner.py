"""The owner of a pipeline's shards: runs resizes, refreshes and rebuilds.

It decides nothing about GPUs: the scheduler does. It guarantees that a resize
ends in bounded time with a known state, whatever the engines do: a shard that
does not obey is ended, its memory verified gone, and rebuilt while its rank is
granted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import (
    CacheNotReadyError,
    DeadlineExceededError,
    RLixError,
    ShardFailedError,
)
from nemo_rl_rlix.shards.protocol import InferenceShard, RankOutcome, ResizeReport
from nemo_rl_rlix.shards.sequences import (
    SequenceContext,
    ShardTakenError,
    bring_in,
    put_to_sleep,
    update_in_place,
)
from nemo_rl_rlix.shards.state import SERVING, ShardRecord, ShardState, abandoned

logger = logging.getLogger(__name__)

MAX_FAILURES = 4
REBUILD_BACKOFF_S = (0.0, 1.0, 4.0, 15.0)


def rebuild_delay(failures: int) -> float:
    """Seconds to wait before the next rebuild after ``failures`` failures in a row."""
    return REBUILD_BACKOFF_S[min(max(failures, 1), len(REBUILD_BACKOFF_S)) - 1]


def is_worn(record: ShardRecord) -> bool:
    """Whether a shard has failed so often in a row that one more rebuild is no hope."""
    broken = record.state in (ShardState.FAILED, ShardState.REBUILDING)
    return broken and record.failures >= MAX_FAILURES


def fatal_cause(records: Iterable[ShardRecord]) -> str:
    """Why no shard will serve again, or an empty string while one may.

    A pipeline is beyond saving when every shard that it may use has failed
    :data:`MAX_FAILURES` times in a row, and there is one.
    """
    granted = [record for record in records if record.granted]
    if not all(is_worn(record) for record in granted):
        return ""
    return "; ".join(f"shard {r.dp_rank} failed {r.failures} times: {r.cause}" for r in granted)


class ShardOwner:
    """Runs every act on the shards of one pipeline.

    Args:
        shards: dp rank -> control surface.
        context: States, weights and deadlines.
        name: Pipeline, for log lines.
        pause: How to wait between rebuild attempts; replaced in tests.
    """

    def __init__(
        self,
        shards: Mapping[int, InferenceShard],
        context: SequenceContext,
        *,
        name: str,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self._shards = dict(shards)
        self._context = context
        self._table = context.table
        self._limits = context.deadlines
        self._name = name
        self._pause = pause
        self._rebuilding: set[int] = set()
        self._rebuild_lock = threading.Lock()

    def build(self) -> None:
        """Start every shard that was never built, one after the other.

        One at a time, since engines that start together on one card see each
        other's memory come and go.

        Raises:
            RLixError: A shard could not be built; the run cannot start.
        """
        for rank, shard in self._shards.items():
            with self._table.operation(rank, self._limits.build_s):
                if self._table.get(rank).state is not ShardState.UNBUILT:
                    continue
                shard.build(timeout_s=self._limits.build_s)
                self._table.move(rank, ShardState.ASLEEP)

    def shrink(self, dp_ranks: Iterable[int]) -> ResizeReport:
        """Take shards away: their GPUs' memory is free when this returns.

        Ranks that do not serve are no-ops. Taking every rank is ordinary.

        Raises:
            ShardFailedError: A shard's memory could not be got back even by ending
                its process: the GPU cannot be handed over.
        """
        ranks = self._known(dp_ranks)
        for rank in ranks:
            self._table.revoke(rank)  # every route, before the first remote call
        return self._run(ranks, self._take)

    def expand(self, dp_ranks: Iterable[int]) -> ResizeReport:
        """Bring shards in: they serve when this returns, or are being rebuilt."""
        self._table.check_open()
        ranks = self._known(dp_ranks)
        for rank in ranks:
            self._table.grant(rank)
        return self._run(ranks, self._give)

    def refresh_and_publish(self, version: int) -> ResizeReport:
        """Update the serving shards to the newest cache, then publish ``version``.

        Also brings in granted shards that are asleep because there was no cache
        when they were granted. A shard that cannot be updated stops serving.

        Args:
            version: Version of the newest complete cache.

        Raises:
            CacheNotReadyError: The cache is older than ``version``.
        """
        ready = self._context.weights.cache_ready_step
        if ready < version:
            raise CacheNotReadyError(f"version {version} is to be published, the cache has {ready}")
        started, outcomes = time.monotonic(), list[RankOutcome]()
        while stale := self._table.publish(version):
            outcomes.extend(self._run(stale, self._refresh).outcomes)
        late = [
            rank
            for rank in self._shards
            if (record := self._table.get(rank)).granted and record.state is ShardState.ASLEEP
        ]
        outcomes.extend(self._run(late, self._give).outcomes)
        return ResizeReport(tuple(outcomes), time.monotonic() - started)

    def suspect(self, dp_rank: int) -> None:
        """Look after a shard that a caller says is gone; rebuild it if so. Never raises."""
        for rank in self._known([dp_rank]):
            try:
                with self._table.operation(rank, 0.0):
                    self._look_after_held(rank)
            except DeadlineExceededError:
                logger.debug("%s shard %d is busy; its own act will find out", self._name, rank)

    def _look_after_held(self, rank: int) -> None:
        if self._table.get(rank).state not in SERVING:
            return
        try:
            self._shards[rank].ping(timeout_s=self._limits.control_s)
        except Exception as error:  # noqa: BLE001  the heartbeat must outlive any fault
            self._end_quietly(rank, error)

    def check_serving(self) -> None:
        """Look after every serving shard (called by the heartbeat)."""
        for rank in sorted(self._table.snapshot().active):
            self.suspect(rank)

    def close(self) -> None:
        """Stop serving and end every shard's process. Idempotent.

        A resize that comes later, or is under way, ends as well as any.
        """
        self._table.close()
        for rank in self._shards:
            self._table.revoke(rank)
        self._run(tuple(self._shards), self._close)

    def _close(self, rank: int, deadline: Deadline) -> RankOutcome:
        started = time.monotonic()
        try:
            self._kill(rank)
            with self._table.operation(rank, deadline.left(self._limits.kill_s)):
                self._kill(rank)  # what an act that held the shard has begun since
        except RLixError as error:
            logger.warning("%s shard %d: %s", self._name, rank, error)
            return self._outcome(rank, started, str(error))
        return self._outcome(rank, started)

    def _known(self, dp_ranks: Iterable[int]) -> list[int]:
        ranks = sorted(set(dp_ranks))
        unknown = [rank for rank in ranks if rank not in self._shards]
        if unknown:
            logger.warning("%s: unknown ranks %s in a resize are ignored", self._name, unknown)
        return [rank for rank in ranks if rank in self._shards]

    def _run(
        self, ranks: Sequence[int], act: Callable[[int, Deadline], RankOutcome]
    ) -> ResizeReport:
        """Act on several ranks at once; returns, or raises, when all are through."""
        started = time.monotonic()
        deadline = Deadline(f"{self._name}: resize", self._limits.resize_s)
        # Threads of its own: a shrink must never queue behind acts that hang.
        with ThreadPoolExecutor(max(len(ranks), 1), thread_name_prefix="shards") as pool:
            futures = [pool.submit(act, rank, deadline) for rank in ranks]
        outcomes = tuple(future.result() for future in futures)
        return ResizeReport(outcomes, time.monotonic() - started)

    def _take(self, rank: int, deadline: Deadline) -> RankOutcome:
        started = time.monotonic()
        state = self._table.get(rank).state
        if state in (ShardState.UNBUILT, ShardState.ASLEEP):
            return RankOutcome(rank, state.value)
        if state in (ShardState.FAILED, ShardState.REBUILDING):
            return self._end_rebuild(rank, started)
        try:
            with self._table.operation(rank, deadline.left(self._limits.drain_s)):
                return self._take_held(rank, started, deadline)
        except DeadlineExceededError as error:
            self._end(rank, error)  # whatever holds it is interrupted by that
            return self._outcome(rank, started, str(error))

    def _take_held(self, rank: int, started: float, deadline: Deadline) -> RankOutcome:
        record = self._table.get(rank)
        if record.state is ShardState.FAILED:
            # The act before this one has failed it; whether it is gone is for us to say.
            self._kill(rank)
            return self._outcome(rank, started, record.cause)
        if record.state is not ShardState.DRAINING:
            return RankOutcome(rank, record.state.value)
        try:
            return self._timed(started, self._put_to_sleep(rank, deadline))
        except Exception as error:  # noqa: BLE001  a resize ends well whatever an engine raises
            self._end(rank, error)
            return self._outcome(rank, started, str(error))

    def _put_to_sleep(self, rank: int, deadline: Deadline) -> RankOutcome:
        epoch = self._table.snapshot().epoch
        return put_to_sleep(self._context, self._shards[rank], epoch, deadline)

    def _end_rebuild(self, rank: int, started: float) -> RankOutcome:
        """Stop a rebuild: kill, wait until the builder lets go, kill what it had begun."""
        self._table.update(rank, abandoned)
        record = self._table.get(rank)
        if record.state is not ShardState.FAILED:
            return RankOutcome(rank, record.state.value)  # it ended by itself, asleep
        self._kill(rank)
        try:
            with self._table.operation(rank, self._limits.kill_s):
                self._kill(rank)
        except DeadlineExceededError as error:
            raise ShardFailedError(
                rank, f"its rebuild goes on although it was ended: {error}"
            ) from (error)
        return self._outcome(rank, started, record.cause)

    def _give(self, rank: int, deadline: Deadline) -> RankOutcome:
        started = time.monotonic()
        record = self._table.get(rank)
        if record.state in (ShardState.FAILED, ShardState.REBUILDING):
            self._start_rebuild(rank)
            return self._outcome(rank, started, record.cause)
        try:
            with self._table.operation(rank, deadline.left(self._limits.resize_s)):
                return self._give_held(rank, started, deadline)
        except DeadlineExceededError as error:
            self._end_quietly(rank, error)
            return self._outcome(rank, started, str(error))

    def _give_held(self, rank: int, started: float, deadline: Deadline) -> RankOutcome:
        try:
            if self._table.get(rank).state is ShardState.DRAINING:
                # A shrink that this expand has overtaken; it will find nothing to do.
                self._put_to_sleep(rank, deadline)
            return self._timed(started, bring_in(self._context, self._shards[rank], deadline))
        except ShardTakenError:
            self._start_rebuild(rank)  # if it failed meanwhile
            return self._outcome(rank, started)
        except Exception as error:  # noqa: BLE001  a resize ends well whatever an engine raises
            if not self._lacks_cache(rank, error):
                self._end_quietly(rank, error)
            return self._outcome(rank, started, str(error))

    def _refresh(self, rank: int, deadline: Deadline) -> RankOutcome:
        started = time.monotonic()
        try:
            with self._table.operation(rank, deadline.left(self._limits.resize_s)):
                return self._refresh_held(rank, started, deadline)
        except DeadlineExceededError as error:
            self._end_quietly(rank, error)
            return self._outcome(rank, started, str(error))

    def _refresh_held(self, rank: int, started: float, deadline: Deadline) -> RankOutcome:
        try:
            return self._timed(
                started, update_in_place(self._context, self._shards[rank], deadline)
            )
        except ShardTakenError:
            return self._outcome(rank, started)
        except Exception as error:  # noqa: BLE001  dispatch to the shard must close, whatever it raises
            self._end_quietly(rank, error)
            return self._outcome(rank, started, str(error))

    def _lacks_cache(self, rank: int, error: Exception) -> bool:
        """Whether a shard sleeps on, untouched, until the next cache brings it in."""
        asleep = self._table.get(rank).state is ShardState.ASLEEP
        return asleep and isinstance(error, CacheNotReadyError)

    def _end(self, rank: int, error: Exception) -> None:
        """Fail a shard: end its process, verify its memory gone, rebuild if granted.

        Raises:
            ShardFailedError: The process or its memory stays.
        """
        cause = f"{type(error).__name__}: {error}"
        logger.warning("%s shard %d is ended: %s", self._name, rank, cause)
        not_failed = [state for state in ShardState if state is not ShardState.FAILED]
        self._table.move(rank, ShardState.FAILED, only_from=not_failed, cause=cause)
        self._kill(rank)
        fatal = fatal_cause(self._table.get(r) for r in self._shards)
        if fatal:
            self._table.fail(fatal)
        else:
            self._start_rebuild(rank)

    def _end_quietly(self, rank: int, error: Exception) -> None:
        """As :meth:`_end`, but what cannot be ended ends the pipeline, not the caller."""
        try:
            self._end(rank, error)
        except ShardFailedError as worse:
            self._table.fail(str(worse))

    def _kill(self, rank: int) -> None:
        try:
            memory = self._shards[rank].kill(timeout_s=self._limits.kill_s)
        except Exception as error:
            raise ShardFailedError(rank, f"its process cannot be ended: {error}") from error
        if memory.held_bytes > 0:
            raise ShardFailedError(
                rank, f"its process was ended and still holds {memory.held_bytes} bytes"
            )

    def _start_rebuild(self, rank: int) -> None:
        """Have a failed shard rebuilt while its rank is granted; else do nothing."""
        with self._rebuild_lock:
            if rank in self._rebuilding or not self._table.wants_rebuild(rank):
                return
            self._rebuilding.add(rank)
        threading.Thread(
            target=self._rebuild, args=(rank,), name=f"rebuild-{rank}", daemon=True
        ).start()

    def _rebuild(self, rank: int) -> None:
        """Rebuild until the shard serves, is taken away, or the pipeline is beyond saving."""
        while True:
            self._pause(rebuild_delay(self._table.get(rank).failures))
            try:
                with self._table.operation(rank, self._limits.build_s):
                    self._rebuild_held(rank)
            except DeadlineExceededError as error:
                logger.warning("%s shard %d is not rebuilt yet: %s", self._name, rank, error)
            with self._rebuild_lock:
                # Looked up under the lock, so that a grant of this moment is not lost.
                if not self._table.wants_rebuild(rank):
                    self._rebuilding.discard(rank)
                    return

    def _rebuild_held(self, rank: int) -> None:
        shard = self._shards[rank]
        if not self._table.begin_rebuild(rank):
            return
        try:
            shard.build(timeout_s=self._limits.build_s)
            built = self._table.move(rank, ShardState.ASLEEP, only_from=(ShardState.REBUILDING,))
            if built is not None:
                deadline = Deadline(f"{self._name}: rebuild", self._limits.resize_s)
                bring_in(self._context, shard, deadline)
        except ShardTakenError:
            return
        except Exception as error:  # noqa: BLE001  whatever a start raises, try again or give up
            # FAILED already: a shrink ended the rebuild and has killed the process.
            failed = self._table.get(rank).state is ShardState.FAILED
            if not failed and not self._lacks_cache(rank, error):
                self._end_quietly(rank, error)

    def _timed(self, started: float, outcome: RankOutcome) -> RankOutcome:
        return replace(outcome, seconds=time.monotonic() - started)

    def _outcome(self, rank: int, started: float, cause: str = "") -> RankOutcome:
        state = self._table.get(rank).state.value
        return RankOutcome(rank, state, seconds=time.monotonic() - started, cause=cause)
