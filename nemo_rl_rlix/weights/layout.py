"""Where every byte of every tensor lies. Pure: no torch, no I/O.

One layout serves every transport, so that a bucket can be sent, copied or
mapped without knowing who reads it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from nemo_rl_rlix.weights.errors import LayoutError
from nemo_rl_rlix.weights.types import BucketLayout, Piece, TensorSpec

PAGE_BYTES = 4096
"""Alignment of buckets inside a slot."""

ITEM_BYTES: Mapping[str, int] = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "uint16": 2,
    "int16": 2,
    "float16": 2,
    "bfloat16": 2,
    "uint32": 4,
    "int32": 4,
    "float32": 4,
    "uint64": 8,
    "int64": 8,
    "float64": 8,
    "complex64": 8,
    "complex128": 16,
}
"""Size in bytes of one element of each dtype that can be cached."""


@dataclass(frozen=True)
class Extent:
    """A run of bytes of one tensor inside a slot.

    Attributes:
        offset: First byte inside the slot.
        nbytes: Length in bytes.
    """

    offset: int
    nbytes: int


def align_up(value: int, alignment: int) -> int:
    """Smallest multiple of ``alignment`` that is at least ``value``."""
    return -(-value // alignment) * alignment


def plan_layout(
    specs: Iterable[TensorSpec],
    *,
    bucket_bytes: int,
    alignment: int,
    ties: Sequence[tuple[str, str]] = (),
) -> BucketLayout:
    """Pack tensors into buckets in export order.

    A tensor that fits into a bucket lies in one bucket. A larger one starts a
    bucket of its own and goes on over as many as it needs; the tensors after it
    follow in its last bucket. Buckets have the exact size of what they hold.

    Args:
        specs: Tensors in export order. A tied name among them is not stored.
        bucket_bytes: Most bytes in a bucket.
        alignment: Alignment in bytes of the start of a tensor in its bucket; the
            element size of the dtype is respected as well.
        ties: ``(tied name, name that is stored)`` pairs; chains are followed.

    Raises:
        LayoutError: Duplicate or unknown names, sizes that contradict the shape.
    """
    if bucket_bytes < 1 or alignment < 1:
        raise LayoutError(f"bucket_bytes={bucket_bytes} and alignment={alignment} must be >= 1")
    given = tuple(specs)
    _check_specs(given)
    resolved = _resolve_ties(given, ties)
    stored = tuple(spec for spec in given if spec.name not in resolved)

    pieces: list[Piece] = []
    sizes: list[int] = []
    used = 0
    for spec in stored:
        start = align_up(used, math.lcm(alignment, ITEM_BYTES[spec.dtype]))
        if spec.nbytes == 0:
            continue
        if start + spec.nbytes > bucket_bytes:
            if used:
                sizes.append(used)
            start = 0
        done = 0
        while spec.nbytes - done > bucket_bytes:
            pieces.append(Piece(spec.name, done, len(sizes), 0, bucket_bytes))
            sizes.append(bucket_bytes)
            done += bucket_bytes
        pieces.append(Piece(spec.name, done, len(sizes), start, spec.nbytes - done))
        used = start + spec.nbytes - done
    if used:
        sizes.append(used)

    offsets: list[int] = []
    end = 0
    for size in sizes:
        offsets.append(align_up(end, PAGE_BYTES))
        end = offsets[-1] + size
    return BucketLayout(
        tensors=stored,
        pieces=tuple(pieces),
        bucket_nbytes=tuple(sizes),
        bucket_offsets=tuple(offsets),
        total_nbytes=end,
        ties=tuple(resolved.items()),
    )


def validate_layout(layout: BucketLayout) -> None:
    """Check that a layout covers every byte exactly once and overlaps nowhere.

    Raises:
        LayoutError: Names the first contradiction.
    """
    _check_specs(layout.tensors)
    names = {spec.name for spec in layout.tensors}
    for tied, target in layout.ties:
        if tied in names or target not in names:
            raise LayoutError(f"tie {tied!r} -> {target!r}: the former is stored or the latter not")

    if len(layout.bucket_nbytes) != len(layout.bucket_offsets):
        raise LayoutError("each bucket needs one size and one offset")
    end = 0
    for index, (offset, size) in enumerate(
        zip(layout.bucket_offsets, layout.bucket_nbytes, strict=True)
    ):
        if offset < end or offset % PAGE_BYTES or size < 1:
            raise LayoutError(
                f"bucket {index} at {offset} with {size} bytes overlaps or is unaligned"
            )
        end = offset + size
    if layout.total_nbytes != end:
        raise LayoutError(f"total_nbytes={layout.total_nbytes}, buckets end at {end}")

    covered = dict.fromkeys(names, 0)
    position = (-1, 0)
    for piece in layout.pieces:
        if piece.name not in names:
            raise LayoutError(f"piece of unknown tensor {piece.name!r}")
        if not 0 <= piece.bucket < len(layout.bucket_nbytes):
            raise LayoutError(f"{piece.name!r} lies in bucket {piece.bucket}, which does not exist")
        floor = position[1] if piece.bucket == position[0] else 0
        if piece.bucket < position[0] or piece.bucket_offset < floor or piece.nbytes < 1:
            raise LayoutError(
                f"{piece.name!r} in bucket {piece.bucket} overlaps or is out of order"
            )
        position = (piece.bucket, piece.bucket_offset + piece.nbytes)
        if position[1] > layout.bucket_nbytes[piece.bucket]:
            raise LayoutError(f"{piece.name!r} reaches over the end of bucket {piece.bucket}")
        if piece.tensor_offset != covered[piece.name]:
            raise LayoutError(f"{piece.name!r}: gap or overlap at byte {piece.tensor_offset}")
        covered[piece.name] += piece.nbytes
    for spec in layout.tensors:
        if covered[spec.name] != spec.nbytes:
            raise LayoutError(f"{spec.name!r}: {covered[spec.name]} of {spec.nbytes} bytes covered")


def extents(layout: BucketLayout) -> dict[str, tuple[Extent, ...]]:
    """Runs of slot bytes of each tensor, in tensor order, neighbours merged.

    A split tensor is one run when the bucket size is a multiple of the page,
    which every bucket size of the settings is. A zero-size tensor has none.
    """
    found: dict[str, list[Extent]] = {spec.name: [] for spec in layout.tensors}
    for piece in layout.pieces:
        runs = found[piece.name]
        offset = layout.bucket_offsets[piece.bucket] + piece.bucket_offset
        if runs and runs[-1].offset + runs[-1].nbytes == offset:
            runs[-1] = Extent(runs[-1].offset, runs[-1].nbytes + piece.nbytes)
        else:
            runs.append(Extent(offset, piece.nbytes))
    return {name: tuple(runs) for name, runs in found.items()}


def payload_nbytes(layout: BucketLayout) -> int:
    """Bytes of tensors in the layout, without gaps."""
    return sum(spec.nbytes for spec in layout.tensors)


def layout_digest(layout: BucketLayout) -> str:
    """Hexadecimal SHA-256 over everything that the layout says."""
    digest = hashlib.sha256()
    for spec in layout.tensors:
        digest.update(repr((spec.name, spec.shape, spec.dtype, spec.nbytes)).encode())
    for piece in layout.pieces:
        digest.update(repr((piece.name, piece.bucket, piece.bucket_offset, piece.nbytes)).encode())
    digest.update(repr((layout.bucket_offsets, layout.total_nbytes, layout.ties)).encode())
    return digest.hexdigest()


def _check_specs(specs: Sequence[TensorSpec]) -> None:
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise LayoutError(f"tensor {spec.name!r} is given twice; elect one owner of it")
        seen.add(spec.name)
        item = ITEM_BYTES.get(spec.dtype)
        if item is None:
            raise LayoutError(f"tensor {spec.name!r}: dtype {spec.dtype!r} cannot be cached")
        if spec.nbytes != math.prod(spec.shape) * item:
            raise LayoutError(
                f"tensor {spec.name!r}: {spec.nbytes} bytes do not fit {spec.dtype}{spec.shape}"
            )


def _resolve_ties(specs: Sequence[TensorSpec], ties: Sequence[tuple[str, str]]) -> dict[str, str]:
    direct = dict(ties)
    if len(direct) != len(ties):
        raise LayoutError("a tied name is given twice")
    by_name = {spec.name: spec for spec in specs}
    resolved: dict[str, str] = {}
    for tied in direct:
        target, steps = tied, 0
        while target in direct:
            target, steps = direct[target], steps + 1
            if steps > len(direct):
                raise LayoutError(f"tie {tied!r} leads back to itself")
        if target not in by_name:
            raise LayoutError(f"tie {tied!r} -> {target!r}: the latter is not among the tensors")
        own = by_name.get(tied)
        stored = by_name[target]
        if own is not None and (own.shape, own.dtype) != (stored.shape, stored.dtype):
            raise LayoutError(f"tie {tied!r} -> {target!r}: shape or dtype differ")
        resolved[tied] = target
    return resolved
