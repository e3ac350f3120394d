"""The collector and the buffer of a checkout, with what is added to them. No Ray."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_workers
import pytest
import ray
from fake_workers import Ready
from ray.exceptions import RayActorError

from nemo_rl_rlix.errors import NoLiveShardError, RLixError
from nemo_rl_rlix.nemo_rl.demand import BufferView
from nemo_rl_rlix.nemo_rl.demand_reporter import DemandReporter
from nemo_rl_rlix.nemo_rl.failures import CollectionFailedError
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.versions import NemoRl, detect
from nemo_rl_rlix.shards.redispatch import DispatchCounts

GROUPS, GENERATIONS, AGE = 3, 4, 2
STEP = GROUPS * GENERATIONS


@pytest.fixture(scope="module")
def version(importable: Path) -> NemoRl:
    if importlib.util.find_spec("nemo_rl") is None:
        pytest.skip("the checkout is not on PYTHONPATH: use make test-nemo-rl")
    return detect(SourceTree(importable / "nemo_rl"))


@pytest.fixture(scope="module")
def buffers(version: NemoRl) -> Any:
    # Half-way imports: the collector's package imports the GRPO module, which imports it.
    importlib.import_module("nemo_rl.algorithms.grpo")
    return importlib.import_module("nemo_rl_rlix.nemo_rl.buffer")


@pytest.fixture(scope="module")
def collectors(buffers: Any) -> Any:
    return importlib.import_module("nemo_rl_rlix.nemo_rl.collector")


@pytest.fixture(scope="module")
def master_config(collectors: Any) -> Any:
    from nemo_rl.algorithms import grpo
    from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
    from omegaconf import OmegaConf

    register_omegaconf_resolvers()
    file = Path(grpo.__file__).parents[2] / "examples" / "configs" / "grpo_math_1B.yaml"
    recipe: Any = OmegaConf.to_container(load_config(str(file)), resolve=True)
    recipe["grpo"]["num_prompts_per_step"] = GROUPS
    recipe["grpo"]["num_generations_per_prompt"] = GENERATIONS
    recipe["grpo"]["async_grpo"]["enabled"] = True
    recipe["grpo"]["async_grpo"]["max_trajectory_age_steps"] = AGE
    return grpo.MasterConfig(**recipe)


class Handle:
    """An actor handle to an object in this process."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.gone = False

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Ready:
            if self.gone:
                raise RayActorError()
            return Ready(getattr(self.actor, name)(*args, **kwargs))

        return SimpleNamespace(remote=remote)


class Hooks:
    def __init__(self) -> None:
        self.said: list[tuple[int, int] | None] = []
        self.hold = threading.Event()
        self.hold.set()

    def before_training(self, step: int) -> None:
        raise AssertionError

    def after_training(self, step: int) -> None:
        raise AssertionError

    def report_progress(self, collected: int, target: int) -> None:
        assert self.hold.wait(30.0)
        self.said.append((collected, target))

    def clear_progress(self) -> None:
        self.said.append(None)


class Generation:
    """What the collector asks of the generation object."""

    def __init__(self) -> None:
        self.rlix_failure: RLixError | None = None
        self.open = 0

    def rlix_open_requests(self) -> int:
        return self.open

    def rlix_dispatch_counts(self) -> DispatchCounts:
        return DispatchCounts(finished=7)


def make_buffer(buffers: Any, version: NemoRl, size: int = 100) -> Any:
    main = {"drop_incomplete_targets_on_restore": False}
    return buffers.CountingBuffer(max_size=size, **(main if version is NemoRl.MAIN else {}))


def group(buffers: Any) -> Any:
    from nemo_rl.distributed.batched_data_dict import BatchedDataDict

    return BatchedDataDict({"x": [0] * GENERATIONS})


def trajectory(buffers: Any) -> dict[str, Any]:
    return {"batch": group(buffers), "rollout_metrics": {}, "timestamp": 0.0}


