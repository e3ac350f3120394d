"""Problems with an answer that can be checked, and what checking one costs.

The generated task is counting in steps, modulo ten: ``e7+3=`` asks for five (the
fifth letter) additions of 3 to 7, and its answer ``e0d3c6b9a2`` names each sum and
how many are still to come. Its length is long-tailed, as that of reasoning is.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.reference.tokenizer import encode

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_CHARS = 200


@dataclass(frozen=True)
class Workload:
    """What one training step asks of generation and of the verifier.

    Attributes:
        prompts_per_step: Prompt groups of one step.
        generations_per_prompt: Trajectories of one group.
        max_new_tokens: Most tokens of a response, its end included.
        temperature: Sampling temperature.
        median_terms: Median length of a generated problem, in additions.
        terms_sigma: Sigma of the logarithm of that length.
        verifier_median_s: Median seconds that checking a trajectory takes, off the GPU,
            as a sandboxed grader or a tool call does; 0 for none.
        verifier_sigma: Sigma of the logarithm of these seconds.
        verifier_max_s: Longest that the verifier takes, in seconds.
    """

    prompts_per_step: int = 8
    generations_per_prompt: int = 8
    max_new_tokens: int = 56
    temperature: float = 1.0
    median_terms: float = 5.0
    terms_sigma: float = 0.8
    verifier_median_s: float = 0.4
    verifier_sigma: float = 0.6
    verifier_max_s: float = 3.0

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories of one training step."""
        return self.prompts_per_step * self.generations_per_prompt


@dataclass(frozen=True)
class Problem:
    """A prompt and its only right answer.

    Attributes:
        prompt: Text given to the model.
        answer: Text that it should write before it ends.
        stride: Characters that are graded as one: right together or wrong.
    """

    prompt: str
    answer: str
    stride: int = 1


class Task(Protocol):
    """A source of problems. Problems are a function of the seed and the place asked for."""

    def problem(self, step: int, index: int) -> Problem:
        """Problem of prompt group ``index`` of training step ``step``."""
        ...

    def practice(self, rng: random.Random) -> Problem:
        """Return a problem to warm up on."""
        ...

    def flawed_answer(self, problem: Problem, rng: random.Random, slip: float) -> str:
        """Return an answer as a careless pupil writes it: each part goes wrong with ``slip``."""
        ...

    def fingerprint(self) -> str:
        """Text that is equal for equal tasks, the seed of the problems left out."""
        ...

    @property
    def longest(self) -> int:
        """Characters of the longest prompt and answer together."""
        ...


class CountingTask:
    """Counting in steps, modulo ten; see the module.

    Args:
        workload: Gives the length of problems and how many a step has.
        seed: Seed of the problems.
    """

    def __init__(self, workload: Workload, seed: int) -> None:
        self._median, self._sigma = workload.median_terms, workload.terms_sigma
        self._per_step = workload.prompts_per_step
        self._seed = seed

    @property
    def longest(self) -> int:
        """Characters of the longest prompt and answer together."""
        return len("z0+1=") + 2 * len(LETTERS)

    def fingerprint(self) -> str:
        """Text that is equal for equal tasks."""
        return f"counting {self._median} {self._sigma}"

    def problem(self, step: int, index: int) -> Problem:
        """Problem of a prompt group.

        The groups of a step are spread evenly over the quantiles of the length, so
        that every step has its long ones and mean rewards of steps compare.
        """
        order = random.Random(f"{self._seed}/{step}")
        place = order.sample(range(self._per_step), self._per_step)[index % self._per_step]
        rng = random.Random(f"{self._seed}/{step}/{index}")
        return self._make((place + rng.random()) / self._per_step, rng)

    def practice(self, rng: random.Random) -> Problem:
        """Return a problem to warm up on."""
        return self._make(rng.random(), rng)

    def _make(self, quantile: float, rng: random.Random) -> Problem:
        normal = NormalDist().inv_cdf(min(max(quantile, 1e-6), 1 - 1e-6))
        terms = round(self._median * math.exp(self._sigma * normal))
        terms = min(max(terms, 1), len(LETTERS))
        start, stride = rng.randrange(10), rng.randint(1, 3)
        prompt = f"{LETTERS[terms - 1]}{start}+{stride}="
        return Problem(prompt, _count(terms, start, stride), stride=2)

    def flawed_answer(self, problem: Problem, rng: random.Random, slip: float) -> str:
        """Return the answer with slips; the count goes on from the wrong sum."""
        terms = LETTERS.index(problem.prompt[0]) + 1
        return _count(terms, int(problem.prompt[1]), int(problem.prompt[3]), rng, slip)


def _count(
    terms: int, value: int, stride: int, rng: random.Random | None = None, slip: float = 0.0
) -> str:
    parts = []
    for left in range(terms, 0, -1):
        value = (value + stride) % 10
        if rng is not None and rng.random() < slip:
            value = rng.randrange(10)
        parts.append(f"{LETTERS[left - 1]}{value}")
    return "".join(parts)


