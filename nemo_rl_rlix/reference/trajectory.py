"""What generation hands to training."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_rlix.errors import RLixError, Segment
from nemo_rl_rlix.shards.requests import GenerationOutput

FINISHED = ("stop", "length")


class UnfinishedTrajectoryError(RLixError):
    """A response that did not come to its own end was about to be trained on."""

    def __init__(self, trajectory_id: str, finish_reason: str, num_tokens: int) -> None:
        super().__init__(
            f"trajectory {trajectory_id} ended with {finish_reason!r} after {num_tokens} tokens;"
            f" only {FINISHED} may be trained on: dispatch the request again"
        )
        self.trajectory_id = trajectory_id
        self.finish_reason = finish_reason
        self.num_tokens = num_tokens


@dataclass(frozen=True)
class Trajectory:
    """A finished response and its reward.

    Attributes:
        trajectory_id: Unique over the run.
        prompt_ids: Tokens of the prompt.
        token_ids: Tokens of the response.
        logprobs: Natural-log probability of each response token when it was sampled.
        segments: Weight version of each run of response tokens.
        finish_reason: ``stop`` or ``length``.
        reward: Reward in [0, 1].
    """

    trajectory_id: str
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish_reason: str
    reward: float

    @classmethod
    def from_output(
        cls, prompt_ids: tuple[int, ...], output: GenerationOutput, reward: float
    ) -> Trajectory:
        """Join an answer with its prompt and its reward."""
        return cls(
            trajectory_id=output.request_id,
            prompt_ids=prompt_ids,
            token_ids=output.token_ids,
            logprobs=output.logprobs,
            segments=output.segments,
            finish_reason=output.finish_reason,
            reward=reward,
        )

    def check(self) -> None:
        """Refuse what must never be trained on.

        Raises:
            UnfinishedTrajectoryError: It was aborted.
            ValueError: Tokens, log-probabilities and segments do not match.
        """
        if self.finish_reason not in FINISHED:
            raise UnfinishedTrajectoryError(
                self.trajectory_id, self.finish_reason, len(self.token_ids)
            )
        stamped = sum(segment.num_tokens for segment in self.segments)
        if not self.token_ids or not len(self.token_ids) == len(self.logprobs) == stamped:
            raise ValueError(
                f"trajectory {self.trajectory_id}: {len(self.token_ids)} tokens,"
                f" {len(self.logprobs)} log-probabilities, {stamped} tokens in segments;"
                " they must be equal and more than 0"
            )


@dataclass(frozen=True)
class PromptGroup:
    """All trajectories of one prompt.

    Attributes:
        group_id: Unique over the run; the same after a retry or a restart.
        target_version: Training step that it is for; the policy then has this version.
        trajectories: Its trajectories.
    """

    group_id: str
    target_version: int
    trajectories: tuple[Trajectory, ...]

    @property
    def num_tokens(self) -> int:
        """Response tokens."""
        return sum(len(trajectory.token_ids) for trajectory in self.trajectories)
