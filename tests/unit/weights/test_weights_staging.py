"""Staging: right bytes whatever the bucket size, and a bounded peak."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_rlix.weights.dtypes import spec_of
from nemo_rl_rlix.weights.errors import LayoutError
from nemo_rl_rlix.weights.layout import ITEM_BYTES, extents, plan_layout
from nemo_rl_rlix.weights.slot import tensor_at
from nemo_rl_rlix.weights.staging import plan_staging
from nemo_rl_rlix.weights.transports.staged import staged_batches
from nemo_rl_rlix.weights.types import BucketLayout, Piece, TensorSpec

DTYPES = ["uint8", "bfloat16", "float32", "float64", "bool"]


class InstantLane:
    """Copies at the moment they are requested, which is the earliest a GPU could.

    So a buffer that is filled before it was loaded shows up as wrong bytes.
    """

    def __init__(self) -> None:
        self.finished = False

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: object) -> object:
        for target, source in pairs:
            target.copy_(source)
        return "copied"

    def await_copy(self, copied: object) -> None:
        assert copied == "copied"

    def mark_load(self) -> object:
        return "loaded"

    def finish(self) -> None:
        self.finished = True


class CountingAllocator:
    def __init__(self) -> None:
        self.total = 0

    def __call__(self, nbytes: int) -> torch.Tensor:
        self.total += nbytes
        return torch.full((nbytes,), 255, dtype=torch.uint8)


def filled(layout: BucketLayout) -> torch.Tensor:
    generator = torch.Generator().manual_seed(layout.total_nbytes)
    return torch.randint(0, 2, (layout.total_nbytes,), dtype=torch.uint8, generator=generator)


def expected_tensor(slot: torch.Tensor, layout: BucketLayout, spec: TensorSpec) -> torch.Tensor:
    return tensor_at(slot, spec, extents(layout)[spec.name])


sizes = st.lists(st.tuples(st.integers(0, 90), st.sampled_from(DTYPES)), max_size=14)


@settings(max_examples=200, deadline=None)
@given(sizes, st.integers(16, 300), st.sampled_from([1, 4, 16]))
def test_staged_tensors_are_bit_equal_and_the_peak_is_bounded(
    rows: list[tuple[int, str]], bucket_bytes: int, alignment: int
) -> None:
    specs = [TensorSpec(f"t{i}", (n,), d, n * ITEM_BYTES[d]) for i, (n, d) in enumerate(rows)]
    layout = plan_layout(specs, bucket_bytes=bucket_bytes, alignment=alignment)
    slot = filled(layout)
    plan = plan_staging(layout)
    allocator, lane = CountingAllocator(), InstantLane()
    seen: dict[str, torch.Tensor] = {}
    for batch in staged_batches(slot, plan, allocator, lane):
        assert len({name for name, _ in batch} & seen.keys()) == 0
        seen |= {name: tensor.clone() for name, tensor in batch}
    assert lane.finished
    assert seen.keys() == {spec.name for spec in specs}
    for spec in specs:
        want = expected_tensor(slot, layout, spec)
        got = seen[spec.name]
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        assert torch.equal(got.view(-1).view(torch.uint8), want.view(-1).view(torch.uint8))
    largest_split = max((s.nbytes for s in specs if s.nbytes > bucket_bytes), default=0)
    assert allocator.total == plan.peak_nbytes
    assert allocator.total <= 2 * bucket_bytes + largest_split  # NVIDIA-NeMo/RL#630


def test_two_large_tensors_in_a_row_share_one_assembly_buffer() -> None:
    specs = [spec_of(f"big{i}", torch.zeros(100)) for i in range(3)]
    layout = plan_layout(specs, bucket_bytes=128, alignment=4)
    plan = plan_staging(layout)
    assert plan.assembly_nbytes == 400
    assert plan.peak_nbytes == 400
    assert [step.may_overlap for step in plan.steps].count(False) == 2


def test_most_buckets_overlap() -> None:
    specs = [spec_of(f"t{i}", torch.zeros(32)) for i in range(20)]
    plan = plan_staging(plan_layout(specs, bucket_bytes=256, alignment=4))
    assert len(plan.steps) == 10
    assert all(step.may_overlap for step in plan.steps)
    assert plan.peak_nbytes == 512


def test_a_layout_with_two_split_tensors_in_one_bucket_is_refused() -> None:
    specs = tuple(TensorSpec(name, (6,), "uint8", 6) for name in "ab")
    pieces = (
        Piece("a", 0, 0, 0, 4),
        Piece("a", 4, 1, 0, 2),
        Piece("b", 0, 1, 2, 2),
        Piece("b", 2, 2, 0, 4),
    )
    layout = BucketLayout(specs, pieces, (4, 4, 4), (0, 4096, 8192), 8196)
    with pytest.raises(LayoutError, match="two split tensors"):
        plan_staging(layout)


def test_an_abandoned_transfer_still_waits_for_its_copies() -> None:
    specs = [spec_of(f"t{i}", torch.zeros(8)) for i in range(4)]
    layout = plan_layout(specs, bucket_bytes=32, alignment=4)
    lane = InstantLane()
    batches = staged_batches(filled(layout), plan_staging(layout), CountingAllocator(), lane)
    next(batches)
    assert not lane.finished
    batches.close()
    assert lane.finished


def test_alignment_survives_the_shift_to_the_start_of_staging() -> None:
    specs = [
        spec_of("big", torch.zeros(67)),
        spec_of("a", torch.zeros(1)),
        spec_of("b", torch.zeros(1, dtype=torch.float64)),
    ]
    layout = plan_layout(specs, bucket_bytes=256, alignment=4)
    plan = plan_staging(layout)
    assert math.gcd(*(r.offset for r in plan.steps[-1].ready if not r.assembled), 8) >= 4
    for _ in staged_batches(filled(layout), plan, CountingAllocator(), InstantLane()):
        pass
