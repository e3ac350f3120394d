"""The mathematics of GRPO on trajectories of several policies. No state, no device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_rl_rlix.reference.tokenizer import PAD_ID
from nemo_rl_rlix.reference.trajectory import PromptGroup

STD_FLOOR = 1e-4


@dataclass(frozen=True)
class GrpoConfig:
    """How the policy is updated.

    Attributes:
        lr: Learning rate of AdamW.
        lr_warmup_steps: Steps over which the learning rate rises to ``lr``.
        betas: Betas of AdamW.
        weight_decay: Weight decay of AdamW.
        max_grad_norm: Gradients are scaled down to this norm.
        updates_per_step: Optimizer steps on each batch.
        micro_batch: Trajectories in one forward pass.
        clip_low: The ratio to the policy before the step is clipped at ``1 - clip_low``.
        clip_high: And at ``1 + clip_high``.
        importance_cap: Truncates the ratio of that policy to the one that sampled.
        advantage_scale: Multiplies advantages; 0 turns learning off.
        token_s: Least seconds for each token of a batch that a step occupies the
            logical GPU; see ``EngineConfig.step_s``.
    """

    lr: float = 8e-4
    lr_warmup_steps: int = 3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    updates_per_step: int = 1
    micro_batch: int = 16
    clip_low: float = 0.2
    clip_high: float = 0.28
    importance_cap: float = 2.0
    advantage_scale: float = 1.0
    token_s: float = 0.0


@dataclass(frozen=True)
class Batch:
    """Trajectories, right-padded. Column t of the [B, T - 1] tensors speaks of token t + 1.

    Attributes:
        tokens: [B, T] int64, prompt and response.
        mask: [B, T - 1] float32, 1 where token t + 1 was sampled.
        behaviour: [B, T - 1] float32, its log-probability when it was sampled.
        advantages: [B] float32.
    """

    tokens: Tensor
    mask: Tensor
    behaviour: Tensor
    advantages: Tensor


@dataclass(frozen=True)
class LossParts:
    """Loss of a batch, and sums over its sampled tokens that describe it.

    Attributes:
        loss: Scalar; the sum of the tokens' losses over ``normaliser``.
        kl: Sum of the estimate ``r - 1 - log r`` of KL(sampling policy, current policy),
            r the ratio of the latter to the former.
        ratio: Sum of the ratio of the policy before the step to the one that sampled.
        ratio_max: Largest such ratio.
        capped: Tokens whose ratio was truncated.
        clipped: Tokens whose loss was clipped.
    """

    loss: Tensor
    kl: float
    ratio: float
    ratio_max: float
    capped: float
    clipped: float


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Standard scores of the rewards of one group; all 0 where the rewards are equal."""
    mean = sum(rewards) / len(rewards)
    std = (sum((reward - mean) ** 2 for reward in rewards) / len(rewards)) ** 0.5
    if std < STD_FLOOR:
        return [0.0] * len(rewards)
    return [(reward - mean) / std for reward in rewards]


def importance_weights(current: Tensor, behaviour: Tensor, cap: float) -> Tensor:
    """Truncated ratio of a policy's token probabilities to those at sampling time.

    Each token has its own behaviour log-probability, so a response whose segments
    come from several versions needs nothing more.

    Args:
        current: Log-probabilities under the policy, any shape.
        behaviour: Log-probabilities when the tokens were sampled, same shape.
        cap: Largest weight; bounds the variance at the price of a bias.
    """
    return (current - behaviour).exp().clamp(max=cap)


def policy_loss(
    current: Tensor,
    before: Tensor,
    batch: Batch,
    config: GrpoConfig,
    normaliser: float,
) -> LossParts:
    """Clipped surrogate, weighted by the truncated importance of each token.

    The clip is around the policy before the step, the weight corrects from the
    sampling policy to that one (decoupled PPO, Hilton et al. 2022).

    Args:
        current: Log-probabilities [B, T - 1] under the policy, with gradient.
        before: The same under the policy before this step, without.
        batch: The trajectories.
        config: Clip range and cap.
        normaliser: Sampled tokens of the whole step.
    """
    advantages = batch.advantages[:, None] * config.advantage_scale
    weights = importance_weights(before, batch.behaviour, config.importance_cap)
    ratio = (current - before).exp()
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    surrogate = torch.minimum(ratio * advantages, clipped * advantages)
    loss = -(weights * surrogate * batch.mask).sum() / normaliser
    with torch.no_grad():
        drift = (current - batch.behaviour) * batch.mask
        sampling_ratio = (before - batch.behaviour).exp() * batch.mask
        return LossParts(
            loss=loss,
            kl=float((drift.exp() - 1 - drift).sum()),
            ratio=float(sampling_ratio.sum()),
            ratio_max=float(sampling_ratio.max()),
            capped=float((sampling_ratio > config.importance_cap).sum()),
            clipped=float(((surrogate < ratio * advantages) * batch.mask).sum()),
        )


def token_logprobs(logits: Tensor, tokens: Tensor, temperature: float) -> Tensor:
    """Log-probabilities [B, T - 1] of tokens 1 to T - 1, as they are sampled.

    Args:
        logits: [B, T - 1, V].
        tokens: [B, T].
        temperature: Sampling temperature (> 0).
    """
    logprobs = torch.log_softmax(logits / temperature, dim=-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def collate(groups: Sequence[PromptGroup], micro_batch: int) -> Iterator[Batch]:
    """Yield padded batches of at most ``micro_batch`` trajectories of like length."""
    rows = [
        (trajectory, advantage)
        for group in groups
        for trajectory, advantage in zip(
            group.trajectories,
            group_advantages([trajectory.reward for trajectory in group.trajectories]),
            strict=True,
        )
    ]
    rows.sort(key=lambda row: len(row[0].prompt_ids) + len(row[0].token_ids))
    for first in range(0, len(rows), micro_batch):
        chunk = rows[first : first + micro_batch]
        longest = chunk[-1][0]
        length = len(longest.prompt_ids) + len(longest.token_ids)
        tokens = torch.full((len(chunk), length), PAD_ID)
        mask = torch.zeros(len(chunk), length - 1)
        behaviour = torch.zeros(len(chunk), length - 1)
        for index, (trajectory, _) in enumerate(chunk):
            start, end = len(trajectory.prompt_ids), len(trajectory.token_ids)
            end += start
            tokens[index, :end] = torch.tensor((*trajectory.prompt_ids, *trajectory.token_ids))
            mask[index, start - 1 : end - 1] = 1.0
            behaviour[index, start - 1 : end - 1] = torch.tensor(trajectory.logprobs)
        yield Batch(tokens, mask, behaviour, torch.tensor([advantage for _, advantage in chunk]))
