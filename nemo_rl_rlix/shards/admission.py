"""The gate in front of an engine: the last word on whether a request may start.

Routers elsewhere hold copies of the routing state that may be old. The gate
lives in the engine's own process and is never old.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_rl_rlix.errors import ShardPreemptedError


class AdmissionGate:
    """Counts callers in and turns them away while it is closed. Starts closed.

    Args:
        dp_rank: Rank of the shard behind the gate.
    """

    def __init__(self, dp_rank: int) -> None:
        self._lock = threading.Lock()
        self._dp_rank = dp_rank
        self._open = False
        self._epoch = -1
        self._weights_version = -1
        self._in_flight = 0
        self._refused = 0

    @property
    def is_open(self) -> bool:
        """Whether requests are admitted now."""
        return self._open

    @property
    def epoch(self) -> int:
        """Routing epoch of the last change."""
        return self._epoch

    @property
    def weights_version(self) -> int:
        """Version with which admitted requests are stamped."""
        return self._weights_version

    @property
    def in_flight(self) -> int:
        """Callers inside, those that have not reached the engine's table included."""
        return self._in_flight

    @property
    def refused(self) -> int:
        """Callers turned away since the start."""
        return self._refused

    def open(self, epoch: int, weights_version: int) -> None:
        """Admit requests from now on. An older epoch than the last is ignored."""
        with self._lock:
            if epoch < self._epoch:
                return
            self._epoch, self._weights_version, self._open = epoch, weights_version, True

    def close(self, epoch: int) -> None:
        """Refuse requests from now on. Always obeyed: closing is the safe side."""
        with self._lock:
            self._epoch, self._open = max(epoch, self._epoch), False

    @contextmanager
    def enter(self) -> Iterator[int]:
        """Be counted while a request is served; yields the version to stamp it with.

        Raises:
            ShardPreemptedError: The gate is closed.
        """
        with self._lock:
            if not self._open:
                self._refused += 1
                raise ShardPreemptedError(self._dp_rank, epoch=self._epoch)
            self._in_flight += 1
            version = self._weights_version
        try:
            yield version
        finally:
            with self._lock:
                self._in_flight -= 1
