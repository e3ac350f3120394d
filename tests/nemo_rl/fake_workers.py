"""A NeMo RL worker group whose workers are the fake engine's shards. No Ray.

What comes out of a worker passes through the forms that Ray gives it: a stream of
references, and errors wrapped in a task's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any

import torch
from fakes.shard import FakeShard
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.nemo_rl.samples import MAX_NEW_TOKENS_KEY, SEGMENTS_KEY
from nemo_rl_rlix.shards.requests import GenerationRequest

WORKERS_PER_SHARD = 2


class Ready:
    """A reference to a value that is there: awaitable, and taken by the patched ``ray.get``."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __await__(self) -> Any:
        yield from asyncio.sleep(0).__await__()
        return self.value


def get(refs: Any, timeout: float | None = None) -> Any:
    """What ``ray.get`` does, for :class:`Ready`."""
    if isinstance(refs, list):
        return [get(ref) for ref in refs]
    return refs.value


class Leader:
    """The leader of a shard, or another of its workers, as an actor handle."""

    def __init__(self, index: int, asked: list[tuple[int, str]]) -> None:
        self.index, self._asked = index, asked

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        index, asked = self.index, self._asked

        class Method:
            @staticmethod
            def remote(**kwargs: Any) -> Ready:
                asked.append((index, name))
                return Ready(answer_of(name, index))

        return Method


def answer_of(method: str, index: int) -> Any:
    if method == "_get_raw_spec_counters":
        return {"vllm:spec_decode_num_drafts": 10.0 + index}
    if method == "get_vllm_logger_metrics":
        return {"inflight_batch_sizes": [index], "generation_tokens": [1]}
    return True


class FakeGroup:
    """``RayWorkerGroup`` over shards.

    Args:
        shards: The fake engine's shards.
        config: ``policy.generation``.
        batch: ``BatchedDataDict``.
    """

    def __init__(
        self, shards: Mapping[int, FakeShard], config: Mapping[str, Any], batch: Any
    ) -> None:
        self.shards, self._config, self._batch = shards, config, batch
        self.asked: list[tuple[int, str]] = []
        self.threads: set[int] = set()
        self.gone: set[int] = set()
        self.broken: set[int] = set()
        self.shut_down: list[str] = []
        count = WORKERS_PER_SHARD * len(shards)
        self.workers = [Leader(index, self.asked) for index in range(count)]
        self.worker_metadata = [
            {"dp_shard_idx": index // WORKERS_PER_SHARD} for index in range(count)
        ]
        self.dp_size = len(shards)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(dp_shard_idx)
        return WORKERS_PER_SHARD * dp_shard_idx

    def run_all_workers_single_data(
        self, method_name: str, run_rank_0_only_axes: Any = None, **kwargs: Any
    ) -> list[Any]:
        step = WORKERS_PER_SHARD if run_rank_0_only_axes else 1
        return [getattr(worker, method_name).remote(**kwargs) for worker in self.workers[::step]]

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, **kwargs: Any
    ) -> Any:
        if not method_name.startswith("generate"):
            return getattr(self.workers[worker_idx], method_name).remote(**kwargs)
        self.threads.add(threading.get_ident())
        return self._stream(method_name, worker_idx // WORKERS_PER_SHARD, kwargs["data"])

    def shutdown(self, cleanup_method: str) -> bool:
        self.shut_down.append(cleanup_method)
        return True

    async def _stream(
        self, method: str, rank: int, data: Any
    ) -> AsyncIterator[Awaitable[tuple[int, Any]]]:
        if rank in self.gone:
            raise RayActorError()
        try:
            if rank in self.broken:
                raise ValueError("this prompt is too long")
            answer = await self._answer(method, rank, data)
        except (RLixError, ValueError) as error:
            raise RayTaskError(method, "traceback", error).as_instanceof_cause() from error
        yield Ready((0, self._batch(answer)))

    async def _answer(self, method: str, rank: int, data: Any) -> dict[str, Any]:
        """What the worker makes of a request and of the engine's answer."""
        if method == "generate_text_async":
            ids = [ord(char) % 90 for char in data["prompts"][0]]
        else:
            ids = data["input_ids"][0, : int(data["input_lengths"][0])].tolist()
        room = min(
            self._config["max_new_tokens"], self._config["vllm_cfg"]["max_model_len"] - len(ids)
        )
        budget = min(room, *data.get(MAX_NEW_TOKENS_KEY, [room]))
        stop_ids = tuple(self._config["stop_token_ids"])
        request = GenerationRequest(f"{id(data)}", tuple(ids), budget, stop_ids=stop_ids)
        output = await self.shards[rank].serve(request)
        if method == "generate_text_async":
            return {"texts": [" ".join(map(str, output.token_ids))]}
        total = len(ids) + len(output.token_ids)
        return {
            "output_ids": torch.tensor([[*ids, *output.token_ids]]),
            "logprobs": torch.tensor([[0.0] * len(ids) + list(output.logprobs)]),
            "generation_lengths": torch.tensor([len(output.token_ids)]),
            "unpadded_sequence_lengths": torch.tensor([total]),
            "truncated": torch.tensor([output.finish_reason == "length"]),
            SEGMENTS_KEY: [output.segments],
        }
