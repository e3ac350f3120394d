"""From the outputs of an engine to tokens with the versions they were sampled from.

An aborted request does not raise in vLLM: it ends as an output with finish reason
``abort`` and the text so far. Here it becomes a typed error, never a sample.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_rlix.errors import PartialGeneration, Segment, ShardPreemptedError
from nemo_rl_rlix.shards.requests import join_segments

ABORT = "abort"


@dataclass
class TokenRecord:
    """What one request has sampled so far.

    Attributes:
        token_ids: Sampled tokens.
        logprobs: Log probability of each, ``None`` where the engine was not asked.
        segments: Weight version of each run of tokens.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    segments: tuple[Segment, ...] = ()

    def observe(self, completion: Any, weights_version: int, *, delta: bool) -> None:
        """Take note of an output.

        Args:
            completion: vLLM's ``CompletionOutput``.
            weights_version: Version that the engine holds now. The engine sends all
                outputs of earlier steps before it acknowledges a pause, so tokens that
                are new here are of this version.
            delta: Whether it brings only what is new, not everything so far.
        """
        tokens, logprobs = list(completion.token_ids), completion.logprobs
        known = 0 if delta else len(self.token_ids)
        self.token_ids += tokens[known:]
        for place in range(known, len(tokens)):
            entry = logprobs[place] if logprobs and place < len(logprobs) else None
            found = entry.get(tokens[place]) if entry else None
            self.logprobs.append(None if found is None else float(found.logprob))
        new = Segment(weights_version, len(tokens) - known)
        self.segments = join_segments(self.segments, (new,))

    def partial(self) -> PartialGeneration:
        """The tokens as far as they can be continued.

        Without a log probability for each token the request has to start again, since
        the trainer needs one for every token.
        """
        if not self.token_ids or any(value is None for value in self.logprobs):
            return PartialGeneration()
        return PartialGeneration(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(value for value in self.logprobs if value is not None),
            segments=self.segments,
        )


def raise_if_aborted(output: Any, record: TokenRecord, *, dp_rank: int, epoch: int) -> None:
    """Turn an abort into the error that sends the request elsewhere.

    Args:
        output: vLLM's ``RequestOutput``.
        record: What the request had sampled.
        dp_rank: Rank of the shard.
        epoch: Routing epoch at which the shard closed.

    Raises:
        ShardPreemptedError: The output is an abort. With several completions for a
            request nothing is kept: there is no one sequence to go on from.
    """
    completions: Sequence[Any] = output.outputs
    if not any(completion.finish_reason == ABORT for completion in completions):
        return
    partial = record.partial() if len(completions) == 1 else PartialGeneration()
    raise ShardPreemptedError(dp_rank, partial, epoch)