class FileTask:
    """Problems from a file. All are used before one comes again.

    Args:
        problems: The problems, at least one.
        workload: Gives how many problems a step has.
        seed: Seed of their order.
    """

    def __init__(self, problems: Sequence[Problem], workload: Workload, seed: int) -> None:
        self._problems = tuple(problems)
        self._per_step = workload.prompts_per_step
        self._seed = seed

    @property
    def longest(self) -> int:
        """Characters of the longest prompt and answer together."""
        return max(len(problem.prompt) + len(problem.answer) for problem in self._problems)

    def fingerprint(self) -> str:
        """Text that is equal for equal problems."""
        return repr(self._problems)

    def problem(self, step: int, index: int) -> Problem:
        """Problem of a prompt group; each round through the file has an order of its own."""
        size = len(self._problems)
        epoch, place = divmod(step * self._per_step + index, size)
        order = random.Random(f"{self._seed}/{epoch}").sample(range(size), size)
        return self._problems[order[place]]

    def practice(self, rng: random.Random) -> Problem:
        """Return a problem to warm up on."""
        return rng.choice(self._problems)

    def flawed_answer(self, problem: Problem, rng: random.Random, slip: float) -> str:
        """Return the answer with slips: a character is replaced by another of the answers'."""
        other = rng.choice(self._problems).answer
        return "".join(
            rng.choice(other) if rng.random() < slip else character for character in problem.answer
        )


def load_problems(path: Path) -> tuple[Problem, ...]:
    """Read JSON lines of ``{"prompt": ..., "answer": ...}``; empty lines are skipped.

    A mark at the start, as Windows editors write it, and their line ends are borne.

    Raises:
        SettingError: Names the file, the line and what is wrong with it.
    """
    problems = []
    try:
        # Not splitlines: a JSON text may hold other line separators than these.
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(
            "--data", str(path), f"it cannot be read: {error}", "Name a readable UTF-8 text file"
        ) from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            problems.append(_parse(line))
        except ValueError as error:
            raise SettingError(
                "--data",
                f"{path}:{number}",
                str(error),
                'Write one {"prompt": "2+3=", "answer": "5"} a line',
            ) from error
    if not problems:
        raise SettingError(
            "--data",
            str(path),
            "it holds no problem",
            'Write one {"prompt": "2+3=", "answer": "5"} a line',
        )
    return tuple(problems)


def _parse(line: str) -> Problem:
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("the line is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f"the line holds a {type(row).__name__}, not an object")
    texts = []
    for key in ("prompt", "answer"):
        text = row.get(key)
        if not isinstance(text, str) or not text:
            raise ValueError(f"{key!r} must be a text that is not empty, got {text!r}")
        if len(text) > MAX_CHARS:
            raise ValueError(
                f"{key!r} has {len(text)} characters, at most {MAX_CHARS} are possible"
            )
        encode(text)
        texts.append(text)
    prompt, answer = texts
    return Problem(prompt, answer)


def make_task(data: Path | None, workload: Workload, seed: int) -> Task:
    """Return the generated task, or the one in the file ``data``.

    Raises:
        SettingError: The file cannot be used.
    """
    if data is None:
        return CountingTask(workload, seed)
    problems = load_problems(data)
    longest = max(len(problem.answer) for problem in problems)
    if longest + 1 > workload.max_new_tokens:
        raise SettingError(
            "--data",
            str(data),
            f"its longest answer has {longest} characters and its end, but"
            f" max_new_tokens={workload.max_new_tokens}",
            f"Shorten that answer to {workload.max_new_tokens - 1} characters or leave it out",
        )
    return FileTask(problems, workload, seed)


def reward(problem: Problem, response: str, *, finished: bool) -> float:
    """Share of the answer that the response gets right before its first mistake.

    Args:
        problem: What was asked.
        response: Text of the response.
        finished: Whether the response came to an end by itself.

    Returns:
        Right parts in front of the first wrong one, plus one for ending exactly
        there, over all parts plus one: 1.0 only for the right answer.
    """
    answer, stride = problem.answer, problem.stride
    parts = -(-len(answer) // stride)
    right = 0
    while right < parts:
        part = slice(right * stride, (right + 1) * stride)
        if response[part] != answer[part]:
            break
        right += 1
    return (right + (finished and response == answer)) / (parts + 1)


def verifier_seconds(workload: Workload, seed: int, trajectory_id: str) -> float:
    """Seconds that checking a trajectory takes: log-normal, the same in every run."""
    if workload.verifier_median_s <= 0:
        return 0.0
    spread = random.Random(f"{seed}/{trajectory_id}").gauss(0.0, workload.verifier_sigma)
    return min(workload.verifier_median_s * math.exp(spread), workload.verifier_max_s)
