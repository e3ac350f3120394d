"""One request to one worker: every way in which it can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError, RayTaskError

from nemo_rl_rlix.errors import PartialGeneration, ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.nemo_rl import worker_call
from nemo_rl_rlix.nemo_rl.shard_leaders import SomeShards, run_on_dp_shard_leaders
from nemo_rl_rlix.nemo_rl.worker_call import call_worker

Stream = Callable[[], AsyncIterator[Awaitable[Any]]]


class Group:
    """A worker group of shards of two workers each; the even ones are the leaders."""

    dp_size = 3

    def __init__(self, stream: Stream | None = None) -> None:
        self.stream = stream
        self.asked: list[tuple[int, str, dict[str, Any]]] = []
        self.workers = [Worker(index, self.asked) for index in range(6)]
        self.worker_metadata = [{"dp_shard_idx": index // 2} for index in range(6)]

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        if not 0 <= dp_shard_idx < self.dp_size:
            raise IndexError(dp_shard_idx)
        return 2 * dp_shard_idx

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, **kwargs: Any
    ) -> Any:
        self.asked.append((worker_idx, method_name, kwargs))
        return self.stream() if self.stream is not None else worker_idx


class Worker:
    def __init__(self, index: int, asked: list[tuple[int, str, dict[str, Any]]]) -> None:
        self._index, self._asked = index, asked

    def __getattr__(self, name: str) -> Any:
        class Method:
            @staticmethod
            def remote(**kwargs: Any) -> int:
                self._asked.append((self._index, name, kwargs))
                return self._index

        return Method


@pytest.fixture
def cancelled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls: list[Any] = []
    monkeypatch.setattr(ray, "cancel", calls.append)
    monkeypatch.setattr(worker_call, "unavailable_error", lambda: RuntimeError)
    return calls


def task_error(cause: Exception) -> Exception:
    error: Exception = RayTaskError("generate_async", "traceback", cause).as_instanceof_cause()
    return error


async def ready(value: Any) -> Any:
    if isinstance(value, Exception):
        raise value
    return value


def ask(stream: Stream, *, timeout_s: float = 5.0, silences: list[int] | None = None) -> Any:
    group = Group(stream)
    heard = silences if silences is not None else []
    result = asyncio.run(
        call_worker(
            group,
            1,
            "generate_async",
            data={"x": 1},
            greedy=False,
            timeout_s=timeout_s,
            on_silence=lambda: heard.append(1),
        )
    )
    assert group.asked == [(2, "generate_async", {"data": {"x": 1}, "greedy": False})]
    return result


def test_the_answer_comes_from_the_leader_of_the_shard(cancelled: list[Any]) -> None:
    async def stream() -> AsyncIterator[Awaitable[Any]]:
        yield ready((0, "answer"))

    assert ask(stream) == (0, "answer")
    assert cancelled == []


@pytest.mark.parametrize("early", [True, False], ids=["from the stream", "from the reference"])
@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (
            task_error(ShardPreemptedError(1, PartialGeneration((5,), (-0.5,)), epoch=4)),
            ShardPreemptedError,
        ),
        (RayActorError(), ShardFailedError),
        (task_error(ValueError("prompt too long")), RuntimeError),
    ],
)
def test_errors_come_out_typed(
    cancelled: list[Any], raised: Exception, expected: type[Exception], early: bool
) -> None:
    async def stream() -> AsyncIterator[Awaitable[Any]]:
        if early:
            raise raised
        yield ready(raised)

    with pytest.raises(expected) as caught:
        ask(stream)
    assert type(caught.value) is expected
    if isinstance(caught.value, ShardPreemptedError):
        assert caught.value.partial.token_ids == (5,)
        assert caught.value.epoch == 4
    if isinstance(caught.value, ShardFailedError):
        assert caught.value.dp_rank == 1


def test_a_stream_without_an_answer_is_an_error(cancelled: list[Any]) -> None:
    async def stream() -> AsyncIterator[Awaitable[Any]]:
        return
        yield

    with pytest.raises(RuntimeError, match="without an answer"):
        ask(stream)


def test_a_silent_shard_is_looked_after_and_still_waited_for(cancelled: list[Any]) -> None:
    silences: list[int] = []

    async def stream() -> AsyncIterator[Awaitable[Any]]:
        while len(silences) < 3:
            await asyncio.sleep(0.005)
        yield ready((0, "late"))

    assert ask(stream, timeout_s=0.02, silences=silences) == (0, "late")
    assert cancelled == []


def test_an_answer_that_does_not_arrive_is_cancelled(cancelled: list[Any]) -> None:
    async def stream() -> AsyncIterator[Awaitable[Any]]:
        yield asyncio.sleep(60.0)

    with pytest.raises(RuntimeError, match="NRL_VLLM_ASYNC_TIMEOUT_SECONDS"):
        ask(stream, timeout_s=0.05)
    assert len(cancelled) == 1


def test_a_cancelled_request_is_cancelled_in_the_worker(cancelled: list[Any]) -> None:
    started = []

    async def stream() -> AsyncIterator[Awaitable[Any]]:
        started.append(1)
        await asyncio.sleep(60.0)
        yield ready(None)

    async def run() -> None:
        request = asyncio.create_task(
            call_worker(
                Group(stream),
                0,
                "generate_async",
                data={},
                greedy=True,
                timeout_s=60.0,
                on_silence=lambda: None,
            )
        )
        while not started:
            await asyncio.sleep(0.001)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request

    asyncio.run(run())
    assert len(cancelled) == 1


def test_a_method_runs_on_the_leaders_of_chosen_shards_only() -> None:
    group = Group()
    assert run_on_dp_shard_leaders(group, [2, 0], "sleep", level=2) == [4, 0]
    assert group.asked == [(4, "sleep", {"level": 2}), (0, "sleep", {"level": 2})]
    with pytest.raises(IndexError):
        run_on_dp_shard_leaders(group, [3], "sleep")


def test_fan_outs_leave_the_other_shards_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    monkeypatch.setattr(ray, "put", lambda value: ("put", value))
    awake = SomeShards(group, [2, 1])
    axes = ["tensor_parallel", "pipeline_parallel"]
    assert awake.dp_size == 3
    assert awake.run_all_workers_single_data("reset", run_rank_0_only_axes=axes) == [2, 4]
    assert awake.run_all_workers_single_data("start_gpu_profiling") == [2, 3, 4, 5]
    leaders = [awake.get_dp_leader_worker_idx(rank) for rank in range(3)]
    answers = [awake.run_single_worker_single_data("look", worker_idx=i) for i in leaders]
    assert answers == [("put", None), 2, 4]
    assert {index for index, _, _ in group.asked} == {2, 3, 4, 5}
    assert SomeShards(group, []).run_all_workers_single_data("reset", axes) == []
