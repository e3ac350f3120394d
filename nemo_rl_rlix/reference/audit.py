"""What training really got, counted where it trains and not where it was promised.

The replay buffer's own book cannot tell whether it is right. The trainer's process
writes down the name of each group it has trained on and looks at each answer itself:
one that neither ends nor is as long as it may be was cut off, whatever its label says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nemo_rl_rlix.reference.trajectory import PromptGroup


@dataclass(frozen=True)
class TrainingAccount:
    """What a trainer's process has trained on.

    Attributes:
        groups: Name of each group, in the order of training.
        unfinished_tokens: Tokens of answers that were cut off.
    """

    groups: tuple[str, ...] = ()
    unfinished_tokens: int = 0


@dataclass(frozen=True)
class TrainingAudit:
    """The account against what was to be trained.

    Attributes:
        lost_groups: Groups that were never trained on.
        duplicated_groups: Times that a group was trained on after its first, and
            groups that nobody asked for.
        aborted_tokens: Tokens of answers that were cut off.
    """

    lost_groups: int
    duplicated_groups: int
    aborted_tokens: int


def unfinished_tokens(groups: Iterable[PromptGroup], *, stop_id: int, max_new_tokens: int) -> int:
    """Tokens of answers that were cut off.

    Args:
        groups: The groups of a training step.
        stop_id: Token that ends an answer.
        max_new_tokens: Length at which an answer ends without it.
    """
    return sum(
        len(trajectory.token_ids)
        for group in groups
        for trajectory in group.trajectories
        if len(trajectory.token_ids) < max_new_tokens
        and (not trajectory.token_ids or trajectory.token_ids[-1] != stop_id)
    )


def audit(account: TrainingAccount, wanted: Sequence[str]) -> TrainingAudit:
    """Compare what was trained with what was to be trained.

    Args:
        account: What the trainer wrote down.
        wanted: Name of each group that the run was to train on, once.
    """
    trained = Counter(account.groups)
    return TrainingAudit(
        lost_groups=sum(1 for name in wanted if name not in trained),
        duplicated_groups=sum((trained - Counter(wanted)).values()),
        aborted_tokens=account.unfinished_tokens,
    )
