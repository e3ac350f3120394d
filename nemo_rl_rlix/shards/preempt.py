"""Making an engine idle, whatever it is doing, in bounded time.

The decision is a pure function over what was read; the loops around it are thin,
one for engines driven from threads and one for engines that live on an event loop.
The engine's request table counts, never a gauge: gauges refresh on a step, and an
idle engine takes none.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from nemo_rl_rlix.shards.protocol import DrainReport

EMPTY_READS_NEEDED = 2
"""A request still being preprocessed is missed by one look at the table."""

POLL_S = 0.004
"""Seconds between two looks; longer than an event loop's turn."""


@dataclass(frozen=True)
class DrainState:
    """What the drain has seen so far.

    Attributes:
        aborted: Ids that were aborted, each once.
        empty_reads: Consecutive looks at which nothing was found.
        leftover: Requests found at the last look.
    """

    aborted: frozenset[str] = frozenset()
    empty_reads: int = 0
    leftover: int = 0

    @property
    def done(self) -> bool:
        """Whether the engine counts as idle."""
        return self.empty_reads >= EMPTY_READS_NEEDED


def observe(state: DrainState, table: Sequence[str], callers: int) -> DrainState:
    """Account for one look at the engine.

    Args:
        state: What was seen before.
        table: Internal ids of every request the engine knows, waiting or running.
        callers: Callers behind the gate. They count too: one that has passed the
            gate and has not reached the table yet is in neither place otherwise.

    Returns:
        The new state; every id in ``table`` is to be aborted (again).
    """
    leftover = max(len(table), callers)
    return DrainState(
        aborted=state.aborted | frozenset(table),
        empty_reads=state.empty_reads + 1 if leftover == 0 else 0,
        leftover=leftover,
    )


def _before_pause(table: Sequence[str]) -> DrainState:
    """The pause itself aborts what the engine knows; counted before it is gone."""
    return DrainState(aborted=frozenset(table))


def _report(state: DrainState, started: float) -> DrainReport:
    return DrainReport(
        aborted=len(state.aborted),
        empty_reads=state.empty_reads,
        leftover=state.leftover,
        seconds=time.monotonic() - started,
    )


def drain_engine(
    *,
    pause: Callable[[], None],
    table: Callable[[], Sequence[str]],
    abort: Callable[[Sequence[str]], None],
    callers: Callable[[], int],
    timeout_s: float,
) -> DrainReport:
    """Abort until the engine is idle. Admission is closed already.

    Args:
        pause: Stops the engine from scheduling and aborts what it can; on return
            no step is under way.
        table: Internal ids of every request that the engine knows.
        abort: Aborts by internal id.
        callers: Callers behind the admission gate.
        timeout_s: Deadline; it does not depend on any request's length.

    Returns:
        The report; ``idle`` is False when the deadline passed.
    """
    started = time.monotonic()
    state = _before_pause(table())
    pause()
    while True:
        ids = table()
        state = observe(state, ids, callers())
        if state.done or time.monotonic() - started > timeout_s:
            return _report(state, started)
        if ids:
            abort(ids)
        time.sleep(POLL_S)


async def drain_engine_async(
    *,
    pause: Callable[[], Awaitable[None]],
    table: Callable[[], Sequence[str]],
    abort: Callable[[Sequence[str]], Awaitable[None]],
    callers: Callable[[], int],
    timeout_s: float,
) -> DrainReport:
    """As :func:`drain_engine`, on the engine's own event loop."""
    started = time.monotonic()
    state = _before_pause(table())
    try:
        async with asyncio.timeout(timeout_s):
            await pause()
            while True:
                ids = table()
                state = observe(state, ids, callers())
                if state.done:
                    break
                if ids:
                    await abort(ids)
                await asyncio.sleep(POLL_S)
    except TimeoutError:
        return _report(observe(DrainState(state.aborted), table(), callers()), started)
    return _report(state, started)
