"""Replacing a global of a NeMo RL module by one of this package, and putting it back.

Each swap says how the replacement is made from the original. A replacement carries the
original, so that a second registration, or someone else's wrapper, is noticed instead
of wrapped again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.nemo_rl.seams import Entry, Seam
from nemo_rl_rlix.nemo_rl.versions import NemoRl

logger = logging.getLogger(__name__)

ORIGINAL = "__nemo_rl_rlix_original__"
"""Attribute by which a replacement names what it replaced."""

ALL = frozenset(NemoRl)


class SwapError(RLixError):
    """A global cannot be replaced, or not be put back."""


@dataclass(frozen=True)
class Swap:
    """How one seam is filled.

    Attributes:
        seam: Id of the seam.
        make: Makes the replacement from the original. For a mapping: the entries to
            add, from the mapping.
        versions: Versions in which it is done.
    """

    seam: str
    make: Callable[[Any], Any]
    versions: frozenset[NemoRl] = ALL


@dataclass(frozen=True)
class Applied:
    """A swap that has been done.

    Attributes:
        seam: The seam.
        original: What was there; for a mapping what its added keys held before.
        replacement: What is there now; for a mapping the entries.
    """

    seam: Seam
    original: Any
    replacement: Any


def apply(swap: Swap, seam: Seam, module: ModuleType) -> Applied:
    """Do a swap.

    Args:
        swap: How.
        seam: Where.
        module: The imported module of the seam.

    Raises:
        SwapError: The replacement does not fit the seam, or there is one already.
    """
    original = getattr(module, seam.symbol)
    if seam.entry is Entry.MAPPING:
        return _add_entries(swap, seam, original)
    if ORIGINAL in vars(original):
        raise SwapError(f"{seam.module}.{seam.symbol} is replaced already: {original!r}")
    replacement = swap.make(original)
    if seam.entry is Entry.GLOBAL_CLASS and not (
        isinstance(replacement, type) and issubclass(replacement, original)
    ):
        raise SwapError(f"{replacement!r} is no subclass of {seam.module}.{seam.symbol}")
    setattr(replacement, ORIGINAL, original)
    setattr(module, seam.symbol, replacement)
    logger.info("%s.%s is now %r: %s", seam.module, seam.symbol, replacement, seam.why)
    return Applied(seam, original, replacement)


def undo(applied: Applied, module: ModuleType) -> None:
    """Put the original back.

    Raises:
        SwapError: Someone replaced the replacement; it is left as it is.
    """
    seam = applied.seam
    if seam.entry is Entry.MAPPING:
        _remove_entries(applied, getattr(module, seam.symbol))
        return
    current = getattr(module, seam.symbol)
    if current is not applied.replacement:
        raise SwapError(f"{seam.module}.{seam.symbol} was replaced by {current!r} meanwhile")
    setattr(module, seam.symbol, applied.original)
    delattr(applied.replacement, ORIGINAL)


_ABSENT = object()


def _add_entries(swap: Swap, seam: Seam, mapping: MutableMapping[str, Any]) -> Applied:
    entries: dict[str, Any] = swap.make(mapping)
    before = {key: mapping.get(key, _ABSENT) for key in entries}
    taken = [key for key, value in before.items() if value is not _ABSENT]
    if taken:
        raise SwapError(f"{seam.module}.{seam.symbol} has entries for {', '.join(taken)} already")
    mapping.update(entries)
    return Applied(seam, before, entries)


def _remove_entries(applied: Applied, mapping: MutableMapping[str, Any]) -> None:
    for key in applied.replacement:
        mapping.pop(key, None)
