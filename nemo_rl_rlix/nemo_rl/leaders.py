"""Which worker actor owns the engine of a shard, known in the coordinator's process.

The coordinator is there before any engine, since it takes part in the registration.
NeMo RL makes the workers later, in the driver, which then announces them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_rlix.errors import ShardFailedError
from nemo_rl_rlix.ray_errors import Callee, unwrap

_leaders: dict[int, Any] = {}


def announce(coordinator: Any, leaders: Mapping[int, Any], *, timeout_s: float) -> None:
    """Make the leaders known in the coordinator's process.

    Args:
        coordinator: Its actor handle.
        leaders: dp rank -> actor handle.
        timeout_s: Deadline in seconds.

    Raises:
        ControlPlaneLostError: The coordinator is gone.
        DeadlineExceededError: It does not answer.
    """
    answer = coordinator.__ray_call__.remote(_remember, dict(leaders))
    try:
        ray.get(answer, timeout=timeout_s)
    except RayError as error:
        callee = Callee("announcement of the shards' workers", timeout_s=timeout_s)
        raise unwrap(error, callee) from error


def find(dp_rank: int) -> Any:
    """The worker that owns the engine of a shard. Called in the coordinator's process.

    Raises:
        ShardFailedError: None has been announced.
    """
    try:
        return _leaders[dp_rank]
    except KeyError:
        raise ShardFailedError(dp_rank, "its worker actor has not been announced") from None


def _remember(coordinator: object, leaders: Mapping[int, Any]) -> None:
    """Runs in the coordinator; Ray hands it the actor's instance first."""
    _leaders.update(leaders)
