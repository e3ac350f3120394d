"""Moving a trainer's memory off its device and back, storage by storage.

A storage is copied to pinned host memory and resized to nothing; every parameter,
view, shard and optimizer entry over it stays the object that it was, and works again
once the storage has its bytes back. So no code that holds a tensor has to know.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from nemo_rl_rlix.megatron.errors import OffloadIncompleteError
from nemo_rl_rlix.megatron.walk import FoundTensor, on_device, storage_nbytes, walk_tensors
from nemo_rl_rlix.weights.budget import check_host_budget, read_memory_levels, tightest
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.layout import align_up

logger = logging.getLogger(__name__)

_ALIGNMENT = 512


@dataclass
class _Held:
    """A storage that is on the host, or whose values were dropped.

    Attributes:
        storage: The storage, resized to nothing.
        nbytes: Its size on the device.
        offset: Where its bytes are in the host memory; ``None`` if it held gradients.
    """

    storage: torch.UntypedStorage
    device: torch.device
    nbytes: int
    offset: int | None


@dataclass(frozen=True)
class OffloadReport:
    """What an offload or onload moved.

    Attributes:
        moved_bytes: Bytes copied.
        dropped_bytes: Bytes of gradients, whose values are not kept.
        seconds: Time it took, clearing of caches included.
        held_bytes: Bytes that are still allocated on the device afterwards.
    """

    moved_bytes: int
    dropped_bytes: int
    seconds: float
    held_bytes: int


class DeviceOffloader:
    """Moves everything that a set of roots holds on one kind of device.

    Args:
        device_type: ``cuda``.
        host_memory_fraction: Share of the host's memory limit that may be in use.
    """

    def __init__(self, device_type: str = "cuda", *, host_memory_fraction: float = 0.8) -> None:
        self._device_type = device_type
        self._fraction = host_memory_fraction
        self._occupies = on_device(device_type)
        self._held: list[_Held] = []
        self._host: SharedHostMemory | None = None
        self._offloaded = False

    @property
    def is_offloaded(self) -> bool:
        """Whether the memory is on the host."""
        return self._offloaded

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that are kept for the next offload."""
        return 0 if self._host is None else self._host.handle.nbytes

    def offload(self, roots: Mapping[str, object]) -> OffloadReport:
        """Free the device memory of every tensor under the roots. A no-op when offloaded.

        Gradients are dropped and come back as zeros: between two steps they are dead.

        Raises:
            HostMemoryError: The host cannot hold it; nothing was moved.
        """
        started = time.monotonic()
        if self._offloaded:
            return OffloadReport(0, 0, 0.0, self._allocated())
        held, moved = plan_storages(self._on_device(roots))
        self._take_host_memory(moved)
        for entry in held:
            if entry.offset is not None:
                self._host_view(entry).copy_(_bytes_of(entry), non_blocking=True)
        gc.collect()  # takes about as long as the copies, so it runs beside them
        self._synchronize()
        for entry in held:
            entry.storage.resize_(0)
        self._held = held
        self._offloaded = True
        self._empty_cache()
        dropped = sum(entry.nbytes for entry in held if entry.offset is None)
        return OffloadReport(moved, dropped, time.monotonic() - started, self._allocated())

    def onload(self) -> OffloadReport:
        """Bring everything back. A no-op when on the device.

        Raises:
            torch.OutOfMemoryError: The device has no room; everything is on the host still.
        """
        started = time.monotonic()
        if not self._offloaded:
            return OffloadReport(0, 0, 0.0, self._allocated())
        done: list[_Held] = []
        try:
            for entry in self._held:
                done.append(entry)
                entry.storage.resize_(entry.nbytes)
                if entry.offset is None:
                    _bytes_of(entry).zero_()
                else:
                    _bytes_of(entry).copy_(self._host_view(entry), non_blocking=True)
            self._synchronize()
        except RuntimeError:
            self._synchronize()
            for entry in done:
                entry.storage.resize_(0)
            raise
        self._offloaded = False
        moved = sum(entry.nbytes for entry in self._held if entry.offset is not None)
        dropped = sum(entry.nbytes for entry in self._held if entry.offset is None)
        self._held = []
        return OffloadReport(moved, dropped, time.monotonic() - started, self._allocated())

    def check(self, roots: Mapping[str, object], *, budget_bytes: int) -> int:
        """Check that nothing stayed on the device.

        Args:
            roots: The same roots as in the offload.
            budget_bytes: Bytes that the allocator may still hold, for workspaces of
                libraries that nothing leads to.

        Returns:
            Bytes that are still allocated.

        Raises:
            OffloadIncompleteError: Names what stayed, with its path where one is known.
        """
        left = self._on_device(roots)
        nbytes = sum({t.tensor.untyped_storage().data_ptr(): _size(t) for t in left}.values())
        if left:
            raise OffloadIncompleteError([_describe(found) for found in left], nbytes, 0)
        allocated = self._allocated()
        if allocated > budget_bytes:
            strays = [
                f"{_shape(tensor)} held by {', '.join(_holders(tensor)) or 'C++'}"
                for tensor in _strays(self._device_type)
            ]
            raise OffloadIncompleteError(strays, allocated, budget_bytes)
        return allocated

    def close(self) -> None:
        """Give the host memory back. Idempotent; not while offloaded."""
        if self._host is not None and not self._offloaded:
            self._host.close()
            self._host = None

    def _on_device(self, roots: Mapping[str, object]) -> list[FoundTensor]:
        return [found for found in walk_tensors(roots) if self._occupies(found.tensor)]

    def _take_host_memory(self, nbytes: int) -> None:
        """Have at least this much pinned memory, of exact size."""
        if self._host is not None and self.host_bytes >= nbytes:
            return
        self.close()
        level = tightest(read_memory_levels(), self._fraction)
        if level is not None:
            check_host_budget(
                nbytes, fraction=self._fraction, limit=level.limit, in_use=level.in_use
            )
        self._host = SharedHostMemory.create(nbytes, node_id="local")
        if self._device_type == "cuda":
            self._host.register_cuda()

    def _host_view(self, entry: _Held) -> torch.Tensor:
        assert self._host is not None and entry.offset is not None
        return self._host.tensor[entry.offset : entry.offset + entry.nbytes]

    def _synchronize(self) -> None:
        if self._device_type == "cuda":
            torch.cuda.synchronize()

    def _empty_cache(self) -> None:
        if self._device_type == "cuda":
            torch.cuda.ipc_collect()
            torch.cuda.empty_cache()

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device_type == "cuda" else 0


