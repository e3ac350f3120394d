from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from trajectories import trajectory

from nemo_rl_rlix.reference.grpo import (
    Batch,
    GrpoConfig,
    collate,
    group_advantages,
    importance_weights,
    policy_loss,
    token_logprobs,
)
from nemo_rl_rlix.reference.tokenizer import PAD_ID
from nemo_rl_rlix.reference.trajectory import PromptGroup

rewards = st.lists(st.floats(0, 1), min_size=1, max_size=16)


@pytest.mark.parametrize(
    ("given_rewards", "expected"),
    [
        ([0.0, 1.0], [-1.0, 1.0]),
        ([1.0, 0.0, 0.0, 0.0], [math.sqrt(3), -1 / math.sqrt(3)] + [-1 / math.sqrt(3)] * 2),
        ([0.5] * 4, [0.0] * 4),
        ([0.3], [0.0]),
        ([0.5, 0.5 + 1e-6], [0.0, 0.0]),  # rounding is not a signal
    ],
)
def test_advantages(given_rewards: list[float], expected: list[float]) -> None:
    assert group_advantages(given_rewards) == pytest.approx(expected)


@given(rewards)
def test_advantages_are_relative_to_the_group(values: list[float]) -> None:
    advantages = group_advantages(values)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-6)
    assert all(math.isfinite(advantage) for advantage in advantages)
    shifted = group_advantages([value + 3.0 for value in values])
    assert shifted == pytest.approx(advantages, abs=1e-4)


def test_importance_is_per_token_and_truncated() -> None:
    # Three tokens of one response, sampled by three versions of the policy.
    current, behaviour = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.5, -6.0])
    weights = importance_weights(current, behaviour, 2.0)
    assert weights.tolist() == pytest.approx([1.0, math.exp(0.5), 2.0])


def batch_of(advantages: list[float], behaviour: Tensor) -> Batch:
    return Batch(
        tokens=torch.zeros(len(advantages), behaviour.shape[1] + 1, dtype=torch.int64),
        mask=torch.ones_like(behaviour),
        behaviour=behaviour,
        advantages=torch.tensor(advantages),
    )


def gradient(current: Tensor, before: Tensor, batch: Batch, config: GrpoConfig) -> Tensor:
    current = current.clone().requires_grad_()
    policy_loss(current, before, batch, config, float(batch.mask.sum())).loss.backward()
    assert current.grad is not None
    return current.grad


def test_on_policy_gradient_is_the_advantage() -> None:
    logprobs = torch.full((2, 2), -1.0)
    found = gradient(logprobs, logprobs, batch_of([1.0, -2.0], logprobs), GrpoConfig())
    assert found.tolist() == [[-0.25, -0.25], [0.5, 0.5]]


def test_off_policy_gradient_is_weighted_up_to_the_cap() -> None:
    now = torch.full((1, 3), -1.0)
    batch = batch_of([1.0], torch.tensor([[-1.0, -1.5, -4.0]]))
    found = gradient(now, now, batch, GrpoConfig(importance_cap=2.0))
    assert (-3 * found).tolist()[0] == pytest.approx([1.0, math.exp(0.5), 2.0])


@pytest.mark.parametrize(
    ("ratio", "advantage", "moves"),
    [(1.1, 1.0, True), (1.5, 1.0, False), (0.5, 1.0, True), (0.5, -1.0, False), (1.5, -1.0, True)],
)
def test_the_clip_stops_only_what_went_far_enough(
    ratio: float, advantage: float, moves: bool
) -> None:
    before = torch.full((1, 1), -1.0)
    found = gradient(before + math.log(ratio), before, batch_of([advantage], before), GrpoConfig())
    assert bool(found.abs().sum() > 0) == moves


def test_padding_and_zero_advantage_change_nothing() -> None:
    logprobs = torch.full((1, 3), -1.0)
    batch = batch_of([1.0], logprobs)
    masked = replace(batch, mask=torch.tensor([[1.0, 1.0, 0.0]]))
    assert gradient(logprobs, logprobs, masked, GrpoConfig())[0, 2] == 0
    assert not gradient(logprobs, logprobs, batch, GrpoConfig(advantage_scale=0.0)).any()
    assert not gradient(logprobs, logprobs, batch_of([0.0], logprobs), GrpoConfig()).any()


def test_batches_hold_each_token_at_its_place() -> None:
    group = PromptGroup(
        "g",
        0,
        (
            trajectory("long", 1.0, tokens=(5, 6, 7, 96), logprobs=(-0.1, -0.2, -0.3, -0.4)),
            trajectory("short", 0.0, tokens=(8, 96), logprobs=(-0.5, -0.6)),
        ),
    )
    (both,) = collate([group], 2)
    assert both.tokens.tolist() == [
        [16, 11, 29, 8, 96, PAD_ID, PAD_ID],
        [16, 11, 29, 5, 6, 7, 96],
    ]
    assert both.mask.tolist() == [[0, 0, 1, 1, 0, 0], [0, 0, 1, 1, 1, 1]]
    assert both.behaviour[0].tolist() == pytest.approx([0, 0, -0.5, -0.6, 0, 0])
    assert both.behaviour[1].tolist() == pytest.approx([0, 0, -0.1, -0.2, -0.3, -0.4])
    assert both.advantages.tolist() == [-1.0, 1.0]
    assert [b.tokens.shape for b in collate([group], 1)] == [(1, 5), (1, 7)]


def test_logprobs_are_those_of_the_sampler() -> None:
    logits = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(0))
    tokens = torch.tensor([[0, 1, 2, 3], [4, 3, 2, 1]])
    found = token_logprobs(logits, tokens, 0.7)
    assert found.shape == (2, 3)
    expected = torch.log_softmax(logits[1, 2] / 0.7, -1)[1]
    assert float(found[1, 2]) == pytest.approx(float(expected))
