"""Filling a slot from a stream of tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from nemo_rl_rlix.weights.dtypes import dtype_name
from nemo_rl_rlix.weights.errors import CacheBuildError
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.layout import Extent, extents
from nemo_rl_rlix.weights.slot import typed
from nemo_rl_rlix.weights.types import BucketLayout, TensorSpec


def fill_slot(
    memory: SharedHostMemory,
    layout: BucketLayout,
    named_tensors: Iterable[tuple[str, torch.Tensor]],
) -> None:
    """Copy tensors into a slot and check that they are exactly the planned ones.

    The iterable is consumed to its end even when a tensor does not fit, since
    other ranks take part in the export and would wait for this one for ever.

    Raises:
        CacheBuildError: Tensors are missing, unexpected, of another shape or
            dtype, or could not be copied.
    """
    wanted = {spec.name: spec for spec in layout.tensors}
    tied = {name for name, _ in layout.ties}
    runs = extents(layout)
    unexpected: list[str] = []
    reason = ""
    failure: Exception | None = None
    copies = _Copies(memory.registered, in_flight_bytes=2 * max(layout.bucket_nbytes, default=0))
    try:
        for name, tensor in named_tensors:
            if name in tied:
                continue
            spec = wanted.pop(name, None)
            if spec is None:
                unexpected.append(name)
            elif (tuple(tensor.shape), dtype_name(tensor.dtype)) != (spec.shape, spec.dtype):
                reason = reason or (
                    f"{name!r} is {dtype_name(tensor.dtype)}{tuple(tensor.shape)}, "
                    f"planned was {spec.dtype}{spec.shape}"
                )
            elif not (reason or unexpected or failure):
                try:
                    _store(copies, memory.tensor, spec, runs[name], tensor.detach())
                except Exception as error:  # noqa: BLE001 - raised below, after the export
                    failure = error
    finally:
        copies.finish()
    if failure is not None:
        raise CacheBuildError(f"copying failed: {failure}") from failure
    if reason or wanted or unexpected:
        reason = reason or f"{len(wanted)} missing, {len(unexpected)} unexpected tensors"
        raise CacheBuildError(reason, list(wanted), unexpected)


def _store(
    copies: _Copies,
    slot: torch.Tensor,
    spec: TensorSpec,
    runs: Sequence[Extent],
    source: torch.Tensor,
) -> None:
    if spec.nbytes == 0:
        return
    if len(runs) == 1:
        target = typed(slot[runs[0].offset : runs[0].offset + runs[0].nbytes], spec)
        copies.start(target, source)
        return
    raw = source.contiguous().view(-1).view(torch.uint8)
    done = 0
    for run in runs:
        copies.start(slot[run.offset : run.offset + run.nbytes], raw[done : done + run.nbytes])
        done += run.nbytes


class _Copies:
    """Copies into a slot: at once from the host, on a side stream from a GPU.

    The side stream lets the export of the next tensor overlap the copy of this
    one. Sources stay allocated until their copy has ended, hence the limit on
    bytes in flight.

    Args:
        registered: Whether the slot is page-locked; else copies are synchronous.
        in_flight_bytes: Bytes of sources that may wait for their copy.
    """

    def __init__(self, registered: bool, in_flight_bytes: int) -> None:
        self._registered = registered
        self._limit = in_flight_bytes
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._pending: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._pending_bytes = 0

    def start(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Begin one copy; it has ended when :meth:`finish` returns."""
        if not (source.is_cuda and self._registered):
            target.copy_(source)
            return
        stream = self._streams.get(source.device)
        if stream is None:
            stream = self._streams[source.device] = torch.cuda.Stream(source.device)
        stream.wait_stream(torch.cuda.current_stream(source.device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(stream)
        self._pending.append((event, source))
        self._pending_bytes += source.nbytes
        while self._pending_bytes > self._limit:
            self._retire()

    def finish(self) -> None:
        """Wait for every copy, so that nothing writes to the slot any more."""
        while self._pending:
            self._retire()

    def _retire(self) -> None:
        event, source = self._pending.popleft()
        event.synchronize()
        self._pending_bytes -= source.nbytes
