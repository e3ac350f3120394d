"""The CPU weight cache: whole sets of weights in memory that shards of the node map.

Lives in the process of the training rank that owns it. Which slot is built and
which one is read is decided by :class:`~nemo_rl_rlix.weights.book.CacheBook`.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from nemo_rl_rlix.errors import CacheNotReadyError
from nemo_rl_rlix.settings import MIB, WeightCacheSettings
from nemo_rl_rlix.weights.budget import (
    MemoryLevel,
    check_host_budget,
    read_memory_levels,
    tightest,
)
from nemo_rl_rlix.weights.checksum import slot_checksum
from nemo_rl_rlix.weights.errors import LayoutError, TornReadError
from nemo_rl_rlix.weights.fill import fill_slot
from nemo_rl_rlix.weights.header import HEADER_BYTES
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.layout import plan_layout, validate_layout
from nemo_rl_rlix.weights.slot import read_tensors
from nemo_rl_rlix.weights.types import BucketLayout, CacheHandle, TensorSpec

logger = logging.getLogger(__name__)


class CpuWeightCache:
    """Slots of host memory, all of one layout.

    Args:
        pipeline_id: Pipeline that the weights belong to.
        settings: The ``rlix.weight_cache`` block.
        node_id: Node of this process.
        checksum: Cover the bytes by each handle's checksum too; costs one more
            read of the slot a build.
        read_levels: Reads the limits on host memory.
    """

    def __init__(
        self,
        pipeline_id: str,
        settings: WeightCacheSettings,
        node_id: str,
        *,
        checksum: bool = False,
        read_levels: Callable[[], tuple[MemoryLevel, ...]] = read_memory_levels,
    ) -> None:
        self._pipeline_id = pipeline_id
        self._settings = settings
        self._node_id = node_id
        self._checksum = checksum
        self._read_levels = read_levels
        self._layout: BucketLayout | None = None
        self._slots: list[SharedHostMemory] = []
        self._lock = threading.Lock()

    @property
    def layout(self) -> BucketLayout:
        """The layout of every slot.

        Raises:
            LayoutError: :meth:`plan` has not been called.
        """
        if self._layout is None:
            raise LayoutError("plan() the weight cache before its first build")
        return self._layout

    @property
    def allocated_bytes(self) -> int:
        """Host memory that the slots hold, headers included."""
        return sum(HEADER_BYTES + slot.handle.nbytes for slot in self._slots)

    def plan(
        self, specs: Iterable[TensorSpec], ties: Sequence[tuple[str, str]] = ()
    ) -> BucketLayout:
        """Fix the layout and check that the host can hold all slots.

        Planning the same tensors again changes nothing.

        Raises:
            HostMemoryError: The host cannot hold the slots.
            LayoutError: The tensors contradict each other or an earlier plan.
        """
        layout = plan_layout(
            specs,
            bucket_bytes=self._settings.bucket_mib * MIB,
            alignment=self._settings.alignment_bytes,
            ties=ties,
        )
        validate_layout(layout)
        with self._lock:
            if self._layout is not None and self._layout != layout:
                raise LayoutError(
                    "the weight cache was planned for other tensors; the exported names, "
                    "shapes and dtypes must not change during a run"
                )
            if not self._slots:
                self._check_budget(layout)
            self._layout = layout
        return layout

    def build(
        self, step: int, slot: int, named_tensors: Iterable[tuple[str, torch.Tensor]]
    ) -> CacheHandle:
        """Copy a complete set of weights into a slot.

        The memory of all slots is taken at the first build. The iterable is
        consumed to its end even when a tensor does not fit, since other ranks
        take part in the export and would wait for this one for ever.

        Args:
            step: Training step; becomes the version.
            slot: Slot that the book has assigned; nobody reads it.
            named_tensors: Tensors by canonical name, on any device. Tied names
                may be among them and are not stored. A tensor on a GPU must not
                be written to once it was yielded: its copy may still run.

        Returns:
            The handle, not published yet.

        Raises:
            CacheBuildError: Tensors are missing, unexpected or of another shape
                or dtype. After any error the slot is invalid.
            HostMemoryError: The host cannot hold the slots.
        """
        with self._lock:
            try:
                if step < 0:
                    raise ValueError(f"step must be >= 0, got {step}")
                layout = self.layout
                if not self._slots:
                    self._allocate(layout)
                memory = self._slot_memory(slot)
                memory.header.begin()
            except Exception:
                deque(named_tensors, maxlen=0)  # the other ranks' export ends all the same
                raise
            fill_slot(memory, layout, named_tensors)
            checksum = slot_checksum(
                layout, step, memory.handle.nonce, memory.tensor if self._checksum else None
            )
            memory.header.complete(step)
        return CacheHandle(
            pipeline_id=self._pipeline_id,
            weights_version=step,
            slot=slot,
            layout=layout,
            memory=memory.handle,
            checksum=checksum,
        )

    def invalidate(self, slot: int) -> None:
        """Make a slot unreadable, e.g. because its build failed elsewhere."""
        with self._lock:
            if self._slots:
                self._slot_memory(slot).header.begin()

    def verify(self, handle: CacheHandle) -> None:
        """Check that a slot still is what a handle says.

        Raises:
            TornReadError: It holds another version, or other bytes.
        """
        memory = self._slot_memory(handle.slot)
        before = memory.header.require_valid(handle.weights_version)
        covered = memory.tensor if handle.checksum.startswith("data:") else None
        found = slot_checksum(handle.layout, handle.weights_version, memory.handle.nonce, covered)
        memory.header.require_unchanged(before)
        if found != handle.checksum:
            raise TornReadError(
                f"weights version {handle.weights_version} in slot {handle.slot}: checksum {found} "
                f"instead of {handle.checksum}; rebuild the cache"
            )

    def reader(self, handle: CacheHandle) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors of a slot in this process, see :func:`~.slot.read_tensors`."""
        return read_tensors(self._slot_memory(handle.slot), handle.layout, handle.weights_version)

    def close(self) -> None:
        """Invalidate every slot and give the memory back. Idempotent."""
        with self._lock:
            while self._slots:
                memory = self._slots.pop()
                memory.header.begin()
                memory.close()

    def _slot_memory(self, slot: int) -> SharedHostMemory:
        if not 0 <= slot < self._settings.slots:
            raise ValueError(
                f"slot {slot} does not exist; rlix.weight_cache.slots={self._settings.slots}"
            )
        if not self._slots:
            raise CacheNotReadyError("nothing has been built in this weight cache")
        return self._slots[slot]

    def _allocate(self, layout: BucketLayout) -> None:
        self._check_budget(layout)
        try:
            for _ in range(self._settings.slots):
                memory = SharedHostMemory.create(
                    layout.total_nbytes,
                    node_id=self._node_id,
                    directory=self._settings.directory,
                )
                self._slots.append(memory)
                memory.register_cuda()
        except Exception:
            while self._slots:
                self._slots.pop().close()
            raise
        logger.info(
            "pipeline %s: weight cache of %d x %.2f GiB in %d buckets",
            self._pipeline_id,
            len(self._slots),
            layout.total_nbytes / 2**30,
            len(layout.bucket_nbytes),
        )

    def _check_budget(self, layout: BucketLayout) -> None:
        fraction = self._settings.host_memory_fraction
        level = tightest(self._read_levels(), fraction)
        if level is None:
            return
        check_host_budget(
            self._settings.slots * (HEADER_BYTES + layout.total_nbytes),
            fraction=fraction,
            limit=level.limit,
            in_use=level.in_use,
            slots=self._settings.slots,
        )
