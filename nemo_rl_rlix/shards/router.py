"""A replica of the routing state, in every process that sends requests.

Rollout threads run event loops of their own, so nothing here is bound to a loop:
a thread follows the owner by long poll, and waiters of any loop are woken from it.
A replica is a hint that saves a hop; the shard's admission gate decides.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from nemo_rl_rlix.errors import (
    DeadlineExceededError,
    NoLiveShardError,
    PipelineClosedError,
)
from nemo_rl_rlix.settings import RoutingSettings
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Ticket:
    """A waiting request's place in the queue."""

    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[None]
    woken: bool = False


class SnapshotSource(Protocol):
    """Where the routing state comes from; picklable, safe to call from any thread."""

    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        """The state as soon as it is newer than ``epoch``, or after ``timeout_s``.

        Raises:
            RLixError: The owner is gone.
        """
        ...

    def suspect(self, dp_rank: int) -> None:
        """Tell the owner that a shard's process seems gone; never blocks."""
        ...


REFUSAL_S = 1.0
"""Longest time in seconds that a refusal outweighs the routing state."""


@dataclass(frozen=True)
class Refusal:
    """Why a rank is not asked again at once, although it seems to serve.

    Attributes:
        until_epoch: Routing states from here on know of the refusal's reason.
        until_s: Monotonic time after which the rank is asked again anyway: an
            owner that finds the shard well changes no state.
    """

    until_epoch: int
    until_s: float

    def is_over(self, epoch: int, now_s: float) -> bool:
        """Whether the rank may be asked again."""
        return epoch >= self.until_epoch or now_s >= self.until_s


def choose_rank(
    active: frozenset[int],
    in_flight: Mapping[int, int],
    refusals: Mapping[int, Refusal],
    epoch: int,
    now_s: float,
    cap: int | None = None,
) -> int | None:
    """Pick the shard for one request.

    Args:
        active: Ranks that serve.
        in_flight: Requests that this replica has sent to each rank and not got back.
        refusals: Rank -> its last refusal.
        epoch: Epoch of ``active``.
        now_s: Monotonic time in seconds.
        cap: Most requests of this replica at one rank, ``None`` for any number.

    Returns:
        The least loaded rank, the lowest of equals; ``None`` when there is none.
    """
    usable = [
        rank
        for rank in active
        if (rank not in refusals or refusals[rank].is_over(epoch, now_s))
        and (cap is None or in_flight.get(rank, 0) < cap)
    ]
    return min(usable, key=lambda rank: (in_flight.get(rank, 0), rank), default=None)


