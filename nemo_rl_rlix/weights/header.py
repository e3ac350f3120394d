"""The header page of a slot: whose memory it is, and whether it can be read.

The lease book decides who may read; the header is a second line that also holds
for a reader that bypasses the book, keeps a handle too long, or outlives the
writer. A reader compares it before and after it reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from nemo_rl_rlix.weights.errors import TornReadError

HEADER_BYTES = 4096
MAGIC = int.from_bytes(b"RLIXWC01", "little")

_MAGIC, _NBYTES, _NONCE_LOW, _NONCE_HIGH, _STATE, _VERSION, _SEQUENCE = range(7)
_WORD = (1 << 64) - 1


class SlotState(IntEnum):
    """Whether the bytes of a slot are a complete set of weights."""

    INVALID = 0
    VALID = 1


@dataclass(frozen=True)
class Stamp:
    """The header at one moment.

    Attributes:
        state: Whether the slot is complete.
        weights_version: Version of the last complete build.
        sequence: Number of builds begun in this slot.
    """

    state: SlotState
    weights_version: int
    sequence: int


class SlotHeader:
    """Header words over mapped memory.

    Args:
        page: Writable buffer of :data:`HEADER_BYTES` bytes. Words are written as
            native 64-bit units, so that no reader sees half of one.
    """

    def __init__(self, page: memoryview) -> None:
        self._words = page.cast("Q")

    def initialise(self, nonce: str, nbytes: int) -> None:
        """Write the identity of fresh memory; the slot starts out invalid."""
        value = int(nonce, 16)
        self._words[_NBYTES] = nbytes
        self._words[_NONCE_LOW] = value & _WORD
        self._words[_NONCE_HIGH] = value >> 64
        self._words[_STATE] = SlotState.INVALID
        self._words[_MAGIC] = MAGIC

    def mismatch(self, nonce: str, nbytes: int) -> str:
        """Why this is not the memory of that nonce and size; empty if it is."""
        if self._words[_MAGIC] != MAGIC:
            return "it does not hold a weight cache"
        if (self._words[_NONCE_HIGH] << 64 | self._words[_NONCE_LOW]) != int(nonce, 16):
            return "it holds another weight cache"
        if self._words[_NBYTES] != nbytes:
            return f"it holds {self._words[_NBYTES]} bytes, not {nbytes}"
        return ""

    def begin(self) -> None:
        """Mark the slot invalid, before the first byte of a build."""
        self._words[_STATE] = SlotState.INVALID
        self._words[_SEQUENCE] += 1

    def complete(self, weights_version: int) -> None:
        """Mark the slot valid, after the last byte of a build."""
        self._words[_VERSION] = weights_version
        self._words[_STATE] = SlotState.VALID

    def stamp(self) -> Stamp:
        """Read the header."""
        return Stamp(SlotState(self._words[_STATE]), self._words[_VERSION], self._words[_SEQUENCE])

    def require_valid(self, weights_version: int) -> Stamp:
        """Read the header and check that the slot holds that version.

        Raises:
            TornReadError: The slot is being built, was never completed, or holds
                another version.
        """
        stamp = self.stamp()
        if stamp.state is not SlotState.VALID:
            raise TornReadError(
                f"weights version {weights_version}: the slot is being built or its build failed"
            )
        if stamp.weights_version != weights_version:
            raise TornReadError(
                f"weights version {weights_version}: the slot holds {stamp.weights_version} by now"
            )
        return stamp

    def require_unchanged(self, before: Stamp) -> None:
        """Check that no build began since ``before`` was read.

        Raises:
            TornReadError: One did; what was read in between is worthless.
        """
        if self.stamp() != before:
            raise TornReadError(
                f"weights version {before.weights_version}: the slot was rebuilt during the read; "
                "a reader must hold its lease until it has read everything"
            )

    def release(self) -> None:
        """Let go of the memory."""
        self._words.release()
