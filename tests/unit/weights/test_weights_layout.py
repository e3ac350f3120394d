"""The bucket layout: every byte once, exact sizes, ties stored once."""

import math
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_rlix.weights.errors import LayoutError
from nemo_rl_rlix.weights.layout import (
    ITEM_BYTES,
    PAGE_BYTES,
    extents,
    layout_digest,
    payload_nbytes,
    plan_layout,
    validate_layout,
)
from nemo_rl_rlix.weights.types import Piece, TensorSpec


def spec(name: str, *shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(name, shape, dtype, math.prod(shape) * ITEM_BYTES[dtype])


shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
tensors = st.lists(st.tuples(shapes, st.sampled_from(sorted(ITEM_BYTES))), max_size=12).map(
    lambda rows: [spec(f"t{i}", *shape, dtype=dtype) for i, (shape, dtype) in enumerate(rows)]
)


@settings(max_examples=150, deadline=None)
@given(tensors, st.integers(1, 700), st.sampled_from([1, 2, 7, 16, 64, 256]))
def test_every_byte_lies_in_exactly_one_place(
    specs: list[TensorSpec], bucket_bytes: int, alignment: int
) -> None:
    layout = plan_layout(specs, bucket_bytes=bucket_bytes, alignment=alignment)
    validate_layout(layout)
    assert layout.tensors == tuple(specs)
    owner: dict[int, tuple[str, int]] = {}
    for piece in layout.pieces:
        start = layout.bucket_offsets[piece.bucket] + piece.bucket_offset
        for byte in range(piece.nbytes):
            assert start + byte not in owner
            owner[start + byte] = (piece.name, piece.tensor_offset + byte)
        if piece.tensor_offset == 0:
            dtype = next(s.dtype for s in specs if s.name == piece.name)
            assert piece.bucket_offset % alignment == 0
            assert start % ITEM_BYTES[dtype] == 0
    assert sorted(owner.values()) == sorted((s.name, b) for s in specs for b in range(s.nbytes))
    assert all(offset % PAGE_BYTES == 0 for offset in layout.bucket_offsets)
    assert all(size <= bucket_bytes for size in layout.bucket_nbytes)
    assert layout.total_nbytes == (max(owner) + 1 if owner else 0)


@settings(max_examples=100, deadline=None)
@given(tensors, st.integers(1, 700))
def test_only_tensors_larger_than_a_bucket_are_split(
    specs: list[TensorSpec], bucket_bytes: int
) -> None:
    layout = plan_layout(specs, bucket_bytes=bucket_bytes, alignment=1)
    for tensor in specs:
        count = sum(piece.name == tensor.name for piece in layout.pieces)
        assert count == -(-tensor.nbytes // bucket_bytes)


@pytest.mark.parametrize("bucket_bytes", [PAGE_BYTES, 3 * PAGE_BYTES])
def test_a_split_tensor_is_one_run_when_buckets_are_whole_pages(bucket_bytes: int) -> None:
    specs = [spec("a", 3), spec("big", 5000), spec("b", 7)]
    layout = plan_layout(specs, bucket_bytes=bucket_bytes, alignment=256)
    assert len([p for p in layout.pieces if p.name == "big"]) > 1
    assert [len(runs) for runs in extents(layout).values()] == [1, 1, 1]


def test_sizes_are_exact_not_rounded_to_powers_of_two() -> None:
    # pytorch/pytorch#150517, at a thousandth of its size: 9 x 1.1 MiB, odd.
    specs = [spec(f"t{i}", int(1.1 * 2**20) + 1 + 2 * i, dtype="uint8") for i in range(9)]
    layout = plan_layout(specs, bucket_bytes=2 * 2**20, alignment=256)
    assert layout.total_nbytes <= 1.05 * payload_nbytes(layout)


def test_ties_are_recorded_and_stored_once() -> None:
    specs = [spec("embed", 4, 4), spec("head", 4, 4), spec("x", 2)]
    ties = [("head", "alias"), ("alias", "embed")]
    layout = plan_layout(specs, bucket_bytes=1024, alignment=16, ties=ties)
    validate_layout(layout)
    assert [t.name for t in layout.tensors] == ["embed", "x"]
    assert dict(layout.ties) == {"head": "embed", "alias": "embed"}
    assert payload_nbytes(layout) == 64 + 8


@pytest.mark.parametrize(
    ("specs", "ties", "message"),
    [
        ([spec("a", 1), spec("a", 1)], [], "given twice"),
        ([spec("a", 1)], [("b", "c")], "not among the tensors"),
        ([spec("a", 1)], [("b", "c"), ("c", "b")], "back to itself"),
        ([spec("a", 1), spec("b", 2)], [("b", "a")], "shape or dtype differ"),
        ([spec("a", 1)], [("b", "a"), ("b", "a")], "given twice"),
        ([TensorSpec("a", (2,), "float32", 7)], [], "do not fit"),
        ([TensorSpec("a", (2,), "float12", 3)], [], "cannot be cached"),
    ],
)
def test_what_cannot_be_laid_out_is_refused(
    specs: list[TensorSpec], ties: list[tuple[str, str]], message: str
) -> None:
    with pytest.raises(LayoutError, match=message):
        plan_layout(specs, bucket_bytes=64, alignment=16, ties=ties)


def test_a_corrupted_layout_does_not_validate() -> None:
    layout = plan_layout([spec("a", 3), spec("b", 40)], bucket_bytes=64, alignment=16)
    validate_layout(layout)
    first, *rest = layout.pieces
    broken = [
        replace(layout, pieces=tuple(rest)),
        replace(layout, pieces=(first, first, *rest)),
        replace(layout, pieces=(replace(first, nbytes=first.nbytes + 64), *rest)),
        replace(layout, pieces=(Piece("ghost", 0, 0, 0, 4), *rest)),
        replace(layout, pieces=tuple(reversed(layout.pieces))),
        replace(layout, total_nbytes=layout.total_nbytes + 1),
        replace(layout, bucket_offsets=tuple(0 for _ in layout.bucket_offsets)),
        replace(layout, ties=(("a", "b"),)),
    ]
    for candidate in broken:
        with pytest.raises(LayoutError):
            validate_layout(candidate)


def test_the_digest_tells_layouts_apart() -> None:
    one = plan_layout([spec("a", 3), spec("b", 4)], bucket_bytes=64, alignment=16)
    other = plan_layout([spec("b", 4), spec("a", 3)], bucket_bytes=64, alignment=16)
    assert layout_digest(one) == layout_digest(one)
    assert layout_digest(one) != layout_digest(other)


def test_pure_modules_do_not_import_torch() -> None:
    names = ("layout", "staging", "plan", "book", "budget", "header", "host_memory", "sync")
    code = "import sys\n" + "\n".join(f"import nemo_rl_rlix.weights.{name}" for name in names)
    code += "\nassert 'torch' not in sys.modules and 'ray' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
