"""Requests of NeMo RL through preemptions: the answer is that of an undisturbed worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import PartialGeneration, Segment, ShardPreemptedError
from nemo_rl_rlix.nemo_rl.samples import (
    MAX_NEW_TOKENS_KEY,
    SEGMENTS_KEY,
    OpaqueSample,
    TokenSample,
    can_resume,
    make_sample,
)
from nemo_rl_rlix.settings import PreemptedRequests, RoutingSettings
from nemo_rl_rlix.shards.redispatch import DispatchStats, generate
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.shards.router import ShardRouter
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot

STOP = 7
PAD = 99
CONFIG: dict[str, Any] = {
    "max_new_tokens": 12,
    "vllm_cfg": {"max_model_len": 20},
    "stop_token_ids": [STOP],
}


def request(*prompt: int, **more: Any) -> dict[str, Any]:
    padded = [*prompt, PAD, PAD]
    return {
        "input_ids": torch.tensor([padded]),
        "input_lengths": torch.tensor([len(prompt)]),
        "stop_strings": [None],
        **more,
    }


class Worker:
    """Samples the sum of what it sees; as NeMo RL's, it knows only prompt and budget."""

    def __init__(self, cuts: list[int | None]) -> None:
        self.cuts = cuts
        self.version = 0

    def __call__(self, data: dict[str, Any]) -> dict[str, Any]:
        length = int(data["input_lengths"][0])
        seen = data["input_ids"][0, :length].tolist()
        room = min(CONFIG["max_new_tokens"], CONFIG["vllm_cfg"]["max_model_len"] - length)
        budget = min(room, *data.get(MAX_NEW_TOKENS_KEY, [room]))
        cut = self.cuts.pop(0) if self.cuts else None
        version, self.version = self.version, self.version + 1
        new: list[int] = []
        while len(new) < budget and STOP not in new:
            if cut is not None and len(new) >= cut:
                break
            new.append(sum([*seen, *new]) % 11)
        logprobs = [-token / 16 for token in new]
        if cut is not None and len(new) <= cut:
            partial = PartialGeneration(
                tuple(new), tuple(logprobs), (Segment(version, len(new)),) if new else ()
            )
            raise ShardPreemptedError(0, partial, epoch=1)
        return {
            "output_ids": torch.tensor([[*seen, *new]]),
            "logprobs": torch.tensor([[0.0] * length + logprobs]),
            "generation_lengths": torch.tensor([len(new)]),
            "unpadded_sequence_lengths": torch.tensor([length + len(new)]),
            "truncated": torch.tensor([STOP not in new and bool(budget)]),
            SEGMENTS_KEY: [(Segment(version, len(new)),)],
        }


class Always:
    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        return RoutingSnapshot(epoch + 1, states={0: "ACTIVE"})

    def suspect(self, dp_rank: int) -> None:
        raise AssertionError("nothing is wrong with the shard")


def ask(data: dict[str, Any], worker: Worker, stats: DispatchStats | None = None) -> dict[str, Any]:
    sample = make_sample("generate_async", data, CONFIG, PreemptedRequests.RESUME)
    last = None

    async def send(rank: int, part: GenerationRequest) -> GenerationOutput:
        nonlocal last
        last = worker(sample.data(part))
        return sample.output(last, rank)

    async def run() -> dict[str, Any]:
        router = ShardRouter(Always(), RoutingSettings(long_poll_s=0.05), name="test")
        try:
            output = await generate(
                sample.request,
                router=router,
                send=send,
                policy=sample.policy,
                stats=stats or DispatchStats(),
                backoff_s=0.0,
            )
        finally:
            router.close()
        answer: dict[str, Any] = sample.answer(output, last)
        return answer

    return asyncio.run(run())


@given(
    prompt=st.lists(st.integers(0, 10), min_size=1, max_size=14),
    cuts=st.lists(st.integers(0, 13), max_size=3),
)
def test_a_preempted_answer_is_the_undisturbed_one(prompt: list[int], cuts: list[int]) -> None:
    plain = ask(request(*prompt), Worker([]))
    resumed = ask(request(*prompt), Worker(list(cuts)))
    for key in plain:
        if key != SEGMENTS_KEY:
            assert torch.equal(plain[key], resumed[key]), key
            assert plain[key].dtype == resumed[key].dtype, key
    kept = sum(segment.num_tokens for segment in resumed[SEGMENTS_KEY][0])
    assert kept == int(plain["generation_lengths"][0])


def test_versions_of_the_parts_are_told_apart() -> None:
    answer = ask(request(1, 2), Worker([3, 2]))
    assert [s.weights_version for s in answer[SEGMENTS_KEY][0]] == [0, 1, 2]
    assert [s.num_tokens for s in answer[SEGMENTS_KEY][0]][:2] == [3, 2]


def test_an_undisturbed_answer_is_passed_on_as_it_is() -> None:
    data = request(1, 2)
    sample = TokenSample(data, CONFIG)
    assert sample.data(sample.request) is data
    answer = Worker([])(data)
    assert sample.answer(sample.output(answer, 0), answer) is answer


def test_an_abort_after_the_last_token_needs_no_further_dispatch() -> None:
    plain = ask(request(3, 1), Worker([]))
    length = int(plain["generation_lengths"][0])
    stats = DispatchStats()
    answer = ask(request(3, 1), Worker([length]), stats)
    assert stats.counts.dispatched == 1
    assert torch.equal(answer["output_ids"], plain["output_ids"])
    assert torch.equal(answer["truncated"], plain["truncated"])


def test_the_request_itself_is_not_changed() -> None:
    data = request(1, 2)
    before = {key: value.clone() for key, value in data.items() if key != "stop_strings"}
    ask(data, Worker([2]))
    assert set(data) == {"input_ids", "input_lengths", "stop_strings"}
    assert all(torch.equal(data[key], value) for key, value in before.items())


@pytest.mark.parametrize(
    ("method", "data", "config"),
    [
        ("generate_text_async", request(1), {}),
        ("generate_async", request(1, stop_strings=[["</s>"]]), {}),
        ("generate_async", request(1, vllm_images=[["picture"]]), {}),
        ("generate_async", request(1), {"stop_strings": ["END"]}),
        ("generate_async", request(1), {"bad_words": ["no"]}),
        ("generate_async", request(1), {"vllm_kwargs": {"enable_return_routed_experts": True}}),
    ],
)
def test_what_cannot_be_continued_starts_again(
    method: str, data: dict[str, Any], config: dict[str, Any]
) -> None:
    whole = {**CONFIG, **config}
    assert not can_resume(method, data, whole)
    sample = make_sample(method, data, whole, PreemptedRequests.RESUME)
    assert isinstance(sample, OpaqueSample)
    assert sample.policy is PreemptedRequests.RESTART
    assert sample.data(sample.request) is data
    answer = {"texts": ["x"]}
    assert sample.answer(sample.output(answer, 1), answer) is answer


def test_plain_token_requests_can_be_continued_if_the_setting_says_so() -> None:
    assert can_resume("generate_async", request(1), CONFIG)
    restart = make_sample("generate_async", request(1), CONFIG, PreemptedRequests.RESTART)
    assert isinstance(restart, OpaqueSample)
