"""Making torch create reloadable groups, before the first group is made."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nemo_rl_rlix.megatron.errors import ForeignWrapperError
from nemo_rl_rlix.megatron.groups import ReloadableGroup

_TORCH_ROOT = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HELPER = "_new_process_group_helper"
_OURS = "__nemo_rl_rlix_original__"
_ENTRY_POINTS = ("new_group", "init_process_group", "destroy_process_group")
_lock = threading.RLock()


def foreign_owner(function: Callable[..., Any]) -> str:
    """File of a replacement of a torch function, empty if it is torch's own.

    Every layer of decorators is looked at, since ``functools.wraps`` copies the name
    and the module of what it wraps, but not its code.
    """
    layer: Any = function
    while layer is not None:
        code = getattr(layer, "__code__", None)
        if code is None:
            return f"{type(layer).__module__}.{type(layer).__qualname__}"
        if not os.path.abspath(code.co_filename).startswith(_TORCH_ROOT):
            return str(code.co_filename)
        layer = getattr(layer, "__wrapped__", None)
    return ""


def check_no_foreign_wrapper() -> None:
    """Refuse to work beside another library that does the same.

    Raises:
        ForeignWrapperError: Names what was replaced and by whom.
    """
    for name in _ENTRY_POINTS:
        for module in (dist, c10d):
            owner = foreign_owner(getattr(module, name))
            if owner:
                raise ForeignWrapperError(f"{module.__name__}.{name}", owner)
    helper = getattr(c10d, _HELPER)
    owner = foreign_owner(getattr(helper, _OURS, helper))
    if owner:
        raise ForeignWrapperError(f"{c10d.__name__}.{_HELPER}", owner)
    if c10d.ProcessGroup is not dist.ProcessGroup or not _is_torch_class(c10d.ProcessGroup):
        raise ForeignWrapperError(f"{c10d.__name__}.ProcessGroup", c10d.ProcessGroup.__module__)


def install_reloadable_groups() -> None:
    """Make groups that torch creates from now on reloadable. Idempotent.

    To be called before ``init_process_group``, so that the default group is one too.

    Raises:
        ForeignWrapperError: Another library has replaced the same functions.
    """
    with _lock:
        check_no_foreign_wrapper()
        original = getattr(c10d, _HELPER)
        if getattr(original, _OURS, None) is not None:
            return

        @functools.wraps(original)
        def make_group(*args: Any, **kwargs: Any) -> Any:
            # The helper looks the class up in its module, which is where the one
            # place is that serves every torch version. Put back at once: torch
            # compares types with this name elsewhere.
            with _lock:
                real = c10d.ProcessGroup
                c10d.ProcessGroup = ReloadableGroup  # type: ignore[misc]
                try:
                    return original(*args, **kwargs)
                finally:
                    c10d.ProcessGroup = real  # type: ignore[misc]

        setattr(make_group, _OURS, original)
        setattr(c10d, _HELPER, make_group)


def uninstall_reloadable_groups() -> None:
    """Let torch create its own groups again; existing ones stay reloadable. Idempotent."""
    with _lock:
        original = getattr(getattr(c10d, _HELPER), _OURS, None)
        if original is not None:
            setattr(c10d, _HELPER, original)


def _is_torch_class(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "torch"
