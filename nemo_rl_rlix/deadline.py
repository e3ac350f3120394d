"""A deadline that is shared by the steps of one act."""

from __future__ import annotations

import time

from nemo_rl_rlix.errors import DeadlineExceededError


class Deadline:
    """Counts down from the moment it is made.

    Args:
        what: The act, for the error.
        timeout_s: Seconds the whole act may take.
    """

    def __init__(self, what: str, timeout_s: float) -> None:
        self._what = what
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    @property
    def remaining_s(self) -> float:
        """Seconds left, 0 when none."""
        return max(0.0, self._end - time.monotonic())

    def left(self, cap_s: float) -> float:
        """Seconds that the next step may take: ``cap_s``, or what is left if less.

        Raises:
            DeadlineExceededError: Nothing is left.
        """
        remaining = self.remaining_s
        if remaining <= 0:
            raise DeadlineExceededError(self._what, self._timeout_s)
        return min(cap_s, remaining)
