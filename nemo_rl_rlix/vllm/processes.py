"""Ending processes so that it is certain that they are gone."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

logger = logging.getLogger(__name__)

POLL_S = 0.02
_ENDED = ("Z", "X")


def start_time(pid: int) -> int | None:
    """Start of a living process in clock ticks since boot; ``None`` when it has ended.

    Together with the pid it names a process for good: a reused pid has another start.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The name, in parentheses, may hold anything; the state is the first field after it.
    fields = stat.rpartition(")")[2].split()
    ended = fields[0] in _ENDED and not _other_threads(pid)
    return None if ended else int(fields[19])


def _other_threads(pid: int) -> bool:
    """Whether threads of a process are left whose main thread has ended.

    A killed process counts as a zombie as soon as its main thread is through. Its device
    memory goes with its last thread, which has been seen to take half a second longer.
    """
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            state = (task / "stat").read_text().rpartition(")")[2].split()[0]
        except OSError:  # it has ended meanwhile
            continue
        if state not in _ENDED:
            return True
    return False


def with_descendants(roots: Iterable[int]) -> dict[int, int]:
    """``pid -> start`` of the living among some processes and all of their descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                stat = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(stat.rpartition(")")[2].split()[1])
    wanted = set(roots)
    while True:
        more = {pid for pid, parent in parents.items() if parent in wanted} - wanted
        if not more:
            break
        wanted |= more
    started = {pid: start_time(pid) for pid in wanted}
    return {pid: start for pid, start in started.items() if start is not None}


def end_trees(roots: dict[int, int], timeout_s: float) -> set[int]:
    """Kill processes and all of their descendants, see :func:`end_processes`."""
    alive = [pid for pid, start in roots.items() if start_time(pid) == start]
    return end_processes(roots | with_descendants(alive), timeout_s)


def end_processes(processes: dict[int, int], timeout_s: float) -> set[int]:
    """Kill processes and wait until they are gone.

    Args:
        processes: ``pid -> start``, as :func:`with_descendants` gives it.
        timeout_s: Deadline in seconds.

    Returns:
        Pids that are still there.
    """
    deadline = time.monotonic() + timeout_s
    for pid, start in processes.items():
        if start_time(pid) == start:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
    while True:
        left = {pid for pid, start in processes.items() if start_time(pid) == start}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(POLL_S)
