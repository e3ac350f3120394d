"""Between torch dtypes and the names that the layout uses."""

from __future__ import annotations

import torch

from nemo_rl_rlix.weights.errors import LayoutError
from nemo_rl_rlix.weights.layout import ITEM_BYTES
from nemo_rl_rlix.weights.types import TensorSpec


def dtype_name(dtype: torch.dtype) -> str:
    """Name of a dtype without prefix, e.g. ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The torch dtype of a name.

    Raises:
        LayoutError: No such dtype can be cached by this torch.
    """
    dtype = getattr(torch, name, None) if name in ITEM_BYTES else None
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"dtype {name!r} cannot be cached by torch {torch.__version__}")
    return dtype


def spec_of(name: str, tensor: torch.Tensor) -> TensorSpec:
    """Describe a tensor; sizes are those of its contiguous form."""
    return TensorSpec(
        name=name,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        nbytes=tensor.numel() * tensor.element_size(),
    )
