"""Who may build and who may read which slot of the weight cache."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from nemo_rl_rlix.errors import CacheNotReadyError, DeadlineExceededError
from nemo_rl_rlix.weights.errors import VersionOrderError
from nemo_rl_rlix.weights.types import CacheHandle


@dataclass(frozen=True)
class SlotUse:
    """How a slot is used at the moment.

    Attributes:
        readers: Leases that are held on it.
        published: Whether new readers are sent to it.
    """

    readers: int
    published: bool


def choose_slot(slots: Sequence[SlotUse]) -> int | None:
    """Slot that a build may overwrite now, ``None`` while it has to wait.

    A slot that is not published comes first; the published one is given up only
    where there is no other, since a failed build would leave nothing to read.
    """
    spare = [index for index, slot in enumerate(slots) if not slot.published]
    candidates = spare or range(len(slots))
    return next((index for index in candidates if slots[index].readers == 0), None)


def version_follows(version: int, newest: int, *, published: bool) -> bool:
    """Whether a version may be published after ``newest``.

    The same version may come again only where its first snapshot is lost.
    """
    return version > newest or (version == newest and not published)


class CacheBook:
    """Lease book of the slots, owned by the pipeline's coordinator. Thread-safe.

    One build at a time. While a build waits for readers, new readers wait too
    (or are refused, if they have no time), so that they cannot starve it.

    Args:
        slots: Number of slots, 1 or 2.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(f"slots must be >= 1, got {slots}")
        self._changed = threading.Condition()
        self._readers = [0] * slots
        self._handles: list[CacheHandle | None] = [None] * slots
        self._published: int | None = None
        self._building: int | None = None
        self._waiting_builds = 0
        self._newest = -1

    @property
    def cache_ready_step(self) -> int:
        """Version that can be read now, -1 if none."""
        with self._changed:
            handle = self._published_handle()
            return -1 if handle is None else handle.weights_version

    @property
    def newest_version(self) -> int:
        """Newest version ever committed, -1 before the first."""
        with self._changed:
            return self._newest

    def begin_build(self, timeout_s: float) -> int:
        """Wait for a slot that may be overwritten and reserve it.

        With one slot nothing can be read from here until the commit.

        Raises:
            DeadlineExceededError: Readers or another build took too long; what
                was published still is.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._waiting_builds += 1
            try:
                while True:
                    slot = None if self._building is not None else choose_slot(self._uses())
                    if slot is not None:
                        break
                    remaining = deadline - time.monotonic()
                    if remaining <= 0:
                        raise DeadlineExceededError(
                            "wait for a slot of the weight cache",
                            timeout_s,
                            f"readers {self._readers}, building {self._building}",
                        )
                    self._changed.wait(remaining)
                self._building = slot
                self._handles[slot] = None
                if self._published == slot:
                    self._published = None
                return slot
            finally:
                self._waiting_builds -= 1
                self._changed.notify_all()

    def commit(self, handle: CacheHandle) -> None:
        """Publish a finished build: from here on, leases get this handle.

        Raises:
            VersionOrderError: The slot is not being built or the version does not
                follow; nothing is published and a build of that slot has ended.
        """
        with self._changed:
            if handle.slot != self._building:
                raise VersionOrderError(
                    f"slot {handle.slot} is not being built (building: {self._building})"
                )
            self._building = None
            self._changed.notify_all()
            if not version_follows(
                handle.weights_version, self._newest, published=self._published is not None
            ):
                raise VersionOrderError(
                    f"version {handle.weights_version} cannot follow version {self._newest}"
                )
            self._handles[handle.slot] = handle
            self._published = handle.slot
            self._newest = handle.weights_version

    def abort(self, slot: int) -> None:
        """End a build that failed. Idempotent.

        With two slots the earlier version stays readable, with one nothing is.
        """
        with self._changed:
            if self._building == slot:
                self._building = None
                self._changed.notify_all()

    def invalidate(self) -> None:
        """Forget everything that can be read: the process that holds it is gone."""
        with self._changed:
            self._published = None
            self._handles = [None] * len(self._handles)
            self._changed.notify_all()

    @contextmanager
    def lease(self, *, timeout_s: float = 0.0) -> Iterator[CacheHandle]:
        """Hold the newest complete version; its slot is not overwritten meanwhile.

        Args:
            timeout_s: How long to wait, in seconds, for a version to be published.

        Raises:
            CacheNotReadyError: There is none.
        """
        handle = self._acquire(timeout_s)
        try:
            yield handle
        finally:
            with self._changed:
                self._readers[handle.slot] -= 1
                self._changed.notify_all()

    def _acquire(self, timeout_s: float) -> CacheHandle:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                handle = None if self._build_is_starved() else self._published_handle()
                if handle is not None:
                    self._readers[handle.slot] += 1
                    return handle
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise CacheNotReadyError(
                        f"no complete weight cache after {timeout_s:g} s "
                        f"({'a build runs' if self._building is not None else 'no build runs'}, "
                        f"newest version {self._newest})"
                    )
                self._changed.wait(remaining)

    def _published_handle(self) -> CacheHandle | None:
        return None if self._published is None else self._handles[self._published]

    def _build_is_starved(self) -> bool:
        """Whether a further reader would hold up a build that waits for readers."""
        only_slot = len(self._readers) == 1
        return only_slot and self._waiting_builds > 0

    def _uses(self) -> list[SlotUse]:
        return [
            SlotUse(readers, index == self._published)
            for index, readers in enumerate(self._readers)
        ]
