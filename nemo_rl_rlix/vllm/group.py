"""A temporary group of processes for one weight transfer, and the transfer over it.

Made outside ``torch.distributed``'s world, so that neither side's own groups take part:
the trainer's are down at the time, and an engine's must not be touched. It is used only
while the sender's GPU is held, and never with two ranks of one GPU.
"""

from __future__ import annotations

import logging
from collections.abc import Generator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_rlix.weights.slot import Allocate
from nemo_rl_rlix.weights.staging import StagingPlan
from nemo_rl_rlix.weights.transports.staged import Named, staged_batches

logger = logging.getLogger(__name__)

SENDER = 0
"""Rank of the sender."""


@dataclass(frozen=True)
class GroupSpec:
    """Where and under which name the ranks meet. A name and a port are used once.

    Attributes:
        host: Address of the sender's node.
        port: Free port there, reserved for this transfer.
        name: Unique over the cluster and over time.
        size: Number of ranks, the sender included.
        backend: ``nccl`` or ``gloo``.
        devices: Identity of the GPU of each rank.
    """

    host: str
    port: int
    name: str
    size: int
    backend: str
    devices: tuple[str, ...]

    def __post_init__(self) -> None:
        if len(self.devices) != self.size:
            raise ValueError(f"{self.size} ranks and {len(self.devices)} devices")
        if self.backend == "nccl" and len(set(self.devices)) != self.size:
            raise ValueError(
                f"two ranks of one GPU ({', '.join(self.devices)}) cannot form an NCCL group; "
                "such a shard reads host memory"
            )


class TemporaryGroup:
    """A group that exists for one ``with`` block.

    Args:
        spec: Where the ranks meet.
        rank: Rank of this process.
        timeout_s: Deadline of the rendezvous and of each broadcast, in seconds.
    """

    def __init__(self, spec: GroupSpec, rank: int, *, timeout_s: float) -> None:
        self._spec = spec
        self._rank = rank
        self._timeout = timedelta(seconds=timeout_s)
        self._group: Any = None
        self._store: Any = None

    def __enter__(self) -> TemporaryGroup:
        spec = self._spec
        self._store = dist.TCPStore(
            spec.host, spec.port, spec.size, self._rank == SENDER, timeout=self._timeout
        )
        store = dist.PrefixStore(spec.name, self._store)
        if spec.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(store, self._rank, spec.size, options)
        else:
            self._group = dist.ProcessGroupGloo(store, self._rank, spec.size, self._timeout)
        return self

    def __exit__(self, kind: object, value: object, trace: object) -> None:
        group, self._group = self._group, None
        if group is not None and self._spec.backend == "nccl":
            # After an error a peer may be gone: a shutdown would wait for it.
            group.abort() if kind is not None else group.shutdown()
        self._store = None

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Start a broadcast from the sender; its result is the work to wait for."""
        options = dist.BroadcastOptions()
        options.rootRank = SENDER
        options.rootTensor = 0
        return self._group.broadcast([tensor], options)


class ReceivingLane:
    """Fills staging by broadcasts instead of copies from host memory.

    The loader's work on a buffer is done before that buffer is filled again, since a
    broadcast is ordered behind the stream that was current when it was started.
    """

    def __init__(self, group: TemporaryGroup, device: torch.device) -> None:
        self._group = group
        self._device = device

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: object) -> object:
        """Start the broadcasts into the targets; the sources exist at the sender only."""
        return [self._group.broadcast(target) for target, _ in pairs]

    def await_copy(self, copied: object) -> None:
        """Let loading continue when the broadcasts are done."""
        assert isinstance(copied, list)
        for work in copied:
            work.wait()

    def mark_load(self) -> object:
        """Nothing: broadcasts follow the current stream."""
        return None

    def finish(self) -> None:
        """Wait on the host until nothing uses staging any more."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def receive_batches(
    group: TemporaryGroup,
    plan: StagingPlan,
    slot_nbytes: int,
    device: torch.device,
    allocate: Allocate,
) -> Generator[list[Named], None, None]:
    """Yield the tensors of each bucket as they arrive.

    Args:
        group: The group.
        plan: Staging plan of the layout; the same at the sender.
        slot_nbytes: Size of a slot, of which only offsets are used here.
        device: Device of the group.
        allocate: Makes staging on it.
    """
    absent = torch.empty(slot_nbytes, dtype=torch.uint8, device="meta")
    return staged_batches(absent, plan, allocate, ReceivingLane(group, device))


def send_slot(
    group: TemporaryGroup, slot: torch.Tensor, plan: StagingPlan, device: torch.device
) -> int:
    """Broadcast a slot of host memory, in the order in which receivers fill staging.

    Args:
        group: The group; this is rank 0.
        slot: ``torch.uint8[total_nbytes]`` of the version to send.
        plan: Staging plan of its layout.
        device: Device of the group, granted to the sender.

    Returns:
        Bytes that were sent.
    """
    size = max((copy.nbytes for step in plan.steps for copy in step.copies), default=0)
    turns = [torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2)]
    started: list[Any] = [None, None]
    sent, turn = 0, 0
    for step in plan.steps:
        for copy in step.copies:
            if started[turn] is not None:
                started[turn].wait()
            piece = turns[turn][: copy.nbytes]
            source = slot[copy.slot_offset : copy.slot_offset + copy.nbytes]
            piece.copy_(source, non_blocking=True)
            started[turn] = group.broadcast(piece)
            sent, turn = sent + copy.nbytes, 1 - turn
    for work in started:
        if work is not None:
            work.wait()
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return sent
