"""The thread that owns an engine, and how others talk to it.

Whatever is asked of the engine hops to its thread and runs between two steps, so
that no weight is written, and no memory unmapped, under a step. A queue and not a
lock: a lock would be taken again by the next step before anybody else got it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from nemo_rl_rlix.reference.device import LogicalGpu
from nemo_rl_rlix.reference.engine import (
    ContinuousBatchingEngine,
    EngineDeadError,
    EngineOutput,
    EngineState,
    TokenDelta,
)
from nemo_rl_rlix.shards.requests import GenerationRequest

logger = logging.getLogger(__name__)

T = TypeVar("T")
Event = EngineOutput | TokenDelta | Exception
IDLE_WAIT_S = 0.2


@dataclass(eq=False, slots=True)
class _Ticket:
    deliver: Callable[[Event], None]
    internal_id: str | None = None


class EngineHost:
    """Runs an engine in a thread of its own.

    Args:
        engine: The engine; from now on only this thread touches it, except for
            reads of its request table.
        gpu: Logical GPU whose busy seconds are written out while it idles.
        name: For the thread and the log.
        on_step: Told after each step when it began and ended (Unix seconds) and how
            many tokens it sampled.
        on_idle: Called when a wait for work has run out.
    """

    def __init__(
        self,
        engine: ContinuousBatchingEngine,
        *,
        gpu: LogicalGpu | None,
        name: str,
        on_step: Callable[[float, float, int], None] | None = None,
        on_idle: Callable[[], None] | None = None,
    ) -> None:
        self.engine = engine
        self._gpu = gpu
        self._name = name
        self._on_step, self._on_idle = on_step, on_idle
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[str, _Ticket] = {}
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> bool:
        """Whether the engine has crashed."""
        return self.engine.state is EngineState.DEAD

    def stop(self, timeout_s: float) -> None:
        """End the thread after the step under way."""
        self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)

    def call(self, act: Callable[[ContinuousBatchingEngine], T]) -> Future[T]:
        """Have ``act`` run on the engine's thread, between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(act(self.engine))
            except Exception as error:  # noqa: BLE001  whatever it raises belongs to the caller
                future.set_exception(error)

        self._inbox.put(run)
        return future

    async def run(self, request: GenerationRequest) -> EngineOutput:
        """Serve one request to its end, an abort included.

        Cancelling the caller aborts the request.

        Raises:
            ValueError: The request can never run.
            EngineDeadError: The engine has crashed.
        """
        async for event in self.stream(request, tokens=False):
            if isinstance(event, EngineOutput):
                return event
        raise AssertionError("a stream ends with an output or raises")

    async def stream(
        self, request: GenerationRequest, *, tokens: bool = True
    ) -> AsyncIterator[EngineOutput | TokenDelta]:
        """As :meth:`run`, but yields each token before the output."""
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        ticket = _Ticket(lambda event: _deliver(loop, events, event))
        self._inbox.put(lambda: self._add(ticket, request, tokens))
        ended = False
        try:
            while not ended:
                event = await events.get()
                ended = not isinstance(event, TokenDelta)
                if isinstance(event, Exception):
                    raise event
                yield event
        finally:
            if not ended:
                self._inbox.put(lambda: self._abandon(ticket))

    # -- on the engine's thread -------------------------------------------------

    def _add(self, ticket: _Ticket, request: GenerationRequest, tokens: bool) -> None:
        try:
            ticket.internal_id = self.engine.add(request, stream=tokens)
        except (ValueError, EngineDeadError) as error:
            ticket.deliver(error)
        else:
            self._tickets[ticket.internal_id] = ticket

    def _abandon(self, ticket: _Ticket) -> None:
        if ticket.internal_id is not None:
            self.engine.abort([ticket.internal_id])

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._take_mail()
                began_s = time.time()
                if self.engine.step() and self._on_step is not None:
                    self._on_step(began_s, time.time(), self.engine.running_gauge)
            except Exception as error:
                if not isinstance(error, EngineDeadError):
                    # A real engine's core process would end here.
                    logger.exception("engine %s has crashed", self._name)
            for event in self.engine.take_outputs():
                self._route(event)
            if self.dead:
                self._fail_all()

    def _take_mail(self) -> None:
        wait = not self.engine.has_work
        while True:
            try:
                act = self._inbox.get(block=wait, timeout=IDLE_WAIT_S)
            except queue.Empty:
                break
            act()
            wait = False
        if wait and self._gpu is not None:
            self._gpu.flush()
        if wait and self._on_idle is not None:
            self._on_idle()

    def _route(self, event: EngineOutput | TokenDelta) -> None:
        if isinstance(event, TokenDelta):
            ticket = self._tickets.get(event.internal_id)
        else:
            ticket = self._tickets.pop(event.internal_id, None)
        if ticket is not None:
            ticket.deliver(event)

    def _fail_all(self) -> None:
        while self._tickets:
            _, ticket = self._tickets.popitem()
            ticket.deliver(EngineDeadError("it crashed under this request"))


def _deliver(loop: asyncio.AbstractEventLoop, events: asyncio.Queue[Any], event: Event) -> None:
    if not loop.is_closed():
        loop.call_soon_threadsafe(events.put_nowait, event)
