"""The collector against a dispatch that is slow, fails, and answers out of order."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    NoLiveShardError,
    PipelineClosedError,
    Segment,
)
from nemo_rl_rlix.reference.buffer import ReplayBuffer
from nemo_rl_rlix.reference.collector import (
    CollectorConfig,
    Dispatch,
    TrajectoryCollector,
    request_seed,
    worth_reporting,
)
from nemo_rl_rlix.reference.task import CountingTask, Workload
from nemo_rl_rlix.reference.tokenizer import EOS_ID, decode, encode
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest

WORKLOAD = Workload(prompts_per_step=3, generations_per_prompt=4, verifier_median_s=0.0)
TASK = CountingTask(WORKLOAD, 0)
WAIT_S = 10.0


@dataclass
class Hooks:
    """Keeps the reports."""

    reports: list[tuple[int, int] | None] = field(default_factory=list)
    error: Exception | None = None

    def before_training(self, step: int) -> None: ...

    def after_training(self, step: int) -> None: ...

    def report_progress(self, collected: int, target: int) -> None:
        if self.error is not None:
            raise self.error
        self.reports.append((collected, target))

    def clear_progress(self) -> None:
        self.reports.append(None)


def answer(
    request: GenerationRequest, *, text: str = "a1", version: int = 0, reason: str = "stop"
) -> GenerationOutput:
    tokens = (*encode(text), EOS_ID)
    return GenerationOutput(
        request_id=request.request_id,
        token_ids=tokens,
        logprobs=(-1.0,) * len(tokens),
        segments=(Segment(version, len(tokens)),),
        finish_reason=reason,
        dp_rank=0,
        dispatches=2,
        tokens_kept=1,
    )


@dataclass
class Scene:
    buffer: ReplayBuffer
    hooks: Hooks
    collector: TrajectoryCollector


@contextmanager
def collecting(
    dispatch: Dispatch,
    *,
    max_age: int = 0,
    end: int = 3,
    hooks: Hooks | None = None,
    workload: Workload = WORKLOAD,
    start: bool = True,
    **config: float,
) -> Iterator[Scene]:
    buffer = ReplayBuffer(
        workload.prompts_per_step, workload.generations_per_prompt, max_age, end_version=end
    )
    hooks = hooks or Hooks()
    settings = CollectorConfig("p0", workload, **{"retry_pause_s": 0.001, **config})  # type: ignore[arg-type]
    collector = TrajectoryCollector(
        settings, task=TASK, buffer=buffer, dispatch=dispatch, hooks=hooks
    )
    if start:
        collector.start(0)
    try:
        yield Scene(buffer, hooks, collector)
    finally:
        collector.stop(WAIT_S)
        assert not collector.alive


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "it did not come true in time"
        time.sleep(0.002)


def test_every_step_gets_its_groups_whatever_order_they_come_in() -> None:
    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        await asyncio.sleep(random.Random(request.request_id).random() * 0.03)
        problem = TASK.problem(*places[request.prompt_ids])
        return answer(request, text=problem.answer, version=places[request.prompt_ids][0])

    places = {
        encode(TASK.problem(step, index).prompt): (step, index)
        for step in range(3)
        for index in range(3)
    }
    assert len(places) == 9
    with collecting(dispatch, max_age=1) as scene:
        for step in range(3):
            groups = scene.buffer.sample(step, timeout_s=WAIT_S)
            assert [g.group_id for g in groups] == [f"v{step}-g{i}" for i in range(3)]
            for index, group in enumerate(groups):
                for number, one in enumerate(group.trajectories):
                    assert decode(one.prompt_ids) == TASK.problem(step, index).prompt
                    assert one.trajectory_id == f"p0-v{step}-g{index}-t{number}"
                    assert one.reward == 1.0
            scene.collector.set_version(step + 1)
        until(lambda: scene.hooks.reports[-1] is None)  # nothing can be wanted any more
        stats = scene.collector.stats
        assert (stats.groups, stats.trajectories, stats.retries) == (9, 36, 0)
        assert (stats.dispatches, stats.preempted, stats.tokens_kept) == (72, 36, 36)
        assert scene.buffer.stats.lost_groups == scene.buffer.stats.duplicated_groups == 0


def test_targets_wait_for_their_version() -> None:
    seen: list[str] = []

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        seen.append(request.request_id.split("-")[1])
        return answer(request, version=int(request.request_id[4]))

    with collecting(dispatch, max_age=0) as scene:
        scene.buffer.sample(0, timeout_s=WAIT_S)
        until(lambda: scene.hooks.reports[-1] is None)
        assert set(seen) == {"v0"}
        scene.collector.set_version(1)
        scene.buffer.sample(1, timeout_s=WAIT_S)
        assert set(seen) == {"v0", "v1"}


def test_a_failed_group_is_made_again_for_the_same_target() -> None:
    failed: set[str] = set()

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        name = "-".join(request.request_id.split("-")[1:3])
        if name not in failed and request.request_id.endswith("t2"):
            failed.add(name)
            raise OSError("connection reset")
        await asyncio.sleep(0.01)
        return answer(request)

    with collecting(dispatch) as scene:
        groups = scene.buffer.sample(0, timeout_s=WAIT_S)
        assert [g.group_id for g in groups] == ["v0-g0", "v0-g1", "v0-g2"]
        # The second attempt has ids of its own: the first may still be in an engine.
        assert all(t.trajectory_id.endswith("-a1") for g in groups for t in g.trajectories)
        assert scene.collector.stats.retries == 3 == scene.buffer.stats.failed
        assert scene.collector.failure is None


def test_demand_grows_again_when_a_group_fails() -> None:
    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        if request.request_id.endswith("v0-g0-t3"):
            await asyncio.sleep(0.05)  # the other eleven are there by then
            raise OSError("connection reset")
        return answer(request)

    with collecting(dispatch, retry_pause_s=1.0) as scene:
        until(lambda: scene.collector.stats.retries == 1)
        until(lambda: scene.hooks.reports[-1] == (8, 12))
        assert (11, 12) in scene.hooks.reports
        assert scene.buffer.stats.failed == 0  # said at once, not after the pause
        scene.buffer.sample(0, timeout_s=WAIT_S)
        until(lambda: scene.hooks.reports[-2:] == [(12, 12), None])


def test_an_aborted_answer_is_never_pushed() -> None:
    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        first = not request.request_id.endswith("-a1")
        return answer(request, reason="abort" if first else "stop")

    with collecting(dispatch) as scene:
        groups = scene.buffer.sample(0, timeout_s=WAIT_S)
        assert {t.finish_reason for g in groups for t in g.trajectories} == {"stop"}
        assert scene.buffer.stats.aborted_tokens == 0


@pytest.mark.parametrize(
    ("error", "attempts"),
    [
        (OSError("engine says no"), 3),
        (NoLiveShardError("all shards FAILED"), 1),
        (PipelineClosedError("unregistered"), 1),
        (ControlPlaneLostError("gone"), 1),
    ],
)
def test_a_run_that_cannot_go_on_ends_with_the_cause(error: Exception, attempts: int) -> None:
    calls: list[str] = []

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        if request.request_id.startswith("p0-v0-g0-t0"):
            calls.append(request.request_id)
            raise error
        await asyncio.sleep(0.001)
        return answer(request)

    with collecting(dispatch, max_attempts=3) as scene:
        with pytest.raises(PipelineClosedError, match=str(error)):
            scene.buffer.sample(0, timeout_s=WAIT_S)
        until(lambda: not scene.collector.alive)
        assert scene.collector.failure is not None
        assert str(error) in str(scene.collector.failure)
        assert scene.collector.failure.__cause__ is error
        assert len(calls) == attempts
        assert scene.hooks.reports[-1] is None


def test_a_lost_control_plane_is_a_failure_too() -> None:
    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        return answer(request)

    with collecting(dispatch, hooks=Hooks(error=ControlPlaneLostError("gone"))) as scene:
        until(lambda: scene.collector.failure is not None)


def test_stop_cancels_what_hangs_and_gives_it_back() -> None:
    cancelled: list[str] = []

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(request.request_id)
            raise
        raise AssertionError

    with collecting(dispatch, max_age=1) as scene:
        until(lambda: scene.collector.stats.generating == 24)
        started = time.monotonic()
        scene.collector.stop(WAIT_S)
        assert time.monotonic() - started < 2
        assert len(cancelled) == 24 == len(set(cancelled))
        assert scene.hooks.reports[-1] is None
        assert scene.collector.stats.generating == 0
        assert scene.collector.failure is None
        assert scene.buffer.stats.failed == 6
        assert scene.buffer.reserve(0) is not None
        scene.collector.set_version(1)  # too late, and harmless
        scene.collector.stop(WAIT_S)


def test_stop_has_a_deadline() -> None:
    release = threading.Event()

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        try:
            await asyncio.sleep(3600)
        finally:
            release.wait(WAIT_S)  # does not heed its cancellation
        raise AssertionError

    with collecting(dispatch) as scene:
        until(lambda: scene.collector.stats.generating == 12)
        with pytest.raises(DeadlineExceededError, match="stop of the collector"):
            scene.collector.stop(0.1)
        release.set()


def test_a_collector_that_never_started_can_be_stopped() -> None:
    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        raise AssertionError

    with collecting(dispatch, start=False) as scene:
        scene.collector.stop(1.0)
        assert scene.hooks.reports == []


def test_only_so_many_groups_generate_at_once() -> None:
    running: set[str] = set()
    most = 0

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        nonlocal most
        running.add(request.request_id)
        most = max(most, len({name.rsplit("-", 1)[0] for name in running}))
        await asyncio.sleep(0.005)
        running.discard(request.request_id)
        return answer(request)

    with collecting(dispatch, max_age=1, max_groups=2) as scene:
        scene.buffer.sample(0, timeout_s=WAIT_S)
        until(lambda: scene.collector.stats.groups == 6)
        assert most == 2


def test_a_slow_verifier_is_not_demand() -> None:
    slow = Workload(
        prompts_per_step=3, generations_per_prompt=4, verifier_median_s=1.5, verifier_sigma=0.0
    )

    async def dispatch(request: GenerationRequest) -> GenerationOutput:
        await asyncio.sleep(0.01)
        return answer(request)

    with collecting(dispatch, workload=slow, max_groups=1) as scene:
        # One group at a time generates, and all three do: verifying holds no place.
        until(lambda: scene.collector.stats.verifying == 12)
        assert scene.buffer.valid_count(0, 0) == 0
        assert scene.hooks.reports[-1] == (12, 12)  # nothing remains, nothing is cleared
        assert scene.hooks.reports[0] == (0, 12)
        scene.buffer.sample(0, timeout_s=WAIT_S)
        until(lambda: scene.hooks.reports[-1] is None)


# -- reports ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("last", "collected", "target", "worth"),
    [
        (None, 0, 100, True),
        ((0, 100), 0, 100, False),
        ((0, 100), 1, 100, False),
        ((0, 100), 2, 100, True),
        ((98, 100), 99, 100, False),
        ((99, 100), 100, 100, True),
        ((50, 100), 50, 200, True),
        ((50, 100), 40, 100, True),  # a group failed: demand has grown
        ((10, 12), 11, 12, True),
    ],
)
def test_worth_reporting(
    last: tuple[int, int] | None, collected: int, target: int, worth: bool
) -> None:
    assert worth_reporting(last, collected, target) is worth


@given(st.integers(1, 2000))
def test_reports_are_few_and_never_far_behind(target: int) -> None:
    last: tuple[int, int] | None = None
    reports = 0
    for collected in range(target + 1):
        if worth_reporting(last, collected, target):
            last, reports = (collected, target), reports + 1
        assert last is not None
        assert collected - last[0] <= max(0.02 * target, 0)
    assert last == (target, target)
    assert reports <= 52


def test_seeds_differ_and_stay() -> None:
    names = [f"v{v}-g{g}-t{t}" for v in range(5) for g in range(5) for t in range(5)]
    assert len({request_seed(0, name) for name in names}) == 125
    assert request_seed(0, "a") == request_seed(0, "a") != request_seed(1, "a")
