"""Device memory that Megatron-Core and Transformer Engine keep for speed only."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable

import torch

_SCRATCH = frozenset({"_fp8_workspaces"})
"""Attributes of Transformer Engine modules: dictionaries of scratch tensors."""

_ROUTING = frozenset(
    {"probs", "routing_map", "reversed_local_input_permutation_mapping", "local_probs", "local_map"}
)
"""Attributes of token dispatchers: what the last forward pass left, with its graph."""


def clear_training_caches(models: Iterable[torch.nn.Module]) -> int:
    """Drop what the next step makes again by itself.

    Memoised results of module methods (rotary embeddings), scratch of quantised
    layers, routing tensors, and Megatron's global buffer.

    Returns:
        Number of caches that were cleared.
    """
    cleared = 0
    for module in {id(m): m for model in models for m in model.modules()}.values():
        for cls in type(module).__mro__:
            for member in vars(cls).values():
                if isinstance(member, functools._lru_cache_wrapper):
                    member.cache_clear()
                    cleared += 1
        own = vars(module)
        for name in _SCRATCH & own.keys():
            own[name].clear()
            cleared += 1
        dispatcher = own.get("token_dispatcher")
        if dispatcher is not None:
            cleared += _drop_routing(dispatcher)
    return cleared + _clear_global_buffer()


def library_globals() -> dict[str, object]:
    """Tensors, and containers of them, in module globals of Transformer Engine.

    Workspaces of its matrix products, which live as long as the process.
    """
    found: dict[str, object] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("transformer_engine", "transformer_engine_torch"):
            continue
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if isinstance(value, torch.Tensor | dict | list | tuple):
                found[f"{name}.{attribute}"] = value
    return found


def _drop_routing(dispatcher: object) -> int:
    own = vars(dispatcher)
    held = [name for name in _ROUTING & own.keys() if isinstance(own[name], torch.Tensor)]
    for name in held:
        own[name] = None
    return len(held)


def _clear_global_buffer() -> int:
    state = sys.modules.get("megatron.core.parallel_state")
    buffer = None if state is None else state._GLOBAL_MEMORY_BUFFER
    if buffer is None:
        return 0
    buffer.buffer.clear()
    return 1
