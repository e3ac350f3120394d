"""The account of training is independent of the replay buffer, and can find it wrong."""

from __future__ import annotations

import pytest

from nemo_rl_rlix.errors import Segment
from nemo_rl_rlix.reference.audit import TrainingAccount, audit, unfinished_tokens
from nemo_rl_rlix.reference.trajectory import PromptGroup, Trajectory

STOP = 1


def group(*answers: tuple[int, ...], reason: str = "stop") -> PromptGroup:
    return PromptGroup(
        "v0-g0",
        0,
        tuple(
            Trajectory(f"t{i}", (5,), tokens, (-1.0,) * len(tokens), (Segment(0, 1),), reason, 0.0)
            for i, tokens in enumerate(answers)
        ),
    )


@pytest.mark.parametrize(
    ("answers", "cut_off"),
    [
        ([(7, 8, STOP)], 0),
        ([(7, 8, 9, 9)], 0),  # as long as it may be
        ([(7, 8)], 2),  # an abort that passes for finished
        ([(7, STOP, 8)], 3),
        ([(7, STOP), (7,), (8, 9)], 3),
        ([()], 0),
    ],
)
def test_answers_that_were_cut_off_show_whatever_their_label(
    answers: list[tuple[int, ...]], cut_off: int
) -> None:
    assert unfinished_tokens([group(*answers)], stop_id=STOP, max_new_tokens=4) == cut_off


@pytest.mark.parametrize(
    ("trained", "lost", "duplicated"),
    [
        (("a", "b", "c"), 0, 0),
        (("a", "c"), 1, 0),
        (("a", "b", "b", "c", "b"), 0, 2),
        (("a", "a"), 2, 1),
        (("a", "b", "c", "x"), 0, 1),
        ((), 3, 0),
    ],
)
def test_lost_and_duplicated_groups(trained: tuple[str, ...], lost: int, duplicated: int) -> None:
    result = audit(TrainingAccount(trained, 5), ["a", "b", "c"])
    assert (result.lost_groups, result.duplicated_groups) == (lost, duplicated)
    assert result.aborted_tokens == 5