class ShardRouter:
    """Chooses shards for requests and waits while none serves.

    Thread-safe, usable from any number of event loops, picklable (a copy starts
    from the last state it saw and follows on its own).

    Args:
        source: Where the routing state comes from.
        settings: Poll and liveness limits.
        name: Pipeline, for log lines.
    """

    def __init__(self, source: SnapshotSource, settings: RoutingSettings, *, name: str) -> None:
        self._source = source
        self._settings = settings
        self._name = name
        self._reset(RoutingSnapshot(epoch=0))

    def _reset(self, snapshot: RoutingSnapshot) -> None:
        self._lock = threading.Lock()
        self._snapshot = snapshot
        self._in_flight: dict[int, int] = {}
        self._refusals: dict[int, Refusal] = {}
        self._waiters: dict[_Ticket, None] = {}
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._last_contact = time.monotonic()
        self._lost = ""

    def __getstate__(self) -> dict[str, Any]:
        return {
            "source": self._source,
            "settings": self._settings,
            "name": self._name,
            "snapshot": self._snapshot,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._source = state["source"]
        self._settings = state["settings"]
        self._name = state["name"]
        self._reset(state["snapshot"])

    @property
    def snapshot(self) -> RoutingSnapshot:
        """The newest state that this replica has seen."""
        with self._lock:
            return self._snapshot

    @property
    def waiting(self) -> int:
        """Requests that wait here for a shard; they are demand."""
        with self._lock:
            return len(self._waiters)

    def in_flight(self) -> dict[int, int]:
        """Requests sent to each rank by this replica and not answered yet."""
        with self._lock:
            return {rank: count for rank, count in self._in_flight.items() if count}

    async def acquire(self) -> tuple[int, int]:
        """Reserve a place on a shard, waiting as long as the pipeline lives.

        Where places are limited, those who wait are served before those who come.

        Waiting behind another pipeline is legitimate, so no clock ends it; what
        ends it is a lost owner, a closed pipeline, or a state that cannot improve.

        Returns:
            ``(dp_rank, epoch)`` of the choice. Give it back with :meth:`release`.

        Raises:
            NoLiveShardError: No shard can serve, and why.
            PipelineClosedError: The pipeline has ended.
        """
        self._follow()
        loop = asyncio.get_running_loop()
        ticket = _Ticket(loop, loop.create_future())
        try:
            while True:
                with self._lock:
                    self._raise_if_hopeless()
                    queues = ticket not in self._waiters and self._is_taken_up()
                    rank = None if queues else self._choose()
                    if rank is not None:
                        self._in_flight[rank] = self._in_flight.get(rank, 0) + 1
                        return rank, self._snapshot.epoch
                    if ticket.future.done():
                        ticket.future, ticket.woken = loop.create_future(), False
                    # Keeps its place in the queue over all its waits.
                    self._waiters.setdefault(ticket)
                    # Bounds how late a lost owner, or the end of a refusal, is noticed.
                    wait_s = REFUSAL_S if self._snapshot.active else self._settings.long_poll_s
                await asyncio.wait((ticket.future,), timeout=wait_s)
        finally:
            with self._lock:
                self._waiters.pop(ticket, None)
                if ticket.woken:
                    # It was woken for a place that it may not have taken.
                    self._wake_for_places()

    def release(self, dp_rank: int) -> None:
        """Give a place back."""
        with self._lock:
            self._in_flight[dp_rank] -= 1
            self._wake_for_places()

    def avoid(self, dp_rank: int, *, chosen_at: int, closed_at: int) -> None:
        """Note that a shard refused a request.

        Args:
            dp_rank: The shard.
            chosen_at: Epoch of the routing state that led there.
            closed_at: Epoch at which its gate closed, -1 if it did not say, which
                is how a shard answers whose process is gone: the owner is told.
        """
        with self._lock:
            believable = closed_at if closed_at > chosen_at else chosen_at + 1
            self._refusals[dp_rank] = Refusal(believable, time.monotonic() + REFUSAL_S)
        if closed_at < 0:
            self._source.suspect(dp_rank)

    def apply(self, snapshot: RoutingSnapshot) -> None:
        """Take a newer state, from the poll or pushed; older ones are ignored."""
        with self._lock:
            self._last_contact = time.monotonic()
            if snapshot.epoch <= self._snapshot.epoch:
                return
            self._snapshot = snapshot
            if snapshot.closed or snapshot.failure:
                self._wake(len(self._waiters))
            else:
                self._wake_for_places()

    def close(self) -> None:
        """Stop following; requests that wait end with an error. Idempotent."""
        self._stop.set()
        with self._lock:
            self._lost = self._lost or "this router was closed"
            self._wake(len(self._waiters))

    def _choose(self) -> int | None:
        return choose_rank(
            self._snapshot.active,
            self._in_flight,
            self._refusals,
            self._snapshot.epoch,
            time.monotonic(),
            self._settings.max_in_flight_per_shard,
        )

    def _wake_for_places(self) -> None:
        """Wake as many waiters as there are places, the longest waiting first."""
        if self._waiters and self._snapshot.active:
            places = self._free_places()
            self._wake(len(self._waiters) if places is None else places)

    def _free_places(self) -> int | None:
        """Requests that the serving shards may still be sent; ``None`` for any number."""
        cap = self._settings.max_in_flight_per_shard
        if cap is None:
            return None
        active = self._snapshot.active
        return sum(max(0, cap - self._in_flight.get(rank, 0)) for rank in active)

    def _is_taken_up(self) -> bool:
        """Whether the places that are free now belong to requests that wait already."""
        places = self._free_places()
        if places is None:
            return False
        # A loop that has been closed takes no place any more.
        waiting = (ticket for ticket in self._waiters if not ticket.loop.is_closed())
        return sum(1 for _ in islice(waiting, places)) >= places

    def _wake(self, places: int) -> None:
        for ticket in self._waiters:
            if places <= 0:
                return
            if not ticket.woken:
                # A loop that has been closed waits for nothing any more.
                with contextlib.suppress(RuntimeError):
                    ticket.loop.call_soon_threadsafe(_finish, ticket.future)
                    ticket.woken = True
            places -= ticket.woken

    def _raise_if_hopeless(self) -> None:
        if self._snapshot.closed:
            raise PipelineClosedError(f"{self._name}: the pipeline has ended")
        if self._snapshot.failure:
            raise NoLiveShardError(self._snapshot.failure)
        if self._lost:
            raise NoLiveShardError(self._lost)
        silent = time.monotonic() - self._last_contact
        if silent > self._settings.liveness_s:
            raise NoLiveShardError(
                f"the coordinator of {self._name} has been silent for {silent:.0f} s"
                f" (rlix.routing.liveness_s={self._settings.liveness_s:g})"
            )

    def _follow(self) -> None:
        with self._lock:
            if self._thread is not None or self._stop.is_set():
                return
            self._last_contact = time.monotonic()
            self._thread = threading.Thread(
                target=self._poll_forever, name=f"routing-{self._name}", daemon=True
            )
            self._thread.start()

    def _poll_forever(self) -> None:
        # Two polls within the liveness limit: a quiet owner is not a dead one.
        poll_s = min(self._settings.long_poll_s, self._settings.liveness_s / 2)
        while not self._stop.is_set():
            try:
                self.apply(self._source.poll(self.snapshot.epoch, poll_s))
            except DeadlineExceededError as error:
                if self._silent_s() > self._settings.liveness_s:
                    return self._lose(error)
                self._stop.wait(self._settings.redispatch_backoff_s)
            except Exception as error:  # noqa: BLE001  waiters must end, whatever ends the polls
                return self._lose(error)
            if self.snapshot.closed:
                return

    def _silent_s(self) -> float:
        with self._lock:
            return time.monotonic() - self._last_contact

    def _lose(self, error: Exception) -> None:
        with self._lock:
            self._lost = self._lost or f"the coordinator of {self._name} is gone: {error}"
            self._wake(len(self._waiters))


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
