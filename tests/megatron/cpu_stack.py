"""Megatron-Core and Megatron Bridge in a process without a GPU.

Both are written for CUDA devices and for Transformer Engine. Here a tensor that is
asked for on a CUDA device is made on the host, and packages that only exist for GPUs
are importable and empty. Nothing of what the tests look at is replaced: parallel state,
models, data parallelism, optimizers, the export.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch
import typing_extensions
from torch.overrides import TorchFunctionMode

_GPU_PACKAGES = (
    "transformer_engine",
    "transformer_engine_torch",
    "modelopt",
    "timm",
    "torchvision",
)
_HOST = torch.device("cpu")
_mode: TorchFunctionMode | None = None


class _Nothing(type):
    """A class whose every attribute is another such class."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _EmptyModule(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing(name, (), {})


class _EmptyPackages(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        absent = name.partition(".")[0] in _GPU_PACKAGES or name.startswith("megatron.energon")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _EmptyModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__path__ = []


def import_core() -> None:
    """Import Megatron-Core, which must find no Transformer Engine."""
    if sys.version_info < (3, 12):  # the sources are for 3.12; these names are all they need
        typing.override = typing_extensions.override  # type: ignore[attr-defined]
        typing.TypedDict = typing_extensions.TypedDict  # type: ignore[assignment]
    for name in (
        "megatron.core.distributed",
        "megatron.core.optimizer",
        "megatron.core.models.gpt.gpt_layer_specs",
        "megatron.core.models.gpt.gpt_model",
        "megatron.core.models.hybrid.hybrid_model",
        "megatron.core.models.mamba",
        "megatron.core.models.multimodal.llava_model",
        "megatron.core.pipeline_parallel",
        "megatron.core.extensions.transformer_engine",
        "megatron.core.transformer.cuda_graphs",
        "megatron.core.transformer.multi_latent_attention",
        "megatron.core.transformer.multi_token_prediction",
        "megatron.core.ssm.gated_delta_net",
        "megatron.core.dist_checkpointing",
    ):
        with contextlib.suppress(ImportError, AttributeError):  # not in this release
            importlib.import_module(name)


def import_bridge() -> None:
    """Import Megatron Bridge on top."""
    import_core()
    sys.meta_path.append(_EmptyPackages())
    adapter = importlib.import_module("megatron.core.distributed.fsdp.mcore_fsdp_adapter")
    known = vars(adapter)
    if "FullyShardedDataParallelV1" not in known:  # Bridge is newer than this Core
        adapter.FullyShardedDataParallelV1 = adapter.FullyShardedDataParallel  # type: ignore[attr-defined]
        adapter.FullyShardedDataParallelV2 = type("Absent", (), {})  # type: ignore[attr-defined]
    importlib.import_module("megatron.bridge")
    importlib.import_module("transformers.models.qwen2.modeling_qwen2")
    importlib.import_module("transformers.models.qwen3_moe.modeling_qwen3_moe")


def _host(value: Any) -> Any:
    kind = value.type if isinstance(value, torch.device) else value
    return _HOST if isinstance(kind, str) and kind.startswith("cuda") else value


class _HostMode(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to:
            args = tuple(_host(arg) for arg in args)
        if "device" in kwargs:
            kwargs = {**kwargs, "device": _host(kwargs["device"])}
        result = func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(result, str):
            return result.replace("torch.", "torch.cuda.")  # optimizers sort by these names
        return result


class _Stream:
    """A stream or event that does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: _Stream()

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *args: object) -> None:
        pass


def use_host() -> None:
    """Send what is meant for a GPU to the host, in this process, for good."""
    global _mode
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    for name, value in {
        "current_device": lambda: _HOST,
        "device_count": lambda: 1,
        "synchronize": lambda *a, **k: None,
        "empty_cache": lambda: None,
        "manual_seed": torch.manual_seed,
        "get_rng_state": lambda *a, **k: torch.get_rng_state(),
        "set_rng_state": lambda state, *a, **k: torch.set_rng_state(state),
        "Stream": _Stream,
        "Event": _Stream,
        "stream": _Stream,
        "current_stream": _Stream,
        "default_stream": _Stream,
    }.items():
        setattr(torch.cuda, name, value)
    torch.nn.Module.cuda = lambda self, *a, **k: self  # type: ignore[method-assign]
    random._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)  # type: ignore[attr-defined]
    _mode = _HostMode()
    _mode.__enter__()
