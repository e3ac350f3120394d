"""The running sequences of an engine, packed into the first rows of its cache.

Every array has one row a slot, and rows 0 to n-1 are in use: a step works on
slices, gathers nothing, and a finished sequence's row is filled by the last one.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from nemo_rl_rlix.errors import PartialGeneration, Segment
from nemo_rl_rlix.reference.model import KVCache, ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.prefix import Key
from nemo_rl_rlix.shards.requests import GenerationRequest


@dataclass(eq=False, slots=True)
class Sequence:
    """A request inside the engine.

    Attributes:
        internal_id: The engine's own id; aborts go by it.
        request: What was asked for.
        seed: Seed of its sampler.
        stream: Whether each token is reported.
        token_ids: Tokens sampled by this dispatch.
        logprobs: Their log-probabilities.
        versions: ``[weights_version, tokens]`` runs.
        prefix: Entry of the prefix cache that it holds.
    """

    internal_id: str
    request: GenerationRequest
    seed: int
    stream: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    prefix: Key | None = None

    @property
    def known(self) -> list[int]:
        """Prompt, earlier dispatches' tokens, and this one's."""
        return [*self.request.prompt_ids, *self.request.prior.token_ids, *self.token_ids]

    @property
    def length(self) -> int:
        """Length of :attr:`known`."""
        request = self.request
        return len(request.prompt_ids) + len(request.prior.token_ids) + len(self.token_ids)

    def append(self, token: int, logprob: float, weights_version: int) -> None:
        """Record one sampled token."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if self.versions and self.versions[-1][0] == weights_version:
            self.versions[-1][1] += 1
        else:
            self.versions.append([weights_version, 1])

    def finish_reason(self, max_len: int) -> str | None:
        """``stop``, ``length``, or ``None`` while there is more to sample."""
        request = self.request
        newest = self.token_ids or request.prior.token_ids
        if newest and newest[-1] in request.stop_ids:
            return "stop"
        sampled = len(request.prior.token_ids) + len(self.token_ids)
        return "length" if sampled >= request.max_new_tokens or self.length >= max_len else None

    def partial(self) -> PartialGeneration:
        """What this dispatch has sampled so far."""
        return PartialGeneration(
            tuple(self.token_ids),
            tuple(self.logprobs),
            tuple(Segment(*run) for run in self.versions),
        )


class Batch:
    """Rows of the running sequences.

    Args:
        config: Size of the model.
        slots: Rows, which is the most sequences that run at once.
    """

    def __init__(self, config: ModelConfig, slots: int) -> None:
        self._slots = slots
        self.sequences: list[Sequence] = []
        self._tokens = torch.zeros(slots, dtype=torch.int64)
        self._positions = torch.zeros(slots, dtype=torch.int64)
        self._temperatures = torch.ones(slots, 1)
        self._uniforms = torch.zeros(slots, config.max_len + 1)
        self._rows = (self._tokens, self._positions, self._temperatures, self._uniforms)

    @property
    def full(self) -> bool:
        """Whether every row is taken."""
        return len(self.sequences) == self._slots

    def add(self, sequence: Sequence) -> int:
        """Take the next row for a sequence whose prefix is in the cache; returns the row."""
        row = len(self.sequences)
        known = sequence.known
        self._tokens[row] = known[-1]
        self._positions[row] = len(known) - 1
        self._temperatures[row] = sequence.request.temperature
        # One number a position, whatever else runs and however often it was preempted.
        draws = np.random.Generator(np.random.Philox(sequence.seed % 2**64))
        self._uniforms[row] = torch.from_numpy(
            draws.random(self._uniforms.shape[1], dtype=np.float32)
        )
        self.sequences.append(sequence)
        return row

    def remove(self, sequence: Sequence, cache: KVCache | None) -> None:
        """Give the row of ``sequence`` to the last one."""
        row, last = self.sequences.index(sequence), self.sequences.pop()
        if last is sequence:
            return
        self.sequences[row] = last
        for rows in self._rows:
            rows[row] = rows[len(self.sequences)]
        if cache is not None:
            cache.move(len(self.sequences), row, last.length)

    def advance(self, model: ReferenceModel, cache: KVCache) -> tuple[list[int], list[float]]:
        """Sample one token for every sequence.

        Returns:
            Token and natural-log probability of each row.
        """
        count = len(self.sequences)
        longest = max(sequence.length for sequence in self.sequences)
        positions = self._positions[:count]
        logits = model.decode(self._tokens[:count], positions, longest, cache)
        positions += 1
        uniforms = self._uniforms[:count].gather(1, positions[:, None])
        tokens, logprobs = sample(logits, self._temperatures[:count], uniforms)
        self._tokens[:count] = tokens
        return tokens.tolist(), logprobs.tolist()


def sample(logits: Tensor, temperatures: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Sample by inverting the cumulative distribution.

    Args:
        logits: [n, V].
        temperatures: [n, 1]; 0 is greedy, with log-probabilities at temperature 1.
        uniforms: [n, 1] in [0, 1).

    Returns:
        Tokens [n] and their log-probabilities [n] under the sampled distribution.
    """
    greedy = temperatures == 0
    logprobs = torch.log_softmax(logits / torch.where(greedy, 1.0, temperatures), dim=-1)
    cumulative = logprobs.exp().cumsum(-1)
    drawn = torch.searchsorted(cumulative, uniforms * cumulative[:, -1:], right=True)
    drawn.clamp_(max=logits.shape[-1] - 1)
    tokens = torch.where(greedy, logits.argmax(-1, keepdim=True), drawn)
    return tokens[:, 0], logprobs.gather(1, tokens)[:, 0]
