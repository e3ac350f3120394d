"""Every tensor that hangs on a trainer, by the path that leads to it.

A list of the places where Megatron keeps tensors would be out of date with its next
release; so nothing is listed, and everything is walked: attributes, containers, and
what tensors themselves carry (``grad``, ``main_grad``, ``main_param``, the parts of a
quantised parameter).
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed import ProcessGroup

GRADIENT_NAMES = frozenset(
    {"grad", "main_grad", "grad_data", "decoupled_grad", "cached_grad_buffer_shard_list"}
)
"""Attributes under which gradients hang, see :attr:`FoundTensor.is_gradient`."""

_LEAVES = (
    str, bytes, int, float, complex, bool, type(None), type, torch.dtype, torch.device,
    torch.Size, torch.Generator, ProcessGroup, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.CodeType, weakref.ref, functools._lru_cache_wrapper,
)  # fmt: skip


@dataclass(frozen=True)
class FoundTensor:
    """A tensor and one way to it.

    Attributes:
        path: E.g. ``model.module.layers.0.weight.main_grad``.
        tensor: The tensor.
        is_gradient: Whether it hangs under the name of a gradient, so that its values
            mean nothing between two steps.
    """

    path: str
    tensor: torch.Tensor
    is_gradient: bool


def walk_tensors(roots: Mapping[str, object]) -> Iterator[FoundTensor]:
    """Yield every tensor that can be reached, each path to a tensor's holder once.

    A tensor that several holders refer to is yielded for each of them, since one may
    call it a gradient and the other not. Closures and C++ objects cannot be looked into.

    Args:
        roots: Names and objects to start from.
    """
    seen: dict[int, object] = {}  # keeps what it has seen alive, else ids would be reused
    stack = [(name, value, False) for name, value in reversed(list(roots.items()))]
    while stack:
        path, value, gradient = stack.pop()
        if isinstance(value, torch.Tensor):
            yield FoundTensor(path, value, gradient)
        if isinstance(value, _LEAVES) or id(value) in seen:
            continue
        seen[id(value)] = value
        children = [
            (path + suffix, child, name in GRADIENT_NAMES if name else gradient)
            for suffix, name, child in _children(value)
        ]
        stack.extend(reversed(children))


def _children(value: Any) -> Iterator[tuple[str, str, object]]:
    """Yield ``(suffix of the path, attribute name or empty, child)``."""
    if isinstance(value, torch.Tensor):
        if value.is_leaf and value.grad is not None:
            yield ".grad", "grad", value.grad
    elif isinstance(value, Mapping):
        for key, child in list(value.items()):
            if isinstance(key, torch.Tensor):  # optimizers keep state by parameter
                yield f"[{tuple(key.shape)}].key", "", key
                yield f"[{tuple(key.shape)}]", "", child
            else:
                yield f"[{key!r}]" if not isinstance(key, str) else f".{key}", "", child
    elif isinstance(value, list | tuple | set | frozenset):
        for index, child in enumerate(list(value)):
            yield f"[{index}]", "", child
    elif isinstance(value, functools.partial):
        yield ".args", "", value.args
        yield ".keywords", "", value.keywords
    elif isinstance(value, types.MethodType):
        yield ".__self__", "", value.__self__
    for name, child in _attributes(value):
        # A module's dictionaries of parameters and submodules add nothing to a path.
        shown = "" if name in ("_parameters", "_buffers", "_modules") else f".{name}"
        yield shown, name if shown else "", child


def _attributes(value: Any) -> Iterator[tuple[str, object]]:
    """Instance attributes, without calling properties."""
    own = getattr(value, "__dict__", None)
    if isinstance(own, dict):
        yield from list(own.items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            slot = cls.__dict__.get(name)
            if isinstance(slot, types.MemberDescriptorType):
                try:
                    yield name, slot.__get__(value, type(value))
                except AttributeError:
                    continue  # never assigned


def on_device(device_type: str) -> Callable[[torch.Tensor], bool]:
    """Predicate: the tensor occupies memory of that device.

    A tensor whose storage was resized to nothing still says that it is there.
    """

    def occupies(tensor: torch.Tensor) -> bool:
        return tensor.device.type == device_type and storage_nbytes(tensor) > 0

    return occupies


def storage_nbytes(tensor: torch.Tensor) -> int:
    """Bytes behind a tensor; 0 for one without storage of its own."""
    try:
        return tensor.untyped_storage().nbytes()
    except (NotImplementedError, RuntimeError):  # wrapper subclasses: their parts are walked
        return 0