def plan_storages(found: Iterable[FoundTensor]) -> tuple[list[_Held], int]:
    """Storages to free, each once, and the host bytes that they need.

    A storage is dropped rather than copied only if every way to it has the name of a
    gradient: a buffer that holds parameters too is never lost.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    devices: dict[int, torch.device] = {}
    gradient_only: dict[int, bool] = {}
    for item in found:
        storage = item.tensor.untyped_storage()
        key = storage.data_ptr()
        storages[key] = storage
        devices[key] = item.tensor.device
        gradient_only[key] = gradient_only.get(key, True) and item.is_gradient
    held: list[_Held] = []
    end = 0
    for key, storage in storages.items():
        offset = None if gradient_only[key] else end
        held.append(_Held(storage, devices[key], storage.nbytes(), offset))
        if offset is not None:
            end = align_up(end + storage.nbytes(), _ALIGNMENT)
    return held, end


def _bytes_of(entry: _Held) -> torch.Tensor:
    empty = torch.empty(0, dtype=torch.uint8, device=entry.device)
    return empty.set_(entry.storage, 0, (entry.nbytes,))  # type: ignore[call-overload]


def _size(found: FoundTensor) -> int:
    return storage_nbytes(found.tensor)


def _shape(tensor: torch.Tensor) -> str:
    return f"{tensor.dtype}{tuple(tensor.shape)} of {storage_nbytes(tensor) / 2**20:.2f} MiB"


def _describe(found: FoundTensor) -> str:
    return f"{found.path}: {_shape(found.tensor)}"


def _strays(device_type: str) -> list[torch.Tensor]:
    """Live tensors on the device that no root leads to, largest first."""
    occupies = on_device(device_type)
    # By type: isinstance() asks some objects for their class, which makes them complain.
    tensors = (item for item in gc.get_objects() if issubclass(type(item), torch.Tensor))
    return sorted(filter(occupies, tensors), key=storage_nbytes, reverse=True)


def _holders(tensor: torch.Tensor) -> list[str]:
    """Types of what refers to a tensor."""
    kinds = {type(holder).__qualname__ for holder in gc.get_referrers(tensor)}
    return sorted(kinds - {"list_iterator", "frame"})[:4]
