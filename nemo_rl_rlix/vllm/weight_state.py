"""What of a model a sync must write, and whether it did.

Engines fuse tensors (``q_proj``, ``k_proj`` and ``v_proj`` become ``qkv_proj``) and pad
them, so that names alone do not tell whether a parameter was written to its last
element. Before the first load of a layout every parameter is therefore filled with a
bit pattern that no weight has; what still holds it afterwards was not written. A loader
is a function of names and shapes, so the same layout writes the same elements from then
on, and later syncs need not be looked through.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PATTERN = -1
"""All bits set: a NaN in every floating format, and not the one that arithmetic makes."""

CHUNK_ELEMENTS = 1 << 26
"""Elements looked at together; the look needs one byte of device memory for each."""


def parameters_of(models: Mapping[str, torch.nn.Module]) -> dict[str, torch.nn.Parameter]:
    """Every parameter once, by name; a tied one under the name that comes first.

    Args:
        models: Prefix -> model; the main model has the empty prefix.
    """
    found: dict[str, torch.nn.Parameter] = {}
    seen: set[int] = set()
    for prefix, model in models.items():
        for name, parameter in model.named_parameters():
            if id(parameter) not in seen:
                seen.add(id(parameter))
                found[f"{prefix}{name}"] = parameter
    return found


def can_be_proved(parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether each parameter has a bit pattern that no weight has."""
    return all(parameter.is_floating_point() for parameter in parameters.values())


def mark_unwritten(parameters: Mapping[str, torch.Tensor]) -> None:
    """Fill parameters with the pattern. The model cannot serve until they are written."""
    for parameter in parameters.values():
        _bits(parameter).fill_(PATTERN)


def find_unwritten(parameters: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """Names of the parameters in which an element still holds the pattern."""
    names: list[str] = []
    flags: list[torch.Tensor] = []
    for name, parameter in parameters.items():
        for chunk in _chunks(_bits(parameter)):
            names.append(name)
            flags.append((chunk == PATTERN).any())
    if not flags:
        return frozenset()
    by_device: dict[torch.device, list[int]] = {}
    for place, flag in enumerate(flags):
        by_device.setdefault(flag.device, []).append(place)
    unwritten: set[str] = set()
    for places in by_device.values():  # one wait for each device, not one for each tensor
        answers = torch.stack([flags[place] for place in places]).tolist()
        unwritten.update(names[place] for place, hit in zip(places, answers, strict=True) if hit)
    return frozenset(unwritten)


def stray_tensors(
    model: torch.nn.Module, ranges: Sequence[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Tensors in discarded memory that modules hold as plain attributes.

    Neither a sync nor vLLM's own saving of buffers brings them back. Views of parameters
    and buffers are left out: they follow those.

    Args:
        model: The model.
        ranges: ``(first address, size in bytes)`` of the memory that holds weights, by
            address. What lies elsewhere, as KV caches do, is not meant.
    """
    known = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    starts = [start for start, _ in ranges]

    def discarded(tensor: torch.Tensor) -> bool:
        address = _storage(tensor)
        place = bisect.bisect_right(starts, address) - 1
        return place >= 0 and address < starts[place] + ranges[place][1]

    strays: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            for suffix, tensor in _tensors_in(value):
                if tensor.numel() and discarded(tensor) and _storage(tensor) not in known:
                    strays[f"{path}.{name}{suffix}".lstrip(".")] = tensor
    return strays


def _tensors_in(value: object) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield "", value
    elif isinstance(value, list | tuple):
        yield from _numbered((str(place), item) for place, item in enumerate(value))
    elif isinstance(value, dict):
        yield from _numbered((str(key), item) for key, item in value.items())


def _numbered(items: Iterable[tuple[str, object]]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, item in items:
        if isinstance(item, torch.Tensor):
            yield f"[{key}]", item


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _bits(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.detach().view(_INTEGERS[parameter.element_size()])


def _chunks(bits: torch.Tensor) -> Iterator[torch.Tensor]:
    if bits.numel() <= CHUNK_ELEMENTS or bits.dim() == 0:
        yield bits
        return
    rows = max(1, CHUNK_ELEMENTS * bits.shape[0] // bits.numel())
    yield from bits.split(rows)
