"""NeMo RL's replay buffer, which also says what is valid and what is wanted.

Runs in the buffer's actor. Nothing here waits for anything.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBuffer

from nemo_rl_rlix.nemo_rl.demand import BufferView
from nemo_rl_rlix.nemo_rl.failures import CollectionFailedError
from nemo_rl_rlix.nemo_rl.makers import plain_class

_Base: Any = plain_class(ReplayBuffer)


class CountingBuffer(_Base):
    """``ReplayBuffer`` with counts; takes the arguments of its base."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rlix_polled: set[int] = set()
        self._rlix_extra = 0
        self._rlix_failure = ""

    # -- NeMo RL's own methods ----------------------------------------------------

    def sample(
        self, num_prompt_groups: int, current_weight_version: int, max_age_steps: int
    ) -> dict[str, Any] | None:
        """As the base's; that it is asked says which version is wanted.

        Raises:
            CollectionFailedError: The collector has given up.
        """
        self._rlix_polled_for(current_weight_version)
        sampled: dict[str, Any] | None = super().sample(
            num_prompt_groups, current_weight_version, max_age_steps
        )
        return sampled

    def has_complete_batch(self, target_step: int, *args: Any, **kwargs: Any) -> bool:
        """As the base's; asked before the first sample.

        Raises:
            CollectionFailedError: The collector has given up.
        """
        self._rlix_polled_for(target_step)
        return bool(super().has_complete_batch(target_step, *args, **kwargs))

    # -- what is added ------------------------------------------------------------

    def valid_count(self, current_weight_version: int, max_age_steps: int) -> int:
        """Trajectories that may be trained on at a version.

        Args:
            current_weight_version: Version of the weights that training has.
            max_age_steps: Most steps that sampling weights may be older than those.
        """
        oldest = max(0, current_weight_version - max_age_steps)
        with self._lock:
            return sum(
                int(group["batch"].size)
                for group, version in zip(self.trajectories, self.trajectory_versions, strict=True)
                if oldest <= version <= current_weight_version
            )

    def rlix_view(self) -> BufferView:
        """What the buffer knows of demand."""
        with self._lock:
            counts: dict[int, int] = Counter(self.target_weight_versions)
            consumed = int(self.last_target_weight_already_generated)
        self._rlix_polled = {target for target in self._rlix_polled if target > consumed}
        return BufferView(dict(counts), consumed, frozenset(self._rlix_polled), self._rlix_extra)

    def rlix_note_extra(self, trajectories: int) -> None:
        """Take note of trajectories that are wanted beside the buffer's; 0 for none."""
        self._rlix_extra = trajectories

    def rlix_fail(self, cause: str) -> None:
        """Have the next poll of the training loop raise; the first cause stays."""
        self._rlix_failure = self._rlix_failure or cause

    def _rlix_polled_for(self, target: int) -> None:
        if self._rlix_failure:
            raise CollectionFailedError(self._rlix_failure)
        self._rlix_polled.add(target)
