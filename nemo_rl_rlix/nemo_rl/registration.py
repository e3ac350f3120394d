"""Binding this package to NeMo RL in the driver of a run: check everything, then swap.

``binding.SWAPS`` lists what is replaced. A module that has not been imported yet, or that
is just being imported, gets its swaps when it has run.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType

from nemo_rl_rlix.errors import RLixError, UnsupportedVersionError
from nemo_rl_rlix.nemo_rl import carry
from nemo_rl_rlix.nemo_rl.autoload import DRIVER_MODULE, WATCHED
from nemo_rl_rlix.nemo_rl.seams import check_seams, seam
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.swap import Applied, Swap, SwapError, apply, undo
from nemo_rl_rlix.nemo_rl.versions import (
    NEMO_RL_REMEDY,
    NemoRl,
    check_vllm,
    detect,
    vllm_version,
)

logger = logging.getLogger(__name__)


@dataclass
class Registration:
    """What has been done in this process.

    Attributes:
        version: The NeMo RL that was found.
        pending: Swaps whose module has not run yet.
        applied: Swaps that have been done, in order.
        carried: Whether ``PYTHONPATH`` was extended.
    """

    version: NemoRl
    pending: list[Swap] = field(default_factory=list)
    applied: list[Applied] = field(default_factory=list)
    carried: bool = False


_current: Registration | None = None


def current() -> Registration | None:
    """The registration of this process, ``None`` if there is none."""
    return _current


def module_imported(module: str) -> None:
    """Take note that a watched module has run; the first sign to register."""
    if module == DRIVER_MODULE:
        register()
    elif _current is not None:
        _apply_pending(_current, ran=module)


def register(swaps: Sequence[Swap] | None = None) -> Registration | None:
    """Check NeMo RL and vLLM, then replace what ``swaps`` say. Idempotent.

    Args:
        swaps: What to replace; ``None``: ``binding.SWAPS``.

    Returns:
        What was done; ``None`` in a Ray worker, where classes are found by name and
        nothing is replaced.

    Raises:
        UnsupportedVersionError: NeMo RL or vLLM is none that is known, or a seam moved.
        SwapError: A replacement does not fit. Whatever was replaced is put back.
    """
    global _current
    if _current is not None:
        return _current
    if in_ray_worker():
        logger.debug("a Ray worker: nothing is registered")
        return None
    version = check_versions()
    if swaps is None:
        # Not before: it is of no use in a worker, nor with a NeMo RL that is refused.
        from nemo_rl_rlix.nemo_rl.binding import SWAPS

        swaps = SWAPS
    registration = Registration(version, [swap for swap in swaps if version in swap.versions])
    try:
        _apply_pending(registration)
    except BaseException:
        _undo_all(registration)
        raise
    registration.carried = carry.put_on_pythonpath(os.environ)
    _current = registration
    logger.info("time sharing is on: bound to NeMo RL %s", version)
    return registration


def unregister() -> None:
    """Put everything back. Idempotent.

    Raises:
        SwapError: Someone replaced a replacement meanwhile; it is left as it is.
    """
    global _current
    registration, _current = _current, None
    if registration is None:
        return
    if registration.carried:
        carry.take_off_pythonpath(os.environ)
    _undo_all(registration)


def check_versions() -> NemoRl:
    """Refuse what is not supported, without importing it.

    Raises:
        UnsupportedVersionError: Names file, symbol and version.
    """
    tree = SourceTree.installed()
    if tree is None:
        raise RLixError("NeMo RL is not importable: put its checkout on PYTHONPATH")
    version = detect(tree)
    problems = check_seams(version, tree)
    if problems:
        raise UnsupportedVersionError(
            "NeMo RL",
            str(version),
            places=[
                (p.file, p.symbol, f"{p.reason} (seam {p.seam}, {p.version})") for p in problems
            ],
            remedy=NEMO_RL_REMEDY,
        )
    check_vllm(vllm_version())
    return version


def in_ray_worker() -> bool:
    """Whether this process executes tasks of Ray rather than submits them.

    Variables do not tell: a driver that Ray's job server starts inherits a worker's.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return False
    mode: int = ray.get_runtime_context().worker.mode
    return mode == ray.WORKER_MODE


def _apply_pending(registration: Registration, ran: str = DRIVER_MODULE) -> None:
    for swap in tuple(registration.pending):
        where = seam(registration.version, swap.seam)
        module = _loaded(where.module, ran)
        if module is not None:
            registration.applied.append(apply(swap, where, module))
            registration.pending.remove(swap)
        elif where.module not in WATCHED:
            raise SwapError(f"{where.module} is neither imported nor watched: add it to WATCHED")


def _loaded(name: str, ran: str) -> ModuleType | None:
    """The module if it has run to its end.

    Importing ``async_utils`` first imports the GRPO module half way: its globals are
    not all there when registration starts.

    Args:
        name: The module.
        ran: The module that has just been reported, from inside its own import and
            after its last line.
    """
    module = sys.modules.get(name)
    if module is None or getattr(module.__spec__, "_initializing", False):
        return module if name == ran else None
    return module


def _undo_all(registration: Registration) -> None:
    while registration.applied:
        done = registration.applied.pop()
        undo(done, sys.modules[done.seam.module])
