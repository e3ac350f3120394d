"""NeMo RL's globals, replaced as in a real run, with the stand-ins' workers."""

from __future__ import annotations

import functools
from typing import Any

from nemo_rl_rlix.nemo_rl.binding import SWAPS
from nemo_rl_rlix.nemo_rl.makers import other_workers
from nemo_rl_rlix.nemo_rl.stand_in.config import StandIn
from nemo_rl_rlix.nemo_rl.stand_in.host import (
    GENERATION_WORKERS,
    POLICY_WORKERS,
    stand_in_host,
)
from nemo_rl_rlix.nemo_rl.start import time_share_setup
from nemo_rl_rlix.nemo_rl.swap import Swap

OWN_SEAMS = frozenset(
    {"setup", "generation_worker_choice", "policy_worker_choice", "actor_environments"}
)


def stand_in_swaps(stand_in: StandIn) -> tuple[Swap, ...]:
    """What is replaced in a driver whose engines and trainer are stand-ins."""
    own = (
        Swap("setup", functools.partial(time_share_setup, host=stand_in_host(stand_in))),
        Swap("generation_worker_choice", other_workers(GENERATION_WORKERS)),
        Swap("policy_worker_choice", other_workers(POLICY_WORKERS)),
        Swap("actor_environments", _environments),
    )
    return (*own, *(swap for swap in SWAPS if swap.seam not in OWN_SEAMS))


def _environments(registry: Any) -> dict[str, str]:
    """Everything runs in the interpreter of the driver."""
    from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES

    workers = (*GENERATION_WORKERS.values(), *POLICY_WORKERS.values())
    return dict.fromkeys(workers, PY_EXECUTABLES.SYSTEM)
