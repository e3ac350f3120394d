"""Trace events: written by every process of a run to a file of its own, read back as one list.

Times are Unix seconds (``time.time``), which all processes of one host share;
traces of several hosts are only as well aligned as the hosts' clocks.

Tracks are paths:

* ``gpu/<n>/<pipeline>``: what a pipeline does on logical GPU ``n``. The spans'
  names are those of :data:`nemo_rl_rlix.observe.busy.ACTIVITY_OF_SPAN`; spans
  named ``generate`` carry the number of sampled ``tokens``.
* ``pipeline/<pipeline>/<what>``, e.g. ``pipeline/p0/trainer``.
* anything else, e.g. ``control``, belongs to the control plane.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

log = logging.getLogger(__name__)

FLUSH_INTERVAL_S = 0.5
SUFFIX = ".trace.jsonl"


class EventKind(StrEnum):
    """What an event says."""

    SPAN = "span"
    INSTANT = "instant"
    COUNTER = "counter"


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One event of a trace.

    Attributes:
        kind: Span, instant or counter.
        track: Path of the track, see the module's docstring.
        name: What happened, or what is counted.
        start_s: Unix seconds.
        end_s: Unix seconds; ``start_s`` unless this is a span.
        args: Further figures; a counter's value is ``args["value"]``.
        process: Name of the process that wrote it.
    """

    kind: EventKind
    track: str
    name: str
    start_s: float
    end_s: float
    args: dict[str, Any] = field(default_factory=dict)
    process: str = ""

    @property
    def duration_s(self) -> float:
        """Length in seconds."""
        return self.end_s - self.start_s


