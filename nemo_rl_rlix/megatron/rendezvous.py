"""A step that all ranks of the world take together, over torch's own store.

No process group is needed for it, so that it works while all of them are down, and
a rank that is missing is named.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed import PrefixStore

from nemo_rl_rlix.megatron.errors import PeersMissingError
from nemo_rl_rlix.megatron.groups import timeout_of

_PREFIX = "nemo-rl-rlix/steps/"
_MARKS = "nemo-rl-rlix/marks/"


def meet(
    store: dist.Store,
    step: str,
    *,
    rank: int,
    world_size: int,
    timeout_s: float,
    marks: Iterable[str] = (),
) -> None:
    """Return when every rank has called this with the same step.

    Args:
        store: Store that all ranks share.
        step: Name of the step; each is used once.
        rank: Rank of this process.
        world_size: Number of ranks.
        timeout_s: How long to wait, in seconds.
        marks: Names that :func:`is_marked` tells every rank of once this has returned.

    Raises:
        PeersMissingError: Names the ranks that did not come.
    """
    end = time.monotonic() + timeout_s
    own = PrefixStore(f"{_PREFIX}{step}/", store)
    try:
        for name in marks:
            PrefixStore(_MARKS, store).set(name, "1")
        own.set(str(rank), "here")
        if own.add("count", 1) == world_size:
            own.set("all", "here")
        own.wait(["all"], timeout_of(max(0.001, end - time.monotonic())))
    except RuntimeError as error:  # torch's store errors: timed out, or its process is gone
        reason = str(error).partition("\n")[0][:200]
        raise PeersMissingError(step, timeout_s, _missing(own, world_size), reason) from error


def is_marked(store: dist.Store, name: str) -> bool:
    """Whether any rank has ever set this mark."""
    return bool(PrefixStore(_MARKS, store).check([name]))


def _missing(store: dist.Store, world_size: int) -> list[int]:
    try:
        return [rank for rank in range(world_size) if not store.check([str(rank)])]
    except RuntimeError:  # the process that held the store is the one that is gone
        return []
