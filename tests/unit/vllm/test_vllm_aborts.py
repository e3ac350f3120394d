"""Aborted outputs become typed errors with what can be continued, never samples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import PartialGeneration, Segment, ShardPreemptedError
from nemo_rl_rlix.vllm.aborts import TokenRecord, raise_if_aborted


def completion(tokens: list[int], reason: str | None = None, *, logprobs: bool = True) -> Any:
    entries = [{token: SimpleNamespace(logprob=-token / 8)} for token in tokens]
    return SimpleNamespace(
        token_ids=tokens, logprobs=entries if logprobs else None, finish_reason=reason
    )


def outputs(*completions: Any) -> Any:
    return SimpleNamespace(outputs=list(completions))


@pytest.mark.parametrize("delta", [True, False])
def test_tokens_keep_the_version_they_were_sampled_from(delta: bool) -> None:
    record = TokenRecord()
    steps = [([1], 4), ([1, 2], 4), ([1, 2, 3], 5), ([1, 2, 3], 5)]
    seen = 0
    for tokens, version in steps:
        record.observe(completion(tokens[seen:] if delta else tokens), version, delta=delta)
        seen = len(tokens)
    partial = record.partial()
    assert partial.token_ids == (1, 2, 3)
    assert partial.logprobs == (-1 / 8, -2 / 8, -3 / 8)
    assert partial.segments == (Segment(4, 2), Segment(5, 1))


def test_an_abort_raises_with_the_partial() -> None:
    record = TokenRecord()
    last = completion([1, 2, 3, 4, 5, 6, 7], "abort")
    record.observe(last, 3, delta=False)
    with pytest.raises(ShardPreemptedError) as caught:
        raise_if_aborted(outputs(last), record, dp_rank=2, epoch=9)
    assert (caught.value.dp_rank, caught.value.epoch) == (2, 9)
    assert caught.value.partial.token_ids == (1, 2, 3, 4, 5, 6, 7)


@pytest.mark.parametrize("reason", [None, "stop", "length"])
def test_other_ends_pass(reason: str | None) -> None:
    raise_if_aborted(outputs(completion([1], reason)), TokenRecord(), dp_rank=0, epoch=0)


@pytest.mark.parametrize(
    "aborted",
    [
        [completion([], "abort")],
        [completion([1, 2], "abort", logprobs=False)],
        [completion([1], "abort"), completion([2], "abort")],
    ],
    ids=["nothing sampled", "no logprobs", "two completions"],
)
def test_what_cannot_be_continued_starts_again(aborted: list[Any]) -> None:
    record = TokenRecord()
    record.observe(aborted[0], 1, delta=False)
    with pytest.raises(ShardPreemptedError) as caught:
        raise_if_aborted(outputs(*aborted), record, dp_rank=0, epoch=0)
    assert caught.value.partial == PartialGeneration()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4)), max_size=12))
def test_segments_always_add_up(steps: list[tuple[int, int]]) -> None:
    record, tokens = TokenRecord(), []
    for version, count in steps:
        tokens += [len(tokens) + 1] * count
        record.observe(completion(list(tokens)), version, delta=False)
    partial = record.partial()
    assert list(partial.token_ids) == tokens
    assert sum(segment.num_tokens for segment in partial.segments) == len(tokens)
    assert len(partial.logprobs) == len(tokens)