class Tracer(Protocol):
    """Where a process reports what it does. Every call is cheap, thread-safe and never raises."""

    def span(self, track: str, name: str, **args: Any) -> AbstractContextManager[None]:
        """Record the time that the body takes, also when it raises."""
        ...

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record a span that has ended."""
        ...

    def accumulate(
        self, track: str, name: str, start_s: float, end_s: float, **sums: float
    ) -> None:
        """Record one of many short spans in a row, e.g. an engine step.

        Neighbours of one name that are less than 50 ms apart become one span of at
        most about 0.5 s, whose arguments hold the totals of ``sums`` and, as
        ``busy_s``, of the time inside the short spans.
        """
        ...

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Record that something happened now."""
        ...

    def counter(self, track: str, name: str, value: float) -> None:
        """Record the value that something has from now on."""
        ...

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system."""
        ...

    def close(self) -> None:
        """Flush and end. Idempotent; later events are dropped."""
        ...


class NullTracer:
    """Tracing is off: every call returns at once."""

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Run the body."""
        yield

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Do nothing."""

    def accumulate(
        self, track: str, name: str, start_s: float, end_s: float, **sums: float
    ) -> None:
        """Do nothing."""

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Do nothing."""

    def counter(self, track: str, name: str, value: float) -> None:
        """Do nothing."""

    def flush(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


@dataclass(slots=True)
class _Run:
    """Short spans that are being joined."""

    name: str
    start_s: float
    end_s: float
    busy_s: float
    sums: dict[str, float]


class TraceWriter:
    """Appends events to ``<directory>/<process>-<pid>.trace.jsonl`` (mode 0600).

    Events are buffered and written with the first event that comes
    ``FLUSH_INTERVAL_S`` after the last write, at :meth:`flush`, :meth:`close` and
    at exit, whole lines at a time; a process that is killed loses no more than
    what it buffered since. A file that cannot be written ends the tracing of this
    process with a warning, never the run.

    Args:
        directory: Directory of the run; created if missing.
        process: Readable name of the process, e.g. ``p0-shard1``.
    """

    MAX_GAP_S = 0.05
    MAX_RUN_S = 0.5

    def __init__(self, directory: str | os.PathLike[str], process: str) -> None:
        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        self.process = process
        self.path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', process)}-{os.getpid()}{SUFFIX}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._fd: int | None = os.open(self.path, flags, 0o600)
        self._lock = threading.RLock()
        self._lines: list[str] = []
        self._runs: dict[str, _Run] = {}
        self._flushed_at = time.monotonic()
        atexit.register(self.close)

    @contextmanager
    def span(self, track: str, name: str, **args: Any) -> Iterator[None]:
        """Record the time that the body takes, also when it raises."""
        start_s = time.time()
        try:
            yield
        finally:
            self.complete(track, name, start_s, time.time(), **args)

    def complete(self, track: str, name: str, start_s: float, end_s: float, **args: Any) -> None:
        """Record a span that has ended."""
        self._emit(EventKind.SPAN, track, name, start_s, max(start_s, end_s), args)

    def accumulate(
        self, track: str, name: str, start_s: float, end_s: float, **sums: float
    ) -> None:
        """Record one of many short spans in a row; see :meth:`Tracer.accumulate`."""
        end_s = max(start_s, end_s)
        with self._lock:
            run = self._runs.get(track)
            if run is not None and (
                run.name != name
                or start_s - run.end_s > self.MAX_GAP_S
                or end_s - run.start_s > self.MAX_RUN_S
            ):
                self._end_run(track)
                run = None
            if run is None:
                self._runs[track] = _Run(name, start_s, end_s, end_s - start_s, dict(sums))
                return
            run.busy_s += end_s - max(start_s, run.end_s) if end_s > run.end_s else 0.0
            run.end_s = max(run.end_s, end_s)
            for key, value in sums.items():
                run.sums[key] = run.sums.get(key, 0) + value

    def instant(self, track: str, name: str, **args: Any) -> None:
        """Record that something happened now."""
        now = time.time()
        self._emit(EventKind.INSTANT, track, name, now, now, args)

    def counter(self, track: str, name: str, value: float) -> None:
        """Record the value that something has from now on."""
        now = time.time()
        self._emit(EventKind.COUNTER, track, name, now, now, {"value": value})

    def flush(self) -> None:
        """Hand everything recorded so far to the operating system."""
        with self._lock:
            for track in list(self._runs):
                self._end_run(track)
            self._write()

    def close(self) -> None:
        """Flush and end. Idempotent; later events are dropped."""
        with self._lock:
            self.flush()
            if self._fd is not None:
                os.close(self._fd)
                self._fd = None
            self._lines.clear()
        atexit.unregister(self.close)

    def _end_run(self, track: str) -> None:
        run = self._runs.pop(track)
        args = {"busy_s": round(run.busy_s, 6), **run.sums}
        self._emit(EventKind.SPAN, track, run.name, run.start_s, run.end_s, args)

    def _emit(
        self,
        kind: EventKind,
        track: str,
        name: str,
        start_s: float,
        end_s: float,
        args: dict[str, Any],
    ) -> None:
        row: dict[str, Any] = {"kind": kind, "track": track, "name": name, "start": start_s}
        if kind is EventKind.SPAN:
            row["end"] = end_s
        if args:
            row["args"] = args
        row["process"] = self.process
        line = json.dumps(row, default=str)
        with self._lock:
            self._lines.append(line)
            if time.monotonic() - self._flushed_at >= FLUSH_INTERVAL_S:
                self._write()

    def _write(self) -> None:
        if self._fd is not None and self._lines:
            data = "".join(f"{line}\n" for line in self._lines).encode()
            try:
                while data:
                    data = data[os.write(self._fd, data) :]
            except OSError as error:
                log.warning("tracing of %s ends: %s: %s", self.process, self.path, error)
                os.close(self._fd)
                self._fd = None
        self._lines.clear()
        self._flushed_at = time.monotonic()


def open_tracer(directory: str | os.PathLike[str] | None, process: str) -> Tracer:
    """Return a writer into ``directory``, or a tracer that does nothing when it is ``None``."""
    return NullTracer() if directory is None else TraceWriter(directory, process)


def read_events(directory: str | os.PathLike[str]) -> list[TraceEvent]:
    """Read what all processes of a run have written, ordered by start.

    The last line of a file may be cut off, since its process may have been
    killed; it is left out. Any other line that cannot be read is left out with a
    warning.
    """
    events: list[TraceEvent] = []
    for path in sorted(Path(directory).glob(f"*{SUFFIX}")):
        lines = path.read_bytes().split(b"\n")
        for number, line in enumerate(lines, start=1):
            if not line:
                continue
            try:
                events.append(_parse(line))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                # The text after the last newline is what a killed process left behind.
                if number < len(lines):
                    log.warning("%s:%d is not a trace event: %s", path, number, error)
    events.sort(key=lambda event: (event.start_s, -event.end_s))
    return events


def _parse(line: bytes) -> TraceEvent:
    row = json.loads(line)
    start_s = float(row["start"])
    return TraceEvent(
        kind=EventKind(row["kind"]),
        track=str(row["track"]),
        name=str(row["name"]),
        start_s=start_s,
        end_s=float(row.get("end", start_s)),
        args=dict(row.get("args", {})),
        process=str(row.get("process", "")),
    )
