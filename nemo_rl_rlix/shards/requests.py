"""A generation request, its answer, and how the parts of a preempted one are joined."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nemo_rl_rlix.errors import PartialGeneration, Segment


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued.

    Attributes:
        request_id: Unique over the run; the same for every dispatch of the request.
        prompt_ids: Token ids of the prompt.
        max_new_tokens: Most tokens to sample, over all dispatches together.
        temperature: Softmax temperature; 0 is greedy.
        stop_ids: Token ids that end the answer (the stop token is kept).
        seed: Seed of the request's own sampler; ``None`` for the engine's.
        prior: Tokens sampled by earlier dispatches (policy ``resume``). The
            engine continues after them and returns only new tokens.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    temperature: float = 1.0
    stop_ids: tuple[int, ...] = ()
    seed: int | None = None
    prior: PartialGeneration = field(default_factory=PartialGeneration)


@dataclass(frozen=True)
class GenerationOutput:
    """A finished answer. An aborted request never becomes one.

    Attributes:
        request_id: The request's.
        token_ids: Sampled tokens, prompt excluded.
        logprobs: Natural-log probability of each sampled token, same length.
        segments: Weight version of each run of tokens; lengths sum to ``len(token_ids)``.
        finish_reason: ``stop`` or ``length``.
        dp_rank: Shard that finished it.
        dispatches: How often it was sent to a shard that accepted it (1 without preemption).
        tokens_kept: Tokens that earlier dispatches had sampled and that were kept.
        tokens_dropped: Tokens that earlier dispatches had sampled and that were thrown away.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    segments: tuple[Segment, ...]
    finish_reason: str
    dp_rank: int
    dispatches: int = 1
    tokens_kept: int = 0
    tokens_dropped: int = 0


def join_segments(first: tuple[Segment, ...], second: tuple[Segment, ...]) -> tuple[Segment, ...]:
    """Concatenate version runs, merging neighbours of the same version."""
    joined: list[Segment] = []
    for segment in (*first, *second):
        if segment.num_tokens == 0:
            continue
        if joined and joined[-1].weights_version == segment.weights_version:
            joined[-1] = replace(joined[-1], num_tokens=joined[-1].num_tokens + segment.num_tokens)
        else:
            joined.append(segment)
    return tuple(joined)


def join_partial(prior: PartialGeneration, new: PartialGeneration) -> PartialGeneration:
    """Append what one more dispatch produced to what the earlier ones had."""
    return PartialGeneration(
        token_ids=(*prior.token_ids, *new.token_ids),
        logprobs=(*prior.logprobs, *new.logprobs),
        segments=join_segments(prior.segments, new.segments),
    )


def join_output(prior: PartialGeneration, last: GenerationOutput) -> GenerationOutput:
    """Put the earlier dispatches' tokens in front of the last one's.

    Args:
        prior: Everything sampled before the last dispatch.
        last: Answer of the last dispatch, new tokens only.
    """
    return replace(
        last,
        token_ids=(*prior.token_ids, *last.token_ids),
        logprobs=(*prior.logprobs, *last.logprobs),
        segments=join_segments(prior.segments, last.segments),
        tokens_kept=len(prior.token_ids),
    )
