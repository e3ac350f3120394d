"""Typed errors through real Ray actors: methods, streaming generators, dead processes."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
import ray

from nemo_rl_rlix.errors import (
    DeadlineExceededError,
    PartialGeneration,
    Segment,
    ShardFailedError,
    ShardPreemptedError,
)
from nemo_rl_rlix.ray_errors import Callee, unwrap

pytestmark = pytest.mark.ray

PARTIAL = PartialGeneration(
    token_ids=(5, 6, 7), logprobs=(-0.5, -0.25, -1.0), segments=(Segment(3, 2), Segment(4, 1))
)


@ray.remote(num_cpus=0, max_concurrency=4)
class Shard:
    """Yields two items, then is preempted."""

    async def generate(self) -> AsyncIterator[int]:
        yield 1
        yield 2
        raise ShardPreemptedError(1, PARTIAL, 7)

    async def call(self) -> None:
        raise ShardPreemptedError(1, PARTIAL, 7)

    async def fail(self) -> None:
        raise ShardFailedError(1, "out of memory")

    async def wait(self) -> None:
        await asyncio.sleep(60)

    async def end(self) -> None:
        os._exit(1)


@ray.remote(num_cpus=0)
class Relay:
    """Stands between the caller and a shard, as a coordinator does."""

    def call(self, shard: ray.actor.ActorHandle) -> None:
        ray.get(shard.call.remote())

    def generate(self, shard: ray.actor.ActorHandle) -> Iterator[int]:
        for ref in shard.generate.options(num_returns="streaming").remote():
            yield ray.get(ref)


@pytest.fixture(scope="module")
def shard(ray_cluster: str) -> ray.actor.ActorHandle:
    return Shard.remote()


@pytest.fixture(scope="module")
def relay(ray_cluster: str) -> ray.actor.ActorHandle:
    return Relay.remote()


def check_preempted(error: ShardPreemptedError) -> None:
    """The attributes are readable on Ray's instance and on the unwrapped one."""
    for seen in (error, unwrap(error)):
        assert (seen.dp_rank, seen.partial, seen.epoch) == (1, PARTIAL, 7)
    assert type(unwrap(error)) is ShardPreemptedError


def test_a_method_s_error_arrives_typed(shard):
    with pytest.raises(ShardPreemptedError) as caught:
        ray.get(shard.call.remote(), timeout=30)
    check_preempted(caught.value)


def test_a_streaming_generator_s_error_arrives_typed_after_its_items(shard):
    items = []
    with pytest.raises(ShardPreemptedError) as caught:
        for ref in shard.generate.options(num_returns="streaming").remote():
            items.append(ray.get(ref, timeout=30))
    assert items == [1, 2]
    check_preempted(caught.value)


def test_the_same_in_an_event_loop(shard):
    async def consume() -> list[int]:
        async for ref in shard.generate.options(num_returns="streaming").remote():
            items.append(await ref)
        return items

    items: list[int] = []
    with pytest.raises(ShardPreemptedError) as caught:
        asyncio.run(asyncio.wait_for(consume(), timeout=30))
    assert items == [1, 2]
    check_preempted(caught.value)


def test_an_error_that_crosses_two_actors_arrives_typed(shard, relay):
    with pytest.raises(ShardPreemptedError) as caught:
        ray.get(relay.call.remote(shard), timeout=30)
    check_preempted(caught.value)
    with pytest.raises(ShardPreemptedError) as caught:
        for ref in relay.generate.options(num_returns="streaming").remote(shard):
            ray.get(ref, timeout=30)
    check_preempted(caught.value)


def test_cause_is_text_only_after_unwrapping(shard):
    with pytest.raises(ShardFailedError) as caught:
        ray.get(shard.fail.remote(), timeout=30)
    assert unwrap(caught.value).cause == "out of memory"


def test_a_missed_deadline_and_a_dead_process_are_named(ray_cluster):
    shard = Shard.remote()
    callee = Callee("wake of shard 1", dp_rank=1, timeout_s=0.2)
    with pytest.raises(ray.exceptions.GetTimeoutError) as timeout:
        ray.get(shard.wait.remote(), timeout=callee.timeout_s)
    assert isinstance(unwrap(timeout.value, callee), DeadlineExceededError)

    with contextlib.suppress(ray.exceptions.RayActorError):
        ray.get(shard.end.remote(), timeout=30)
    with pytest.raises(ray.exceptions.RayActorError) as death:
        ray.get(shard.call.remote(), timeout=30)
    failed = unwrap(death.value, callee)
    assert isinstance(failed, ShardFailedError)
    assert failed.dp_rank == 1
    assert failed.cause.startswith("wake of shard 1: ")
