"""Plain data shared by the cache, the planner and the receivers."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the canonical (Hugging Face) naming.

    Attributes:
        name: Name of the tensor, e.g. ``model.layers.0.mlp.up_proj.weight``.
        shape: Shape.
        dtype: Name of the torch dtype without prefix, e.g. ``bfloat16``.
        nbytes: Size in bytes of the contiguous tensor.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class Piece:
    """A run of bytes of one tensor inside one bucket.

    Attributes:
        name: Name of the tensor.
        tensor_offset: First byte inside the tensor.
        bucket: Index of the bucket.
        bucket_offset: First byte inside the bucket; aligned when ``tensor_offset`` is 0.
        nbytes: Length in bytes.
    """

    name: str
    tensor_offset: int
    bucket: int
    bucket_offset: int
    nbytes: int


@dataclass(frozen=True)
class BucketLayout:
    """Where every byte of every tensor lies, the same for each transport.

    Attributes:
        tensors: The tensors, in export order.
        pieces: The pieces, ordered by bucket, then offset; together they cover
            each tensor exactly once.
        bucket_nbytes: Exact size in bytes of each bucket.
        bucket_offsets: First byte of each bucket in the shared memory, aligned.
        total_nbytes: Bytes of shared memory needed for one slot.
        ties: Tied name -> name that is stored (e.g. ``lm_head.weight``).
    """

    tensors: tuple[TensorSpec, ...]
    pieces: tuple[Piece, ...]
    bucket_nbytes: tuple[int, ...]
    bucket_offsets: tuple[int, ...]
    total_nbytes: int
    ties: tuple[tuple[str, str], ...] = field(default=())


@dataclass(frozen=True)
class SharedMemoryHandle:
    """How another process of the node maps the memory.

    Attributes:
        path: What to open: ``/proc/<pid>/fd/<fd>`` for a memfd, else a file.
        nbytes: Size in bytes.
        nonce: Random token written nowhere but here and in the memory's header
            page, so that a reused pid or path is noticed.
        node_id: Node on which the path means something.
    """

    path: str
    nbytes: int
    nonce: str
    node_id: str


@dataclass(frozen=True)
class CacheHandle:
    """A complete set of weights that a receiver may read while it holds a lease.

    Attributes:
        pipeline_id: Pipeline the weights belong to.
        weights_version: Version; equals the training step (0 before the first).
        slot: Slot of the cache that holds it.
        layout: Where the tensors lie.
        memory: How to map it.
        checksum: Checksum over the layout and the bytes (see ``weights.cache``).
    """

    pipeline_id: str
    weights_version: int
    slot: int
    layout: BucketLayout
    memory: SharedMemoryHandle
    checksum: str
