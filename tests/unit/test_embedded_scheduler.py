"""The embedded scheduler on one event loop, with coordinators that answer at once."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_rlix.control_plane.embedded import scheduler as module
from nemo_rl_rlix.control_plane.embedded.scheduler import EmbeddedScheduler
from nemo_rl_rlix.control_plane.protocol import PipelineSpec, Priority


class Coordinator:
    """Takes note of what it is asked for."""

    def __init__(self) -> None:
        self.active: set[int] = set()
        self.resize_infer = SimpleNamespace(remote=self._resize)

    def _resize(self, dp_ranks_to_remove: list[int], dp_ranks_to_add: list[int]) -> Any:
        self.active -= set(dp_ranks_to_remove)
        self.active |= set(dp_ranks_to_add)
        done: Future[None] = Future()
        done.set_result(None)
        return SimpleNamespace(future=lambda: done)


@pytest.fixture
def coordinators(monkeypatch: pytest.MonkeyPatch) -> dict[str, Coordinator]:
    made: dict[str, Coordinator] = {}

    def find(spec: PipelineSpec) -> Coordinator:
        return made.setdefault(spec.pipeline_id, Coordinator())

    monkeypatch.setattr(module, "find_coordinator", find)
    return made


def spec(pid: str) -> PipelineSpec:
    mappings = {"actor_infer": (0, 1), "actor_train": (0,)}
    return PipelineSpec(pid, f"{pid}_ns", mappings, {"actor_infer": 1, "actor_train": 1})


async def rest(scheduler: EmbeddedScheduler, done: Any) -> None:
    """Wait until ``done`` holds."""
    async with asyncio.timeout(10):
        while not done():
            scheduler._wake.set()
            await asyncio.sleep(0.005)


def at_grant(scheduler: EmbeddedScheduler, act: Any) -> None:
    """Have ``act`` called right after a grant, before its caller learns of it."""
    grant = scheduler._grant

    def granted(what: Any) -> None:
        grant(what)
        act()

    scheduler._grant = granted  # type: ignore[method-assign]


def test_a_caller_that_goes_as_its_shards_are_granted_has_them_taken(
    coordinators: dict[str, Coordinator],
) -> None:
    """Shards that serve hold memory: their GPUs are free only after a resize."""

    async def main() -> None:
        scheduler = EmbeddedScheduler(2)
        await scheduler.register(spec("a"))
        request = asyncio.create_task(
            scheduler.request_gpus(
                cluster_id="a_actor_infer", priority=Priority.GENERATION, step_target_estimate=8
            )
        )
        at_grant(scheduler, request.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await request
        assert request.cancelled()
        await rest(scheduler, lambda: not coordinators["a"].active)
        await scheduler.shutdown()

    asyncio.run(main())


def test_a_caller_that_goes_as_training_is_granted_keeps_no_gpu(
    coordinators: dict[str, Coordinator],
) -> None:
    async def main() -> None:
        scheduler = EmbeddedScheduler(2)
        await scheduler.register(spec("a"))
        request = asyncio.create_task(
            scheduler.request_gpus(cluster_id="a_actor_train", priority=Priority.ACTOR_TRAINING)
        )
        at_grant(scheduler, request.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await request
        assert request.cancelled()
        assert (await scheduler.status())["gpus"] == {}
        await scheduler.shutdown()

    asyncio.run(main())


def test_a_grant_that_meets_the_deadline_is_not_lost(
    coordinators: dict[str, Coordinator], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait_for(future: Any, timeout: float | None) -> Any:
        await future
        raise TimeoutError  # as newer Pythons do when both happen in one turn of the loop

    async def main() -> None:
        scheduler = EmbeddedScheduler(2)
        await scheduler.register(spec("a"))
        fake = SimpleNamespace(**{name: getattr(asyncio, name) for name in dir(asyncio)})
        fake.wait_for = lambda future, timeout: (
            wait_for(future, timeout)
            if isinstance(future, asyncio.Future)
            else asyncio.wait_for(future, timeout)
        )
        monkeypatch.setattr(module, "asyncio", fake)
        gpus = await scheduler.request_gpus(
            cluster_id="a_actor_train", priority=Priority.ACTOR_TRAINING, timeout_s=5.0
        )
        assert gpus == [0]
        await scheduler.shutdown()

    asyncio.run(main())
