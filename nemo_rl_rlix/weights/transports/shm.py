"""Receiving weights from shared host memory of the node.

Runs in each process of a shard. The memory is mapped (and registered with CUDA)
once for each slot and kept; a receive copies and loads, nothing else.
"""

from __future__ import annotations

import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import NamedTuple

import torch

from nemo_rl_rlix.errors import DeadlineExceededError
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.layout import extents, payload_nbytes
from nemo_rl_rlix.weights.slot import Allocate, host_staging, read_tensors, tensor_at, typed
from nemo_rl_rlix.weights.staging import StagingPlan, plan_staging
from nemo_rl_rlix.weights.transports.staged import (
    Named,
    SideStream,
    device_staging,
    staged_batches,
)
from nemo_rl_rlix.weights.types import BucketLayout, CacheHandle

LoadWeights = Callable[[Iterable[Named]], Iterable[str]]
"""The engine's loader: named tensors -> names of the engine tensors it wrote."""


class Received(NamedTuple):
    """Outcome of one receive.

    Attributes:
        loaded: Names that the loader returned.
        nbytes: Bytes of tensors that were handed to the loader.
        seconds: Time it took, copies and loading included.
    """

    loaded: frozenset[str]
    nbytes: int
    seconds: float


class ShmReceiver:
    """Maps slots of a weight cache and loads from them.

    Args:
        node_id: Node of this process.
        max_mappings: Mappings that are kept, least recently used first to go.
    """

    def __init__(self, node_id: str, *, max_mappings: int = 2) -> None:
        self._node_id = node_id
        self._max_mappings = max_mappings
        self._mappings: OrderedDict[tuple[str, str], SharedHostMemory] = OrderedDict()
        self._staging_plan: tuple[BucketLayout, StagingPlan] | None = None

    def prepare(self, handle: CacheHandle) -> SharedHostMemory:
        """Map a slot and register it, so that the first receive need not.

        Raises:
            StaleHandleError: The memory is gone.
            SharedMemoryError: It is on another node or cannot be opened.
        """
        key = (handle.memory.path, handle.memory.nonce)
        memory = self._mappings.get(key)
        if memory is None:
            memory = SharedHostMemory.attach(handle.memory, node_id=self._node_id)
            memory.register_cuda()
            self._mappings[key] = memory
        self._mappings.move_to_end(key)
        while len(self._mappings) > self._max_mappings:
            self._mappings.popitem(last=False)[1].close()
        return memory

    def tensors(self, handle: CacheHandle) -> Iterator[Named]:
        """Yield every stored tensor as a host tensor, see :func:`~..slot.read_tensors`."""
        return read_tensors(self.prepare(handle), handle.layout, handle.weights_version)

    def receive(
        self,
        handle: CacheHandle,
        load_weights: LoadWeights,
        device: torch.device | str = "cpu",
        *,
        timeout_s: float,
        allocate: Allocate | None = None,
    ) -> Received:
        """Copy a version to a device and load it.

        ``load_weights`` is called once for each bucket with the tensors that are
        complete by then. It must copy what it keeps: the memory behind its
        arguments is reused after it returns. On the CPU these are views of the
        cache; on a GPU they lie in staging of at most two buckets and the largest
        split tensor, filled by a side stream while the bucket before is loaded.

        Args:
            handle: The version; its lease is held by the caller.
            load_weights: The engine's loader.
            device: Where the loader wants the tensors.
            timeout_s: Deadline in seconds, looked at between buckets.
            allocate: Makes staging; unset: torch on ``device``.

        Raises:
            TornReadError: The slot is or was rebuilt; what was loaded is worthless.
            StaleHandleError: The memory is gone.
            DeadlineExceededError: Buckets were left when the time was over.
        """
        started = time.monotonic()
        target = torch.device(device)
        memory = self.prepare(handle)
        before = memory.header.require_valid(handle.weights_version)
        plan = self._plan(handle.layout)
        if target.type == "cpu":
            batches = _views(memory.tensor, handle.layout, plan, allocate or host_staging)
        else:
            batches = staged_batches(
                memory.tensor, plan, allocate or device_staging(target), SideStream(target)
            )
        loaded: set[str] = set()
        with contextlib.closing(batches):  # waits for copies in flight, after an error too
            for done, batch in enumerate(batches):
                if time.monotonic() - started > timeout_s:
                    raise DeadlineExceededError(
                        f"receive of weights version {handle.weights_version}",
                        timeout_s,
                        f"{done} of {len(plan.steps)} buckets loaded",
                    )
                loaded.update(load_weights(batch))
        memory.header.require_unchanged(before)
        return Received(
            frozenset(loaded), payload_nbytes(handle.layout), time.monotonic() - started
        )

    def close(self) -> None:
        """Unmap everything. Idempotent."""
        while self._mappings:
            self._mappings.popitem()[1].close()

    def _plan(self, layout: BucketLayout) -> StagingPlan:
        if self._staging_plan is None or self._staging_plan[0] != layout:
            self._staging_plan = (layout, plan_staging(layout))
        return self._staging_plan[1]


def _views(
    slot: torch.Tensor, layout: BucketLayout, plan: StagingPlan, allocate: Allocate
) -> Generator[list[Named], None, None]:
    """Yield the tensors of each bucket without copying those that lie in one piece."""
    runs = extents(layout)
    for step in plan.steps:
        yield [
            (entry.spec.name, tensor_at(slot, entry.spec, runs[entry.spec.name], allocate))
            for entry in step.ready
        ]
    if plan.empty:
        yield [(spec.name, typed(slot[:0], spec)) for spec in plan.empty]
