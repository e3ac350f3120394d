"""How a layout passes through device staging. Pure: no torch.

Two buffers take turns, one being filled while the other is loaded; a tensor that
was split over buckets is put together in a third. So the peak of a transfer is
two buckets and the largest split tensor (NVIDIA-NeMo/RL#630).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from nemo_rl_rlix.weights.errors import LayoutError
from nemo_rl_rlix.weights.types import BucketLayout, TensorSpec

_SHIFT_BYTES = 256  # keeps the alignment of every dtype when a bucket's tail moves to 0


@dataclass(frozen=True)
class Copy:
    """A run of bytes to be copied.

    Attributes:
        slot_offset: First byte in the slot.
        target_offset: First byte in the buffer it goes to.
        nbytes: Length in bytes.
        assembled: Whether the buffer is the one for split tensors, not the bucket's turn.
    """

    slot_offset: int
    target_offset: int
    nbytes: int
    assembled: bool


@dataclass(frozen=True)
class Ready:
    """A tensor that is complete once the copies of its step are done.

    Attributes:
        spec: The tensor.
        offset: First byte in its buffer.
        assembled: Whether that is the buffer for split tensors.
    """

    spec: TensorSpec
    offset: int
    assembled: bool


@dataclass(frozen=True)
class StagingStep:
    """One bucket.

    Attributes:
        copies: What to copy.
        ready: Tensors to load when the copies are done.
        may_overlap: Whether the copies may start while the step before is loaded;
            not when both need the one buffer for split tensors.
    """

    copies: tuple[Copy, ...]
    ready: tuple[Ready, ...]
    may_overlap: bool


@dataclass(frozen=True)
class StagingPlan:
    """A whole transfer.

    Attributes:
        steps: One for each bucket, in order.
        turn_nbytes: Size of each of the two buffers that take turns; at most a bucket.
        assembly_nbytes: Size of the buffer for split tensors; 0 when none is split.
        empty: Zero-size tensors, for which nothing is copied.
    """

    steps: tuple[StagingStep, ...]
    turn_nbytes: int
    assembly_nbytes: int
    empty: tuple[TensorSpec, ...] = field(default=())

    @property
    def turns(self) -> frozenset[int]:
        """Which of the two buffers are used at all; step ``i`` uses ``i % 2``."""
        return frozenset(
            index % 2
            for index, step in enumerate(self.steps)
            if any(not copy.assembled for copy in step.copies)
        )

    @property
    def peak_nbytes(self) -> int:
        """Staging bytes that are held at once."""
        return len(self.turns) * self.turn_nbytes + self.assembly_nbytes


def plan_staging(layout: BucketLayout) -> StagingPlan:
    """Turn the buckets of a layout into steps of a double-buffered transfer.

    Raises:
        LayoutError: A bucket ends one split tensor and begins another, which
            :func:`~nemo_rl_rlix.weights.layout.plan_layout` never does.
    """
    specs = {spec.name: spec for spec in layout.tensors}
    pieces: list[list[tuple[int, int, int, TensorSpec]]] = [[] for _ in layout.bucket_nbytes]
    for piece in layout.pieces:
        spec = specs[piece.name]
        pieces[piece.bucket].append((piece.bucket_offset, piece.tensor_offset, piece.nbytes, spec))

    steps: list[StagingStep] = []
    turn_nbytes = assembly_nbytes = 0
    finished_split = False
    for bucket, entries in enumerate(pieces):
        base = layout.bucket_offsets[bucket]
        copies: list[Copy] = []
        ready: list[Ready] = []
        begins_split = finishes_split = False
        for offset, tensor_offset, nbytes, spec in entries:
            if nbytes == spec.nbytes:
                ready.append(Ready(spec, offset, assembled=False))
                continue
            copies.append(Copy(base + offset, tensor_offset, nbytes, assembled=True))
            assembly_nbytes = max(assembly_nbytes, spec.nbytes)
            begins_split |= tensor_offset == 0
            if tensor_offset + nbytes == spec.nbytes:
                ready.append(Ready(spec, 0, assembled=True))
                finishes_split = True
        if begins_split and finishes_split:
            raise LayoutError(f"bucket {bucket} holds parts of two split tensors")
        whole = [entry for entry in ready if not entry.assembled]
        if whole:
            # Whole tensors are neighbours in their bucket: one copy, gaps included,
            # shifted so that staging starts at the first of them.
            start = whole[0].offset // _SHIFT_BYTES * _SHIFT_BYTES
            size = whole[-1].offset + whole[-1].spec.nbytes - start
            copies.append(Copy(base + start, 0, size, assembled=False))
            turn_nbytes = max(turn_nbytes, size)
            ready = [
                entry if entry.assembled else Ready(entry.spec, entry.offset - start, False)
                for entry in ready
            ]
        steps.append(
            StagingStep(
                copies=tuple(copies),
                ready=tuple(ready),
                may_overlap=not (finished_split and begins_split),
            )
        )
        finished_split = finishes_split
    empty = tuple(spec for spec in layout.tensors if spec.nbytes == 0)
    return StagingPlan(tuple(steps), turn_nbytes, assembly_nbytes, empty)
