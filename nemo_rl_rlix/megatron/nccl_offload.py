"""Giving up and re-creating the communicators of a training worker.

    install_reloadable_groups()                  # before init_process_group
    init_process_group(...); initialize_model_parallel(...)
    ...
    destroy_megatron_nccl_groups()               # on every rank: device memory is free
    reinit_megatron_nccl_groups()                # on every rank: all handles work again

Megatron's own ``destroy_model_parallel`` and a second ``initialize_model_parallel``
would make other groups, leave every cached handle dangling and the old groups in
torch's books. Here ``parallel_state`` is not touched at all.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import DeadlineExceededError, RLixError
from nemo_rl_rlix.megatron.bounded import within
from nemo_rl_rlix.megatron.errors import (
    ForeignWrapperError,
    PeersMissingError,
    UnmanagedGroupError,
    WarmUpError,
)
from nemo_rl_rlix.megatron.groups import ReloadableGroup, group_order
from nemo_rl_rlix.megatron.install import check_no_foreign_wrapper
from nemo_rl_rlix.megatron.rendezvous import is_marked, meet
from nemo_rl_rlix.megatron.strategy import CommunicatorStrategy, RebuildStrategy

logger = logging.getLogger(__name__)

NCCL_ONLY = frozenset({"nccl"})
"""Kinds of groups that hold device memory; gloo groups stay up."""

_ABORT_S = 15.0  # an abort waits for no other rank; this is for the case that it hangs
_act = 0  # destroys and re-inits so far; counts alike on all ranks


@dataclass(frozen=True)
class CycleReport:
    """What a destroy or a re-init did.

    Attributes:
        groups: Descriptions and names of the groups that were changed; empty when
            there was nothing to do.
        generation: Number of destroys and re-inits so far, equal on all ranks.
        seconds: Time it took.
    """

    groups: tuple[str, ...]
    generation: int
    seconds: float


def managed_groups(kinds: frozenset[str] = NCCL_ONLY) -> list[ReloadableGroup]:
    """Groups of this process that have a backend of these kinds, in the world's order.

    The default group is among them. The order is that of creation and the same on
    all ranks, so that acts that need several ranks never wait in a circle
    (THUDM/slime#2208).

    Raises:
        ForeignWrapperError: Another library makes groups of its own kind.
        UnmanagedGroupError: Groups of these kinds cannot be re-created.
    """
    check_no_foreign_wrapper()
    groups: list[ReloadableGroup] = []
    unmanaged: list[str] = []
    for group, (backend_name, _) in c10d._world.pg_map.items():
        if isinstance(group, ReloadableGroup):
            if not group.kinds & kinds:
                continue
            strange = [recipe.kind for recipe in group.recipes if not recipe.reloadable]
            if strange:
                unmanaged.append(f"{group.label} (backend {', '.join(strange)})")
            groups.append(group)
        elif type(group) is not ProcessGroup:
            raise ForeignWrapperError(
                f"process group {group.group_name}", f"{type(group).__module__}"
            )
        elif any(kind in str(backend_name) for kind in kinds):
            unmanaged.append(f"{group.group_desc}[{group.group_name}] (made before the install)")
    if unmanaged:
        raise UnmanagedGroupError(unmanaged)
    return sorted(groups, key=lambda group: group_order(group.group_name))


def destroy_megatron_nccl_groups(
    *,
    timeout_s: float = 60.0,
    kinds: frozenset[str] = NCCL_ONLY,
    strategy: CommunicatorStrategy | None = None,
    concurrently: bool = False,
) -> CycleReport:
    """Free the communicators of every group, the default one included. On all ranks.

    Idempotent. Until the re-init a collective on any of them raises
    :class:`~.errors.GroupDownError`; ranks, sizes and names stay readable.

    Args:
        timeout_s: Deadline in seconds, also when other ranks are dead.
        kinds: Kinds of backends whose groups are taken down.
        strategy: How; a rebuild if unset.
        concurrently: End all communicators at once, each on a thread of its own, instead
            of one after the other. Most of the time goes into threads that are joined.

    Raises:
        ForeignWrapperError: Another library manages groups; nothing was done.
        UnmanagedGroupError: Groups cannot be re-created; nothing was done.
        PeersMissingError: Ranks did not come. The groups of this one are down.
        DeadlineExceededError: A communicator did not end. All others are down.
    """
    global _act
    started = time.monotonic()
    strategy = strategy or RebuildStrategy()
    groups = [group for group in managed_groups(kinds) if group.is_up]
    if not groups:
        return CycleReport((), _act, 0.0)
    deadline = Deadline("destroy of the communicators", timeout_s)
    _act += 1
    try:
        if torch.cuda.is_initialized():
            # Kernels of a collective with a dead rank never end.
            within(deadline.left(timeout_s), "device synchronize", torch.cuda.synchronize)
        used = [group.group_name for group in groups if group.has_communicator]
        _meet(f"destroy-{_act}", deadline.left(timeout_s), used)
        for batch in [groups] if concurrently else [[group] for group in reversed(groups)]:
            within(
                deadline.left(timeout_s),
                f"destroy of {', '.join(group.label for group in batch)}",
                *(partial(strategy.release, group) for group in batch),
            )
    except (PeersMissingError, DeadlineExceededError):
        _abort_all(groups)
        raise
    report = _report(groups, started)
    logger.info("destroyed %d communicators in %.2f s", len(groups), report.seconds)
    return report


def reinit_megatron_nccl_groups(
    *,
    timeout_s: float = 120.0,
    kinds: frozenset[str] = NCCL_ONLY,
    strategy: CommunicatorStrategy | None = None,
) -> CycleReport:
    """Make the backends of every group anew, and the communicators that were in use.

    On all ranks. A communicator that some rank of the group has had at a destroy is
    tried by a collective; the others come at their first one, as they would have.

    Idempotent. To be called before tensors are onloaded, while memory is free.

    Args:
        timeout_s: Deadline in seconds, warm-up included.
        kinds: Kinds of backends, as at the destroy.
        strategy: How; a rebuild if unset.

    Raises:
        PeersMissingError: Ranks did not come.
        DeadlineExceededError: A communicator did not come up.
        WarmUpError: One came up and does not work.
            After any of these all groups of this rank are down.
    """
    global _act
    started = time.monotonic()
    strategy = strategy or RebuildStrategy()
    groups = [group for group in managed_groups(kinds) if not group.is_up]
    if not groups:
        return CycleReport((), _act, 0.0)
    deadline = Deadline("re-init of the communicators", timeout_s)
    _act += 1
    generation = _act
    try:
        _meet(f"reinit-{generation}", deadline.left(timeout_s))
        for group in groups:
            within(
                deadline.left(timeout_s),
                f"re-init of {group.label}",
                partial(strategy.restore, group, generation),
            )
        # Megatron makes three times as many groups as a run uses; a communicator that
        # none of a group's ranks had would hold memory for nothing.
        store = c10d._get_default_store()
        for group in groups:
            if not is_marked(store, group.group_name):
                continue
            within(
                deadline.left(timeout_s),
                f"warm-up of {group.label}",
                partial(strategy.warm_up, group),
            )
    except (RLixError, RuntimeError) as error:
        _abort_all(groups)
        if isinstance(error, RLixError):
            raise
        raise WarmUpError(str(error)) from error
    report = _report(groups, started)
    logger.info("re-created %d communicators in %.2f s", len(groups), report.seconds)
    return report


def communicators_are_up(kinds: frozenset[str] = NCCL_ONLY) -> bool:
    """Whether every group can be used."""
    return all(group.is_up for group in managed_groups(kinds))


def _meet(step: str, timeout_s: float, marks: Iterable[str] = ()) -> None:
    meet(
        c10d._get_default_store(),
        step,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        timeout_s=timeout_s,
        marks=marks,
    )


def _abort_all(groups: Iterable[ReloadableGroup]) -> None:
    """Leave no group half up, whatever the other ranks do."""
    for group in groups:
        with contextlib.suppress(DeadlineExceededError, RuntimeError):
            within(_ABORT_S, f"abort of {group.label}", partial(group.take_down, abort=True))


def _report(groups: Iterable[ReloadableGroup], started: float) -> CycleReport:
    labels = tuple(group.label for group in groups)
    return CycleReport(labels, _act, time.monotonic() - started)