@pytest.fixture
def made(
    collectors: Any,
    buffers: Any,
    version: NemoRl,
    master_config: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[SimpleNamespace]:
    """A collector that has begun, with an empty dataloader that waits for the test's end."""
    monkeypatch.setattr(ray, "get", fake_workers.get)
    monkeypatch.setattr(
        collectors,
        "DemandReporter",
        lambda hooks, observe: DemandReporter(hooks, observe, look_s=0.02, repeat_s=60.0),
    )
    hooks, generation, ended = Hooks(), Generation(), threading.Event()
    handle = Handle(make_buffer(buffers, version))
    collector = collectors.ReportingCollector(
        policy_generation=generation,
        tokenizer=SimpleNamespace(pad_token_id=0),
        task_to_env={},
        master_config=master_config,
        replay_buffer=handle,
        start_step=0,
        rlix_hooks=hooks,
    )

    class Data:
        def __iter__(self) -> Iterator[Any]:
            ended.wait(60.0)
            return iter(())

        def state_dict(self) -> dict[str, Any]:
            return {}

    parts = SimpleNamespace(
        collector=collector,
        hooks=hooks,
        generation=generation,
        handle=handle,
        data=Data(),
        ended=ended,
    )
    yield parts
    ended.set()
    hooks.hold.set()
    collector._rlix_reporter.stop(10.0)


def push(made: Any, buffers: Any, version: NemoRl, target: int, monkeypatch: Any) -> None:
    """Push a group by the checkout's own code."""
    if version is NemoRl.MAIN:
        from nemo_rl.experience.rollouts import RolloutGroupResult

        result = RolloutGroupResult(
            group_index=0, final_batch=group(buffers), rollout_metrics={}, task_index=None
        )
        asyncio.run(
            made.collector._enqueue_rollout_group(
                rollout_result=result,
                generation_weight_version=0,
                target_weight_version=target,
                expected_prompt_groups=1,
                buffered_group_indices=set(),
                collection_started_at=time.perf_counter(),
            )
        )
        return
    from nemo_rl.algorithms.async_utils import trajectory_collector

    monkeypatch.setattr(
        trajectory_collector,
        "run_async_multi_turn_rollout",
        lambda **kwargs: (group(buffers), {}),
    )
    made.collector._run_prompt_group_worker(None, 0, target, 0)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_valid_trajectories_are_counted(buffers: Any, version: NemoRl) -> None:
    buffer = make_buffer(buffers, version)
    for sampled_at in (0, 1, 1, 3, 4):
        assert buffer.add(trajectory(buffers), sampled_at, 5) == "success"
    assert buffer.valid_count(current_weight_version=3, max_age_steps=2) == 3 * GENERATIONS
    assert buffer.valid_count(3, 0) == GENERATIONS
    assert buffer.valid_count(9, 2) == 0


def test_polls_of_training_say_what_is_wanted(buffers: Any, version: NemoRl) -> None:
    buffer = make_buffer(buffers, version)
    assert buffer.rlix_view() == BufferView()
    assert buffer.has_complete_batch(0, 1, AGE) is False
    assert buffer.sample(num_prompt_groups=1, current_weight_version=1, max_age_steps=AGE) is None
    assert buffer.rlix_view().polled == {0, 1}
    buffer.add(trajectory(buffers), 0, 0)
    assert buffer.has_complete_batch(0, 1, AGE) is True
    sampled = buffer.sample(num_prompt_groups=1, current_weight_version=0, max_age_steps=AGE)
    assert len(sampled["trajectories"]) == 1
    buffer.add(trajectory(buffers), 0, 1)
    buffer.rlix_note_extra(5)
    assert buffer.rlix_view() == BufferView({1: 1}, 0, frozenset({1}), 5)
    restored = make_buffer(buffers, version)
    restored.load_state_dict(buffer.state_dict(), 1, 1, AGE)
    assert restored.rlix_view().counts == {1: 1}


def test_training_hears_that_collection_has_failed(buffers: Any, version: NemoRl) -> None:
    buffer = make_buffer(buffers, version)
    buffer.rlix_fail("no shard")
    buffer.rlix_fail("later")
    with pytest.raises(CollectionFailedError, match="no shard"):
        buffer.sample(1, 0, AGE)
    with pytest.raises(CollectionFailedError, match="no shard"):
        buffer.has_complete_batch(0, 1, AGE)


def test_pushes_of_the_checkouts_own_code_are_reported(
    made: Any, buffers: Any, version: NemoRl, monkeypatch: pytest.MonkeyPatch
) -> None:
    hooks = made.hooks
    made.collector.start_collection(made.data)
    whole = STEP * (AGE + 1)
    wait_until(lambda: hooks.said == [(0, whole)])
    for number in range(GROUPS * (AGE + 1) - 1):
        push(made, buffers, version, number // GROUPS, monkeypatch)
        wait_until(lambda n=number: hooks.said[-1] == ((n + 1) * GENERATIONS, whole))  # type: ignore[misc]
    push(made, buffers, version, AGE, monkeypatch)
    wait_until(lambda: hooks.said[-1] is None)
    # Training takes a step: another target may be filled.
    sampled = made.handle.actor.sample(GROUPS, 0, AGE)
    assert len(sampled["trajectories"]) == GROUPS
    made.collector.set_weight_version(1)
    # Versions 1 and 2 are there and were not taken; only they may be filled now.
    assert made.collector._calculate_target_weights(1) == [2, 3]
    wait_until(lambda: hooks.said[-1] == (STEP, 2 * STEP))
    assert made.collector.rlix_dispatch_counts().finished == 7


def test_a_step_that_training_waits_for_is_wanted_whoever_may_fill_it(made: Any) -> None:
    made.collector.set_weight_version(4)
    made.collector.start_collection(made.data)
    wait_until(lambda: made.hooks.said[-1:] == [(0, 2 * STEP)])
    made.handle.actor.sample(GROUPS, 4, AGE)
    wait_until(lambda: made.hooks.said[-1] == (0, 3 * STEP))


def test_open_requests_and_validation_are_demand(made: Any, buffers: Any) -> None:
    collector, hooks = made.collector, made.hooks
    for target in range(AGE + 1):
        for _ in range(GROUPS):
            collector.replay_buffer.add.remote(trajectory(buffers), 0, target)
    made.generation.open = 3
    collector.start_collection(made.data)
    whole = STEP * (AGE + 1)
    wait_until(lambda: hooks.said == [(whole, whole + 3)])
    made.handle.actor.rlix_note_extra(10)
    wait_until(lambda: hooks.said[-1] == (whole, whole + 13))
    made.generation.open = 0
    made.handle.actor.rlix_note_extra(0)
    wait_until(lambda: hooks.said[-1] is None)


def test_nothing_is_wanted_when_the_data_are_at_an_end(made: Any) -> None:
    made.handle.actor.sample(GROUPS, 0, AGE)
    made.collector.start_collection(made.data)
    wait_until(lambda: made.hooks.said == [(0, STEP * (AGE + 1))])
    made.ended.set()
    wait_until(lambda: made.hooks.said[-1] is None)


def test_demand_is_withdrawn_when_the_buffer_has_ended(made: Any) -> None:
    made.collector.start_collection(made.data)
    wait_until(lambda: bool(made.hooks.said))
    made.handle.gone = True
    wait_until(lambda: made.hooks.said[-1] is None)


def test_a_push_does_not_wait_for_a_report(
    made: Any, buffers: Any, version: NemoRl, monkeypatch: pytest.MonkeyPatch
) -> None:
    made.hooks.hold.clear()
    made.collector.start_collection(made.data)
    started = time.monotonic()
    for _ in range(20):
        push(made, buffers, version, 0, monkeypatch)
    assert time.monotonic() - started < 10.0
    assert made.hooks.said == []
    assert made.handle.actor.size() == 20


def test_half_answered_groups_are_not_trained_on(
    made: Any, buffers: Any, version: NemoRl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rollouts swallow the error of a request and pass on what there is."""
    made.collector.running = True
    made.generation.rlix_failure = NoLiveShardError("every shard has failed")
    if version is NemoRl.MAIN:
        with pytest.raises(CollectionFailedError):
            push(made, buffers, version, 0, monkeypatch)
    else:  # it prints what a push raises, and goes on
        push(made, buffers, version, 0, monkeypatch)
    assert made.handle.actor.size() == 0
    with pytest.raises(CollectionFailedError, match="every shard has failed"):
        made.handle.actor.sample(GROUPS, 0, AGE)


def test_without_hooks_nothing_is_reported(
    collectors: Any, buffers: Any, version: NemoRl, master_config: Any
) -> None:
    collector = collectors.ReportingCollector(
        policy_generation=Generation(),
        tokenizer=None,
        task_to_env={},
        master_config=master_config,
        replay_buffer=Handle(make_buffer(buffers, version)),
    )
    before = threading.active_count()
    collector.dataloader = []
    collector.start_collection([])
    collector.collection_thread.join(10.0)
    assert threading.active_count() <= before
