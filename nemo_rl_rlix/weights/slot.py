"""Tensors over the bytes of a slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from nemo_rl_rlix.weights.dtypes import dtype_of
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.layout import Extent, extents
from nemo_rl_rlix.weights.types import BucketLayout, TensorSpec

Allocate = Callable[[int], torch.Tensor]
"""Makes staging: a size in bytes -> ``torch.uint8`` tensor of that size."""


def host_staging(nbytes: int) -> torch.Tensor:
    """Staging in ordinary host memory."""
    return torch.empty(nbytes, dtype=torch.uint8)


def typed(raw: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """See ``torch.uint8[spec.nbytes]`` as the tensor it holds, without copy."""
    if spec.nbytes == 0:
        return torch.empty(spec.shape, dtype=dtype_of(spec.dtype), device=raw.device)
    return raw.view(dtype_of(spec.dtype)).view(spec.shape)


def tensor_at(
    slot: torch.Tensor, spec: TensorSpec, runs: Sequence[Extent], allocate: Allocate = host_staging
) -> torch.Tensor:
    """One tensor of a slot: a view where it lies in one piece, else a gathered copy.

    Args:
        slot: ``torch.uint8[total_nbytes]``.
        spec: The tensor.
        runs: Its extents in the slot.
        allocate: Makes room for a tensor that lies in several pieces.
    """
    if len(runs) == 1:
        return typed(slot[runs[0].offset : runs[0].offset + runs[0].nbytes], spec)
    gathered = allocate(spec.nbytes)
    done = 0
    for run in runs:
        gathered[done : done + run.nbytes].copy_(slot[run.offset : run.offset + run.nbytes])
        done += run.nbytes
    return typed(gathered, spec)


def read_tensors(
    memory: SharedHostMemory, layout: BucketLayout, weights_version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor of a slot in export order.

    The tensors are views of memory that a later build overwrites: copy what is to
    outlive the lease, and do not write to them.

    Raises:
        TornReadError: The slot does not hold that version, at the start or any
            more at the end.
    """
    before = memory.header.require_valid(weights_version)
    runs = extents(layout)
    for spec in layout.tensors:
        yield spec.name, tensor_at(memory.tensor, spec, runs[spec.name])
    memory.header.require_unchanged(before)
