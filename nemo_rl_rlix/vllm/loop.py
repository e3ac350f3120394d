"""Calls into an engine are made on its own event loop, whoever makes them.

An ``AsyncLLM`` hands out asyncio queues and futures of the loop on which its output
handler runs, and its sockets must not be used by two threads at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from nemo_rl_rlix.errors import DeadlineExceededError

T = TypeVar("T")

GRACE_S = 1.0
"""Seconds that another loop waits beyond the deadline, for the error made on this one."""


class EngineLoop:
    """The event loop of an engine. Bound once, to the loop that is running then."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    async def run(
        self, make: Callable[[], Coroutine[Any, Any, T]], what: str, timeout_s: float
    ) -> T:
        """Run a coroutine on the engine's loop.

        Args:
            make: Makes the coroutine; called on the engine's loop.
            what: The act, for the error.
            timeout_s: Deadline in seconds.

        Raises:
            DeadlineExceededError: It did not end in time; it has been cancelled.
        """
        if asyncio.get_running_loop() is self._loop:
            return await _within(make, what, timeout_s)
        future = asyncio.run_coroutine_threadsafe(_within(make, what, timeout_s), self._loop)
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), timeout_s + GRACE_S)
        except TimeoutError as error:  # the loop itself does not turn
            raise DeadlineExceededError(what, timeout_s, "its event loop is blocked") from error

    def run_blocking(
        self, make: Callable[[], Coroutine[Any, Any, T]], what: str, timeout_s: float
    ) -> T:
        """As :meth:`run`, from a thread without a loop."""
        future = asyncio.run_coroutine_threadsafe(_within(make, what, timeout_s), self._loop)
        try:
            return future.result(timeout_s + GRACE_S)
        except TimeoutError as error:
            future.cancel()
            raise DeadlineExceededError(what, timeout_s, "its event loop is blocked") from error


async def _within(make: Callable[[], Awaitable[T]], what: str, timeout_s: float) -> T:
    try:
        async with asyncio.timeout(timeout_s) as scope:
            return await make()
    except TimeoutError as error:
        if not scope.expired():
            raise
        raise DeadlineExceededError(what, timeout_s) from error
