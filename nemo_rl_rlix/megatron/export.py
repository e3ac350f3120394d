"""From the export that every training rank takes part in to the owner's cache."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.dtypes import dtype_name
from nemo_rl_rlix.weights.layout import ITEM_BYTES
from nemo_rl_rlix.weights.types import CacheHandle, TensorSpec

Export = Callable[[], Iterable[tuple[str, torch.Tensor]]]
"""Starts an export: yields ``(name, full tensor)`` on all ranks, by collectives."""

_OUTPUT = "lm_head.weight"
_EMBEDDING_SUFFIX = "embed_tokens.weight"


@dataclass(frozen=True)
class RankCoordinates:
    """Where a rank is in each direction of parallelism.

    Attributes:
        tensor: Rank in its tensor-parallel group.
        pipeline: Rank in its pipeline-parallel group.
        context: Rank in its context-parallel group.
        data: Rank in its data-parallel group, context ranks not counted.
    """

    tensor: int
    pipeline: int
    context: int
    data: int

    @property
    def owns_cache(self) -> bool:
        """Whether this rank stores the weights; exactly one of the world does.

        Expert-parallel ranks are cut out of the data and context ranks, so that they
        add no direction of their own.
        """
        return (self.tensor, self.pipeline, self.context, self.data) == (0, 0, 0, 0)


def read_coordinates() -> RankCoordinates:
    """Coordinates of this rank; rank and sizes are known while groups are down."""
    from megatron.core import parallel_state

    return RankCoordinates(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        context=parallel_state.get_context_parallel_rank(),
        data=parallel_state.get_data_parallel_rank(),
    )


def specs_of_info(info: Mapping[str, tuple[Sequence[int], torch.dtype]]) -> tuple[TensorSpec, ...]:
    """Describe what an export yields, from the ``{name: (shape, dtype)}`` of the trainer.

    Args:
        info: Answer of ``prepare_refit_info``, in export order.
    """
    specs = []
    for name, (shape, dtype) in info.items():
        kind = dtype_name(dtype)
        count = 1
        for size in shape:
            count *= int(size)
        shape_ = tuple(int(size) for size in shape)
        specs.append(TensorSpec(name, shape_, kind, count * ITEM_BYTES[kind]))
    return tuple(specs)


def find_ties(names: Iterable[str], *, tied: bool) -> tuple[tuple[str, str], ...]:
    """Output layer -> embedding, where the model ties them and the export has both.

    Args:
        names: Exported names.
        tied: ``tie_word_embeddings`` of the model.
    """
    known = list(names)
    embeddings = [name for name in known if name.endswith(_EMBEDDING_SUFFIX)]
    outputs = [name for name in known if name == _OUTPUT or name.endswith(f".{_OUTPUT}")]
    if not tied or len(embeddings) != 1 or len(outputs) != 1:
        return ()
    return ((outputs[0], embeddings[0]),)


def build_from_export(
    export: Export,
    cache: CpuWeightCache | None,
    *,
    step: int,
    slot: int,
    timeout_s: float,
) -> CacheHandle | None:
    """Run an export to its end and store it where there is a cache.

    Every rank goes through the whole export whatever happens to its own part: the
    collectives in it need all of them.

    Args:
        export: Starts the export.
        cache: The owner's cache, planned; ``None`` on other ranks.
        step: Version to store.
        slot: Slot to store it in.
        timeout_s: Deadline in seconds, looked at between tensors.

    Returns:
        The owner's handle, not published yet; ``None`` on other ranks.

    Raises:
        CacheBuildError: The export is not what was planned; the slot is invalid.
        DeadlineExceededError: The export took too long; the slot is invalid.
    """
    deadline = Deadline(f"export of weights version {step}", timeout_s)
    stream = _until(deadline, timeout_s, export())
    if cache is not None:
        return cache.build(step, slot, stream)
    for _ in stream:
        continue
    return None


def _until(
    deadline: Deadline, timeout_s: float, tensors: Iterable[tuple[str, torch.Tensor]]
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in tensors:
        yield name, tensor
        deadline.left(timeout_s)
