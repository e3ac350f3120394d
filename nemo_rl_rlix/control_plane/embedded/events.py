"""What happened when: the embedded control plane's own record, for traces and status."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum


class EventKind(StrEnum):
    """Everything that changes the control plane's state."""

    REGISTER = "register"
    REQUEST = "request"
    WITHDRAW = "withdraw"
    GRANT = "grant"
    RELEASE = "release"
    SHRINK_START = "shrink_start"
    SHRINK_END = "shrink_end"
    EXPAND_START = "expand_start"
    EXPAND_END = "expand_end"
    EVICT = "evict"
    EVICTED = "evicted"
    UNREGISTER = "unregister"


@dataclass(frozen=True)
class ControlEvent:
    """One change.

    Attributes:
        number: Counts up from 1 over the life of the control plane.
        wall_time_s: Unix seconds.
        kind: What happened.
        pipeline_id: Whom it concerns.
        cluster: Cluster of a request, grant or release; ``actor_infer`` for resizes.
        gpus: Logical GPU ids concerned.
        dp_ranks: dp ranks concerned by a resize.
        detail: Priority, cause or step, for people.
        seconds: Duration of what ended (a wait, a resize), 0 for what begins.
    """

    number: int
    wall_time_s: float
    kind: EventKind
    pipeline_id: str
    cluster: str = ""
    gpus: tuple[int, ...] = ()
    dp_ranks: tuple[int, ...] = ()
    detail: str = ""
    seconds: float = 0.0


class EventLog:
    """The last events, bounded.

    Args:
        capacity: Events kept; older ones are dropped.
        clock: Unix seconds.
    """

    def __init__(self, capacity: int = 20_000, clock: Callable[[], float] = time.time) -> None:
        self._events: deque[ControlEvent] = deque(maxlen=capacity)
        self._clock = clock
        self._last = 0

    def add(
        self,
        kind: EventKind,
        pipeline_id: str,
        *,
        cluster: str = "",
        gpus: tuple[int, ...] = (),
        dp_ranks: tuple[int, ...] = (),
        detail: str = "",
        seconds: float = 0.0,
    ) -> ControlEvent:
        """Record that something happened now."""
        self._last += 1
        event = ControlEvent(
            self._last, self._clock(), kind, pipeline_id, cluster, gpus, dp_ranks, detail, seconds
        )
        self._events.append(event)
        return event

    def since(self, number: int) -> list[ControlEvent]:
        """Events after ``number``, oldest first; 0 for all that are still kept."""
        newer: list[ControlEvent] = []
        for event in reversed(self._events):
            if event.number <= number:
                break
            newer.append(event)
        return newer[::-1]
