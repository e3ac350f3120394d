"""The base model: trained from scratch, in seconds, on answers that contain slips.

It first learns the task, then learns to be careless: with a chance of ``slip`` a
part of an answer is wrong. What comes out knows the right answer better than it
writes it, which is what reinforcement can sharpen.
"""

from __future__ import annotations

import hashlib
import logging
import os
import random
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_rl_rlix.reference.model import ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.optimizer import AdamW
from nemo_rl_rlix.reference.task import Problem, Task, Workload
from nemo_rl_rlix.reference.tokenizer import EOS_ID, PAD_ID, VOCAB_SIZE, encode

logger = logging.getLogger(__name__)

FORMAT = 1
"""Raised when the same settings begin to give other weights."""


@dataclass(frozen=True)
class WarmupConfig:
    """How the base model is made.

    Attributes:
        steps: Optimizer steps.
        batch: Answers of one step.
        lr: Peak learning rate of AdamW.
        slip: Chance that a part of an answer is wrong, once slips begin.
        clean: Share of the steps before slips begin.
        pool: Batches that are drawn together, so that answers of like length share one.
        seed: Seed of weights and answers.
    """

    steps: int = 500
    batch: int = 16
    lr: float = 4e-3
    slip: float = 0.3
    clean: float = 0.7
    pool: int = 8
    seed: int = 0


def model_config(task: Task, workload: Workload) -> ModelConfig:
    """Size of a model that can hold every prompt and response of the task."""
    longest = task.longest + 1
    return ModelConfig(
        vocab_size=VOCAB_SIZE, max_len=-(-max(longest, 1 + workload.max_new_tokens) // 8) * 8
    )


def warm_up(task: Task, model: ModelConfig, config: WarmupConfig) -> dict[str, Tensor]:
    """Train a base model from scratch.

    Returns:
        Name -> float32 tensor of the model's state dict, tied names included.
    """
    network = ReferenceModel(model, seed=config.seed)
    rng = random.Random(config.seed)
    optimizer = AdamW(list(network.parameters()), betas=(0.9, 0.98), weight_decay=0.01)
    batches: list[list[Problem]] = []
    for step in range(config.steps):
        if not batches:
            batches = _draw_batches(task, config, rng)
        slip = config.slip if step >= config.clean * config.steps else 0.0
        tokens, weights = _collate(task, batches.pop(), rng, slip)
        lr = config.lr * min(1.0, (step + 1) / 20) * (1 - 0.95 * step / config.steps)
        losses = F.cross_entropy(
            network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
        loss = (losses * weights.flatten()).sum() / weights.sum()
        loss.backward()
        optimizer.clip(1.0)
        optimizer.step(lr)
        optimizer.zero_gradients()
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def base_weights(
    task: Task, model: ModelConfig, config: WarmupConfig, cache_dir: Path
) -> dict[str, Tensor]:
    """Weights of the base model, from the cache if it has them.

    Args:
        task: The task.
        model: Size of the model.
        config: How the base model is made.
        cache_dir: Folder with one file for each combination of these; created if missing.
    """
    key = repr((FORMAT, task.fingerprint(), asdict(model), asdict(config), torch.__version__))
    path = cache_dir / f"base-{hashlib.sha256(key.encode()).hexdigest()[:16]}.pt"
    if path.is_file():
        loaded: dict[str, Tensor] = torch.load(path, weights_only=True)
        return loaded
    weights = warm_up(task, model, config)
    cache_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cache_dir, delete=False) as file:
        torch.save(weights, file)
    os.replace(file.name, path)  # Another process may be making the same file.
    logger.info("base model trained in %d steps, kept in %s", config.steps, path)
    return weights


def _draw_batches(task: Task, config: WarmupConfig, rng: random.Random) -> list[list[Problem]]:
    problems = sorted(
        (task.practice(rng) for _ in range(config.batch * config.pool)),
        key=lambda problem: len(problem.prompt) + len(problem.answer),
    )
    batches = [
        problems[first : first + config.batch] for first in range(0, len(problems), config.batch)
    ]
    rng.shuffle(batches)
    return batches


def _collate(
    task: Task, problems: list[Problem], rng: random.Random, slip: float
) -> tuple[Tensor, Tensor]:
    """Tokens [B, T] and loss weights [B, T - 1] of answers with slips, right-padded."""
    rows = []
    for problem in problems:
        answer = task.flawed_answer(problem, rng, slip) if slip else problem.answer
        rows.append((len(problem.prompt), (*encode(problem.prompt), *encode(answer), EOS_ID)))
    length = max(len(row) for _, row in rows)
    tokens = torch.full((len(rows), length), PAD_ID)
    weights = torch.zeros(len(rows), length - 1)
    for index, (prompt, row) in enumerate(rows):
        tokens[index, : len(row)] = torch.tensor(row)
        weights[index, prompt - 1 : len(row) - 1] = 1.0
    return tokens, weights
