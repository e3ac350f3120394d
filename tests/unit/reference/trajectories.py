"""Made-up trajectories for tests."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_rlix.errors import Segment
from nemo_rl_rlix.reference.trajectory import PromptGroup, Trajectory


def trajectory(
    name: str,
    reward: float = 0.0,
    *,
    tokens: Sequence[int] = (17, 18, 96),
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    finish_reason: str = "stop",
) -> Trajectory:
    return Trajectory(
        trajectory_id=name,
        prompt_ids=(16, 11, 29),
        token_ids=tuple(tokens),
        logprobs=tuple(logprobs if logprobs is not None else [-1.0] * len(tokens)),
        segments=(Segment(version, len(tokens)),),
        finish_reason=finish_reason,
        reward=reward,
    )


def group(
    name: str, target: int, size: int = 2, *, version: int | None = None, finish: str = "stop"
) -> PromptGroup:
    made = target if version is None else version
    return PromptGroup(
        name,
        target,
        tuple(
            trajectory(f"{name}-t{i}", float(i), version=made, finish_reason=finish)
            for i in range(size)
        ),
    )
