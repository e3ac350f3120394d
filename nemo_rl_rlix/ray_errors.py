"""From what Ray raises to this package's own errors.

``ray.get`` and streaming generators raise an instance of a class that Ray makes up
from ``RayTaskError`` and the remote error's class. ``except ShardPreemptedError``
catches it and attributes are passed through, with two exceptions: ``cause`` is the
remote error itself (so a text attribute of that name is hidden), and ``str`` is a
whole traceback. It also cannot be pickled by the standard pickler.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ray.exceptions import (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    OwnerDiedError,
    RayActorError,
    RayTaskError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
    WorkerCrashedError,
)

from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    RLixError,
    ShardFailedError,
)

GONE = (
    ActorPlacementGroupRemoved,
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    OwnerDiedError,
    RayActorError,
    TaskPlacementGroupRemoved,
    TaskUnschedulableError,
    WorkerCrashedError,
)
"""Ray's errors for "the process that was called is not there"."""

MAX_CAUSE_CHARS = 600
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Callee:
    """Who was called, so that its absence gets the right name.

    Attributes:
        what: The act and whom it concerns, e.g. ``sleep of shard 1``.
        dp_rank: Rank of the shard that was called; ``None`` for the scheduler or
            the coordinator.
        timeout_s: Deadline of the call in seconds, as given to ``ray.get``.
    """

    what: str
    dp_rank: int | None = None
    timeout_s: float | None = None


def unwrap(error: BaseException, callee: Callee | None = None) -> BaseException:
    """The error to raise in place of one that came out of Ray.

    ``raise unwrap(error) from error`` keeps the remote traceback.

    Args:
        error: What ``ray.get``, ``await ref`` or a streaming generator raised.
        callee: Who was called. Without it only remote errors are unwrapped.

    Returns:
        The remote error where there is one; with ``callee``, a missed deadline as
        ``DeadlineExceededError`` and a process that is gone as ``ShardFailedError``
        or ``ControlPlaneLostError``; else ``error`` itself, cancellation included.
    """
    while isinstance(error, RayTaskError) and isinstance(error.cause, BaseException):
        error = error.cause
    if callee is None:
        return error
    if isinstance(error, GetTimeoutError) and callee.timeout_s is not None:
        return DeadlineExceededError(callee.what, callee.timeout_s)
    if isinstance(error, GONE):
        return _gone(error, callee)
    return error


def _gone(error: BaseException, callee: Callee) -> RLixError:
    # Ray says first what happened to the process and last what its code raised.
    text = " ".join(_COLOUR.sub("", str(error)).split())
    if len(text) > MAX_CAUSE_CHARS:
        text = f"{text[: MAX_CAUSE_CHARS // 2]} ... {text[-MAX_CAUSE_CHARS // 2 :]}"
    cause = f"{callee.what}: {type(error).__name__}: {text}"
    if callee.dp_rank is not None:
        return ShardFailedError(callee.dp_rank, cause)
    return ControlPlaneLostError(cause)
