"""The reference task in NeMo RL's terms: tokenizer, data set and environment."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.environments.interfaces import EnvironmentInterface, EnvironmentReturn
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, Qwen2Config

from nemo_rl_rlix.nemo_rl.stand_in.config import StandIn
from nemo_rl_rlix.reference.tokenizer import EOS_ID, FIRST, LAST, PAD_ID, encode

TASK = "counting"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer with the ids of the reference one: a character each."""
    vocabulary = {chr(code): code - FIRST for code in range(FIRST, LAST + 1)}
    vocabulary |= {"<pad>": PAD_ID, "<eos>": EOS_ID}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="?"
    )


def write_model_folder(folder: Path) -> Path:
    """A folder that passes for a model's name, from which NeMo RL counts operations."""
    Qwen2Config(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=128,
    ).save_pretrained(folder)  # fmt: skip
    return folder


class CountingData(Dataset[dict[str, Any]]):
    """Problems of the reference task, each prompt once.

    Args:
        stand_in: Gives the task.
        count: Problems.
        first: Number of the first one, so that two sets differ.
    """

    def __init__(self, stand_in: StandIn, count: int, first: int = 0) -> None:
        unique: dict[str, str] = {}
        for prompt, answer in _problems(stand_in, first):
            unique.setdefault(prompt, answer)
            if len(unique) == count:
                break
        self.problems = list(unique.items())

    def __len__(self) -> int:
        return len(self.problems)

    def __getitem__(self, index: int) -> dict[str, Any]:
        prompt, answer = self.problems[index]
        ids = torch.tensor(encode(prompt))
        return {
            "message_log": [{"role": "user", "content": prompt, "token_ids": ids}],
            "length": len(ids),
            "extra_env_info": {"answer": answer},
            "loss_multiplier": 1.0,
            "idx": index,
            "task_name": TASK,
        }


def _problems(stand_in: StandIn, first: int) -> Iterator[tuple[str, str]]:
    task, step = stand_in.task, first
    while True:
        for index in range(stand_in.prompts_per_step):
            problem = task.problem(step, index)
            yield problem.prompt, problem.answer
        step += 1


class CountingEnvironment(EnvironmentInterface[dict[str, str]]):
    """Grades an answer by the share of its characters that are right."""

    def step(
        self, message_log_batch: list[Any], metadata: list[dict[str, str]]
    ) -> EnvironmentReturn[dict[str, str]]:
        """Grade one turn, which is the last."""
        rewards = [
            _grade(log[-1]["content"], info["answer"])
            for log, info in zip(message_log_batch, metadata, strict=True)
        ]
        count = len(rewards)
        return EnvironmentReturn(
            observations=[{"role": "environment", "content": ""}] * count,
            metadata=metadata,
            next_stop_strings=[None] * count,
            rewards=torch.tensor(rewards),
            terminateds=torch.ones(count),
            answers=[info["answer"] for info in metadata],
        )

    def global_post_process_and_metrics(self, batch: Any) -> tuple[Any, dict[str, float]]:
        """No further figures."""
        return batch, {}

    def shutdown(self) -> None:
        """Nothing to end."""


def make_environment() -> Any:
    """The environment's actor."""
    return ray.remote(num_cpus=0)(CountingEnvironment).remote()


def _grade(text: str, answer: str) -> float:
    right = sum(a == b for a, b in zip(text, answer, strict=False))
    return right / max(len(text), len(answer), 1)
