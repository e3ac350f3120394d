"""The book of one logical GPU, shared by processes: a JSON file under a file lock."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nemo_rl_rlix.errors import DeadlineExceededError

LOCK_TIMEOUT_S = 10.0


def process_start_time(pid: int) -> int | None:
    """Clock ticks since boot at which a process started; ``None`` when it is dead.

    A zombie counts as dead: its memory is gone.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def used_bytes(ledger: dict[str, Any]) -> dict[str, int]:
    """Resident -> bytes it holds; those that hold none are left out."""
    used: dict[str, int] = {}
    for entry in ledger["residents"].values():
        if nbytes := sum(entry["bytes"].values()):
            used[entry["name"]] = used.get(entry["name"], 0) + nbytes
    return used


class Ledger:
    """Opens the book for one reader or writer at a time.

    Args:
        stem: Path of the files without ``.lock`` and ``.json``.
    """

    def __init__(self, stem: str) -> None:
        self._lock_path, self._path = f"{stem}.lock", f"{stem}.json"

    @contextmanager
    def open(self) -> Iterator[dict[str, Any]]:
        """Lock, read, drop the dead, and write back what changed unless the body raised.

        Yields:
            ``owner``; ``residents``: key -> name, pid, start time and bytes by label;
            ``violations``; ``busy``: owner -> seconds.

        Raises:
            DeadlineExceededError: Another process keeps the lock.
        """
        # A descriptor of its own per use: flock excludes descriptors, not threads.
        lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _flock(lock, self._lock_path)
            before, ledger = self._read()
            for key, entry in list(ledger["residents"].items()):
                if process_start_time(entry["pid"]) != entry["start"]:
                    del ledger["residents"][key]
            yield ledger
            after = json.dumps(ledger)
            if after != before:
                with open(f"{self._path}.new", "w") as new:
                    new.write(after)
                os.replace(f"{self._path}.new", self._path)
        finally:
            os.close(lock)

    def _read(self) -> tuple[str, dict[str, Any]]:
        try:
            with open(self._path) as file:
                text = file.read()
        except FileNotFoundError:
            return "", {"owner": "", "residents": {}, "violations": [], "busy": {}}
        return text, json.loads(text)


def _flock(descriptor: int, path: str) -> None:
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DeadlineExceededError(f"lock of {path}", LOCK_TIMEOUT_S) from None
            time.sleep(0.0005)
