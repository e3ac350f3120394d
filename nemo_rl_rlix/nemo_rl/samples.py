"""A request of NeMo RL and its answer, as the core dispatches them. Pure, over tensors.

A request is a mapping with one row: ``input_ids`` (1, length), ``input_lengths`` (1,) and
``stop_strings``. Its answer is one with ``output_ids`` and ``logprobs`` (1, length),
``generation_lengths``, ``unpadded_sequence_lengths`` and ``truncated`` (1,).
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from nemo_rl_rlix.settings import PreemptedRequests
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest

MAX_NEW_TOKENS_KEY = "rlix_max_new_tokens"
"""In a request: tokens it may still sample, a list of one number."""

SEGMENTS_KEY = "rlix_segments"
"""In an answer: ``[segments]``, the weight version of each run of its tokens."""

TOKEN_METHOD = "generate_async"
PLAIN_KEYS = frozenset({"input_ids", "input_lengths", "stop_strings"})

Data = Any
"""A ``BatchedDataDict`` of one row; only its mapping is used here."""


class Sample(Protocol):
    """One request through all its dispatches."""

    policy: PreemptedRequests
    request: GenerationRequest

    def data(self, request: GenerationRequest) -> Data:
        """What a worker is sent for one dispatch."""
        ...

    def output(self, answer: Data, dp_rank: int) -> GenerationOutput:
        """A worker's answer as the core reads it: new tokens only."""
        ...

    def answer(self, output: GenerationOutput, last: Data | None) -> Data:
        """The whole answer, from what the core joined and the last worker's answer."""
        ...


def can_resume(method: str, data: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether a preempted request may go on from the tokens that it has.

    An engine looks for stop strings and bad words in what it samples itself, not in the
    prompt, and so would miss one that begins among the kept tokens. Media and replayed
    expert routes are tied to positions of the prompt. All of those start again.

    Args:
        method: Method of the worker.
        data: The request.
        config: ``policy.generation``.
    """
    if method != TOKEN_METHOD or not PLAIN_KEYS.issuperset(data):
        return False
    own = data.get("stop_strings")
    kwargs: Mapping[str, Any] = config.get("vllm_kwargs") or {}
    return not (
        (own and own[0])
        or config.get("stop_strings")
        or config.get("bad_words")
        or kwargs.get("enable_return_routed_experts")
    )


def make_sample(
    method: str, data: Data, config: Mapping[str, Any], policy: PreemptedRequests
) -> Sample:
    """A request as the core dispatches it.

    Args:
        method: ``generate_async`` or ``generate_text_async``.
        data: The request.
        config: ``policy.generation``.
        policy: What to keep of a preempted one, where that can be.
    """
    if policy is PreemptedRequests.RESUME and can_resume(method, data, config):
        return TokenSample(data, config)
    return OpaqueSample(data)


def new_request_id() -> str:
    """An id that is unique over all processes of a run."""
    return uuid.uuid4().hex


class OpaqueSample:
    """A request that starts again when it is preempted; its answer is passed on as it is.

    Args:
        data: The request.
    """

    policy = PreemptedRequests.RESTART

    def __init__(self, data: Data) -> None:
        self._data = data
        self.request = GenerationRequest(new_request_id(), prompt_ids=(), max_new_tokens=0)

    def data(self, request: GenerationRequest) -> Data:
        """The request itself."""
        return self._data

    def output(self, answer: Data, dp_rank: int) -> GenerationOutput:
        """Says only that there is an answer."""
        return GenerationOutput(self.request.request_id, (), (), (), "stop", dp_rank)

    def answer(self, output: GenerationOutput, last: Data | None) -> Data:
        """The worker's answer."""
        return last


class TokenSample:
    """A token request that goes on from the tokens of its preempted dispatches.

    Args:
        data: The request.
        config: ``policy.generation``.
    """

    policy = PreemptedRequests.RESUME

    def __init__(self, data: Data, config: Mapping[str, Any]) -> None:
        self._data = data
        length = int(data["input_lengths"][0])
        room = int(config["vllm_cfg"]["max_model_len"]) - length
        self.request = GenerationRequest(
            new_request_id(),
            prompt_ids=tuple(data["input_ids"][0, :length].tolist()),
            max_new_tokens=max(0, min(int(config["max_new_tokens"]), room)),
            stop_ids=stop_ids(config),
        )

    def data(self, request: GenerationRequest) -> Data:
        """The request, with kept tokens behind its prompt and the budget that is left."""
        kept = request.prior.token_ids
        if not kept:
            return self._data
        prompt = self._data["input_ids"]
        row = prompt.new_tensor([(*request.prompt_ids, *kept)])
        extended = copy.copy(self._data)
        extended["input_ids"] = row
        extended["input_lengths"] = self._data["input_lengths"] + len(kept)
        extended[MAX_NEW_TOKENS_KEY] = [request.max_new_tokens - len(kept)]
        return extended

    def output(self, answer: Data, dp_rank: int) -> GenerationOutput:
        """Its new tokens, with their log probabilities and versions."""
        end = int(answer["unpadded_sequence_lengths"][0])
        start = end - int(answer["generation_lengths"][0])
        segments = answer.get(SEGMENTS_KEY) or [()]
        # Without a new token there was no room for one behind those that were kept.
        cut_off = bool(answer["truncated"][0]) or start == end
        return GenerationOutput(
            request_id=self.request.request_id,
            token_ids=tuple(answer["output_ids"][0, start:end].tolist()),
            logprobs=tuple(answer["logprobs"][0, start:end].tolist()),
            segments=tuple(segments[0]),
            finish_reason="length" if cut_off else "stop",
            dp_rank=dp_rank,
        )

    def answer(self, output: GenerationOutput, last: Data | None) -> Data:
        """The worker's answer, or one made from several dispatches."""
        if last is not None and not output.tokens_kept:
            return last
        prompt, ids = self._data["input_ids"], self.request.prompt_ids
        long = {"dtype": torch.long, "device": prompt.device}
        total = len(ids) + len(output.token_ids)
        logprobs = torch.zeros((1, total), dtype=torch.float32, device=prompt.device)
        logprobs[0, len(ids) :] = torch.tensor(output.logprobs, dtype=torch.float32)
        return type(self._data)(
            {
                "output_ids": prompt.new_tensor([(*ids, *output.token_ids)]),
                "logprobs": logprobs,
                "generation_lengths": torch.tensor([len(output.token_ids)], **long),
                "unpadded_sequence_lengths": torch.tensor([total], **long),
                "truncated": torch.tensor([output.finish_reason == "length"], device=prompt.device),
                SEGMENTS_KEY: [output.segments],
            }
        )


def stop_ids(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Token ids that end an answer; NeMo RL puts the end-of-text token there.

    An engine told to ignore that one still stops at those it was given.
    """
    return tuple(int(token) for token in config.get("stop_token_ids") or ())
