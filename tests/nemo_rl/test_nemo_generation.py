"""NeMo RL's generation object over shards that come and go, on the classes of a checkout."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib
import importlib.util
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_workers
import pytest
import ray
import torch
from fake_workers import FakeGroup
from fakes.engine import FakeEngine, reference_tokens
from fakes.pipeline import FakePipeline, LocalSource, fake_pipeline, wait_until

from nemo_rl_rlix.errors import (
    GrantRequiredError,
    NoLiveShardError,
    PipelineClosedError,
    SettingError,
    ShardFailedError,
)
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot

STOP = 13


def config() -> dict[str, Any]:
    return {
        "backend": "vllm",
        "model_name": "none",
        "max_new_tokens": 40,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": None,
        "num_prompts_per_step": 2,
        "stop_token_ids": [STOP],
        "stop_strings": None,
        "colocated": {"enabled": False, "resources": {}},
        "vllm_kwargs": {},
        "vllm_cfg": {
            "async_engine": True,
            "enable_vllm_metrics_logger": True,
            "max_model_len": 60,
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "expert_parallel_size": 1,
            "precision": "bfloat16",
            "kv_cache_dtype": "auto",
        },
    }


@pytest.fixture(scope="module")
def module(importable: Path) -> Any:
    """The module under test; importing it imports NeMo RL."""
    if importlib.util.find_spec("nemo_rl") is None:
        pytest.skip("the checkout is not on PYTHONPATH: use make test-nemo-rl")
    return importlib.import_module("nemo_rl_rlix.nemo_rl.generation")


@pytest.fixture(scope="module")
def batch(module: Any) -> Any:
    return module.BatchedDataDict


class Coordinator:
    """The coordinator's handle, over an owner in this process."""

    def __init__(self, pipeline: FakePipeline) -> None:
        self._pipeline = pipeline
        self.resize_infer = SimpleNamespace(remote=self._resize_later)

    def resize(self, remove: list[int], add: list[int]) -> None:
        if remove:
            self._pipeline.owner.shrink(remove)
        if add:
            self._pipeline.owner.expand(add)

    def _resize_later(self, remove: list[int], add: list[int]) -> None:
        threading.Thread(target=self.resize, args=(remove, add), daemon=True).start()


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    cancelled: list[Any] = []
    monkeypatch.setattr(ray, "get", fake_workers.get)
    monkeypatch.setattr(ray, "put", fake_workers.Ready)
    monkeypatch.setattr(ray, "cancel", cancelled.append)
    return cancelled


@contextlib.contextmanager
def running(
    module: Any,
    monkeypatch: pytest.MonkeyPatch,
    *,
    active: tuple[int, ...] = (0, 1),
    settings: dict[str, Any] | None = None,
    step_s: float = 0.001,
) -> Iterator[tuple[Any, FakePipeline]]:
    """A generation object that never saw NeMo RL's constructor, over fake shards."""
    block = {"routing": {"long_poll_s": 0.2, "redispatch_backoff_s": 0.002}}
    with fake_pipeline(2, active=active, make_engine=lambda: FakeEngine(step_s=step_s)) as below:
        generation = object.__new__(module.TimeSharedVllmGeneration)
        generation.cfg = config()
        generation.worker_group = FakeGroup(below.shards, generation.cfg, module.BatchedDataDict)
        generation.dp_size = 2
        generation._step_metrics_snapshot = None
        coordinator = Coordinator(below)
        generation._rlix_attach(
            module.Link(
                "pipe",
                RLixSettings.from_recipe({**block, **(settings or {})}),
                LocalSource(below.table, below.owner),
                coordinator,
            )
        )
        monkeypatch.setattr(
            module, "call", lambda handle, name, *args, timeout_s: handle.resize(*args)
        )
        try:
            yield generation, below
        finally:
            generation._rlix_router.close()
        assert below.violations() == []


def prompt(number: int) -> list[int]:
    return [number % 90 + 1, 3, number % 7 + 2]


def request(batch: Any, ids: list[int]) -> Any:
    return batch(
        {
            "input_ids": torch.tensor([[*ids, 0, 0]]),
            "input_lengths": torch.tensor([len(ids)]),
            "stop_strings": [None],
        }
    )


async def ask(generation: Any, data: Any, method: str = "generate_async") -> Any:
    answers = [item async for item in getattr(generation, method)(data)]
    assert len(answers) == 1 and answers[0][0] == 0
    return answers[0][1]


def check(answer: Any, ids: list[int]) -> None:
    """The answer is what an undisturbed engine gives, with nothing of an aborted one."""
    expected = reference_tokens(0, ids, 40, (STOP,))
    assert answer["output_ids"].tolist() == [[*ids, *expected]]
    logprobs = [0.0] * len(ids) + [-(token % 100) / 100 for token in expected]
    assert torch.allclose(answer["logprobs"], torch.tensor([logprobs]))
    assert int(answer["generation_lengths"][0]) == len(expected)
    assert int(answer["unpadded_sequence_lengths"][0]) == len(ids) + len(expected)
    assert bool(answer["truncated"][0]) is (STOP not in expected)


@pytest.mark.parametrize("policy", ["resume", "restart"])
def test_many_event_loops_lose_no_request_over_shrinks_to_zero(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any], policy: str
) -> None:
    threads, each = 6, 8
    routing = {
        "routing": {
            "preempted_requests": policy,
            "long_poll_s": 0.2,
            "redispatch_backoff_s": 0.002,
        }
    }

    def rollout(generation: Any, thread: int) -> list[Any]:
        async def turns() -> list[Any]:
            numbers = [thread * each + number for number in range(each)]
            first = await asyncio.gather(
                *(ask(generation, request(batch, prompt(n))) for n in numbers)
            )
            # A second turn: the first answer is part of its prompt, as in multi-turn rollouts.
            second = [answer["output_ids"][0, -4:].tolist() for answer in first]
            answers = await asyncio.gather(
                *(ask(generation, request(batch, ids)) for ids in second)
            )
            for ids, answer in zip(second, answers, strict=True):
                check(answer, ids)
            for n, answer in zip(numbers, first, strict=True):
                check(answer, prompt(n))
            return [*first, *answers]

        return asyncio.run(turns())

    with running(module, monkeypatch, settings=routing, step_s=0.004) as (generation, below):
        with ThreadPoolExecutor(threads) as pool:
            rollouts = [pool.submit(rollout, generation, thread) for thread in range(threads)]
            for ranks in ([0], [1], [0, 1], [0, 1]):
                wait_until(lambda: bool(generation._rlix_router.in_flight()), 10.0)
                below.owner.shrink(ranks)
                below.owner.expand(ranks)
            answers = [answer for done in rollouts for answer in done.result(60)]
        counts = generation.rlix_dispatch_counts()
        assert counts.finished == len(answers) == 2 * threads * each
        assert counts.preempted > 0
        assert (counts.tokens_kept > 0) is (policy == "resume")
        assert len(generation.worker_group.threads) == threads
        assert generation.rlix_open_requests() == 0
        leaders = {answer["gen_leader_worker_idx"][0] for answer in answers}
        assert leaders == {0, fake_workers.WORKERS_PER_SHARD}


class Letters:
    """A tokenizer of single characters."""

    pad_token_id = 0

    def batch_decode(self, rows: list[Any], skip_special_tokens: bool) -> list[str]:
        return ["".join(chr(int(token) + 32) for token in row) for row in rows]

    def __call__(self, text: str, return_tensors: str, add_special_tokens: bool) -> Any:
        return SimpleNamespace(input_ids=torch.tensor([[ord(char) - 32 for char in text]]))


class Echo:
    """An environment that answers twice and then ends the episode."""

    def __init__(self) -> None:
        self.step = SimpleNamespace(remote=self._step)

    def _step(self, logs: list[Any], infos: list[Any]) -> fake_workers.Ready:
        from nemo_rl.environments.interfaces import EnvironmentReturn

        turns = [sum(message["role"] == "assistant" for message in log) for log in logs]
        return fake_workers.Ready(
            EnvironmentReturn(
                observations=[{"role": "environment", "content": "go"} for _ in logs],
                metadata=infos,
                next_stop_strings=[None] * len(logs),
                rewards=torch.ones(len(logs)),
                terminateds=torch.tensor([turn >= 3 for turn in turns]),
                answers=[None] * len(logs),
            )
        )


def test_nemo_rls_own_rollouts_take_every_turn_over_preemptions(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    """Rollouts swallow the error of a request: a turn that is missing is a lost one."""
    from nemo_rl.experience.rollouts import run_async_multi_turn_rollout

    samples, threads = 4, 3
    limit = {"max_new_tokens": 8}

    def rollout(generation: Any, thread: int) -> Any:
        logs = [
            [{"role": "user", "content": "x", "token_ids": torch.tensor(prompt(thread * 9 + n))}]
            for n in range(samples)
        ]
        start = batch(
            {
                "message_log": logs,
                "extra_env_info": [{} for _ in logs],
                "task_name": ["echo"] * samples,
                "loss_multiplier": torch.ones(samples),
                "idx": list(range(samples)),
                "length": torch.tensor([3] * samples),
                "stop_strings": [None] * samples,
            }
        )
        final, _ = run_async_multi_turn_rollout(
            policy_generation=generation,
            input_batch=start,
            tokenizer=Letters(),
            task_to_env={"echo": Echo()},
            max_seq_len=60,
            max_rollout_turns=5,
        )
        return final

    with running(module, monkeypatch, step_s=0.01) as (generation, below):
        generation.cfg.update(limit)
        with ThreadPoolExecutor(threads) as pool:
            rollouts = [pool.submit(rollout, generation, thread) for thread in range(threads)]
            for ranks in ([0], [1], [0, 1]):
                wait_until(lambda: bool(generation._rlix_router.in_flight()), 10.0)
                below.owner.shrink(ranks)
                below.owner.expand(ranks)
            finals = [done.result(60) for done in rollouts]
        assert generation.rlix_dispatch_counts().preempted > 0
    answered = 0
    for thread, final in enumerate(finals):
        for number, log in enumerate(final["message_log"]):
            turns = undisturbed(prompt(thread * 9 + number))
            assert [m["token_ids"].tolist() for m in log if m["role"] == "assistant"] == turns
            answered += len(turns)
            for message in log:
                if message["role"] == "assistant":
                    expected = [-(token % 100) / 100 for token in message["token_ids"].tolist()]
                    assert message["generation_logprobs"].tolist() == pytest.approx(expected)
    assert generation.rlix_dispatch_counts().finished == answered > samples * threads


def undisturbed(ids: list[int]) -> list[list[int]]:
    """Answers of an episode: three at most, and a truncated one ends it."""
    seen, turns = list(ids), list[list[int]]()
    while len(turns) < 3 and (not turns or turns[-1][-1] == STOP):
        turns.append(list(reference_tokens(0, seen, 8, (STOP,))))
        seen += [*turns[-1], ord("g") - 32, ord("o") - 32]
    return turns


def test_text_requests_start_again(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=(0,), step_s=0.01) as (generation, below):
        ids = [ord(char) % 90 for char in "hi"]
        data = batch({"prompts": ["hi"]})

        async def one() -> Any:
            return await ask(generation, data, "generate_text_async")

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(asyncio.run, one())
            wait_until(lambda: bool(below.shards[0].engine.running), 10.0)
            below.owner.shrink([0])
            below.owner.expand([1])
            texts = answer.result(30)["texts"]
        assert texts == [" ".join(map(str, reference_tokens(0, ids, 40, (STOP,))))]
        assert generation.rlix_dispatch_counts().preempted == 1


def test_the_checks_of_the_base_class_hold(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch) as (generation, _):

        async def answers(data: Any) -> list[Any]:
            return [item async for item in generation.generate_async(data)]

        empty = batch({"input_ids": torch.zeros(0, 3), "input_lengths": torch.zeros(0)})
        assert asyncio.run(answers(empty)) == []
        two = batch({"input_ids": torch.zeros(2, 3), "input_lengths": torch.tensor([3, 3])})
        with pytest.raises(AssertionError, match="one sample"):
            asyncio.run(answers(two))
        generation.cfg["vllm_cfg"]["async_engine"] = False
        with pytest.raises(RuntimeError, match="async_engine"):
            asyncio.run(answers(request(batch, [1])))
        with pytest.raises(RuntimeError, match="generate_async"):
            generation.generate(request(batch, [1]))


def test_a_request_that_waits_can_be_cancelled_and_holds_nothing(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=()) as (generation, below):

        async def give_up() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(generation, request(batch, [1])), 0.1)

        asyncio.run(give_up())
        assert generation.rlix_open_requests() == 0
        below.owner.expand([1])
        check(asyncio.run(ask(generation, request(batch, [1]))), [1])


def test_a_cancelled_request_is_cancelled_in_its_worker(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, step_s=0.05) as (generation, _):

        async def give_up() -> None:
            task = asyncio.create_task(ask(generation, request(batch, [1])))
            while not generation._rlix_router.in_flight():
                await asyncio.sleep(0.005)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(give_up())
        assert len(no_ray) == 1
        assert generation.rlix_open_requests() == 0


def test_an_actor_that_is_gone_is_no_failure_of_the_request(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch) as (generation, _):
        generation.worker_group.gone.add(0)
        check(asyncio.run(ask(generation, request(batch, [4]))), [4])


def test_a_bad_prompt_is_reported_as_the_version_does_it(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    known = importlib.util.find_spec("nemo_rl.experience.failures") is not None
    with running(module, monkeypatch) as (generation, _):
        generation.worker_group.broken.update((0, 1))
        with pytest.raises(Exception, match="too long") as caught:
            asyncio.run(ask(generation, request(batch, [4])))
    assert type(caught.value).__name__ == ("GenerationUnavailable" if known else "RuntimeError")


def test_what_ends_requests_for_good_is_remembered(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=()) as (generation, below):
        assert generation.rlix_failure is None and generation.rlix_end_cause() is None
        below.table.fail("every shard has failed")
        assert isinstance(generation.rlix_end_cause(), NoLiveShardError)
        with pytest.raises(NoLiveShardError):
            asyncio.run(ask(generation, request(batch, [4])))
        assert isinstance(generation.rlix_failure, NoLiveShardError)


def test_an_ended_pipeline_ends_waiting_requests(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=()) as (generation, below):
        threading.Timer(0.1, below.owner.close).start()
        with pytest.raises(PipelineClosedError):
            asyncio.run(ask(generation, request(batch, [4])))


def test_the_rfc_names_act_on_the_owner_and_views_show_it(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=(0,)) as (generation, below):
        assert generation._active_dp_ranks == {0}
        assert generation._preempted_shards == set()
        generation.wake_up_partial([1])
        generation.activate_dp_ranks([0, 1])
        assert generation._active_dp_ranks == {0, 1}
        generation.sleep_partial([1, 1], level=2)
        generation.sleep_partial([1])
        assert generation._active_dp_ranks == {0}
        generation.mark_dp_ranks_inactive([0, 1])
        assert generation._active_dp_ranks == set()
        wait_until(lambda: below.states() == {0: "ASLEEP", 1: "ASLEEP"}, 10.0)
        with pytest.raises(SettingError, match="sleep_level"):
            generation.sleep_partial([0], level=1)
        below.shards[1].faults["receive"] = ["die"] * 9
        below.shards[1].faults["build"] = ["hang"]
        with pytest.raises(ShardFailedError):
            generation.activate_dp_ranks([1])


def test_preempted_shards_are_seen_while_they_drain(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch) as (generation, below):
        seen: list[tuple[set[int], set[int]]] = []
        below.shards[1].before["drain"] = lambda: seen.append(
            (generation._preempted_shards, generation._active_dp_ranks)
        )
        below.owner.shrink([1])
        assert seen == [({1}, {0})]


def test_fan_outs_ask_only_shards_that_serve(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=(1,)) as (generation, below):
        asked = generation.worker_group.asked
        second = fake_workers.WORKERS_PER_SHARD
        assert generation.finish_generation() is True
        assert generation.finish_generation(release_gpu=False) is True
        assert generation.invalidate_kv_cache() is True
        assert generation.prepare_for_generation() is True
        metrics = generation.get_logger_metrics()
        assert metrics["inflight_batch_sizes"] == {1: [second]}
        generation.clear_logger_metrics()
        generation.start_gpu_profiling()
        generation.stop_gpu_profiling()
        assert {index for index, _ in asked} == {second, second + 1}
        assert {name for index, name in asked if index == second + 1} == {
            "start_gpu_profiling",
            "stop_gpu_profiling",
        }
        asked.clear()
        below.owner.shrink([1])
        assert generation.finish_generation() and generation.invalidate_kv_cache()
        assert generation.get_logger_metrics()["generation_tokens"] == {}
        assert asked == []


def test_counters_do_not_fall_when_a_shard_goes_to_sleep(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch) as (generation, below):
        generation.snapshot_step_metrics()
        before = generation._step_metrics_snapshot
        below.owner.shrink([0])
        assert generation._get_raw_spec_counters() == before
        assert before["vllm:spec_decode_num_drafts"] == 20.0 + fake_workers.WORKERS_PER_SHARD
        assert isinstance(generation.get_step_metrics(), dict)


def test_a_shard_that_dies_under_a_metrics_call_does_not_end_the_loop(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    def fails(refs: Any, timeout: float | None = None) -> Any:
        raise ray.exceptions.RayActorError()

    with running(module, monkeypatch) as (generation, _):
        monkeypatch.setattr(ray, "get", fails)
        assert generation.get_logger_metrics() == {}
        generation.clear_logger_metrics()
        generation.snapshot_step_metrics()
        assert generation.finish_generation() is False


def test_a_copy_routes_by_itself_and_ends_nothing(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    with running(module, monkeypatch, active=(0,)) as (generation, _):
        group, link = generation.worker_group, generation._rlix
        generation.weight_synchronizer = threading.Lock()  # not picklable, nor to be shared
        generation.fleet_monitor = threading.Lock()
        source = Frozen(RoutingSnapshot(5, states={0: "ACTIVE", 1: "ASLEEP"}))
        router = module.ShardRouter(source, link.settings.routing, name="pipe")
        router.apply(source.snapshot)
        vars(generation).update(
            worker_group="group",
            _rlix=module.Link("pipe", link.settings, source, None),
            _rlix_router=router,
        )
        copy = pickle.loads(pickle.dumps(generation))
        assert type(copy) is module.TimeSharedVllmGeneration
        assert copy.weight_synchronizer is None and copy.fleet_monitor is None
        assert generation.weight_synchronizer is not None
        assert copy._active_dp_ranks == {0}
        copy.worker_group = group
        check(asyncio.run(ask(copy, request(batch, [8]))), [8])
        assert copy.rlix_dispatch_counts().finished == 1
        assert generation.rlix_dispatch_counts().finished == 0
        assert copy.shutdown() is True
        del copy
        gc.collect()
        assert group.shut_down == []
        vars(generation).update(worker_group=group, weight_synchronizer=None)
        assert generation.shutdown() is True
        assert group.shut_down == ["shutdown"]


class Frozen:
    def __init__(self, snapshot: RoutingSnapshot) -> None:
        self.snapshot = snapshot

    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        return self.snapshot

    def suspect(self, dp_rank: int) -> None:
        raise AssertionError


def test_the_run_is_told_why_no_shard_serves_any_more(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    run = Run()
    run.pipeline_id = "pipe"
    monkeypatch.setattr(module.session, "find", lambda: run)
    with running(module, monkeypatch) as (generation, below):
        below.table.fail("every shard has failed")
        assert generation.shutdown() is True
        assert run.events == [str(NoLiveShardError("every shard has failed")), "left"]


def test_a_half_built_object_can_be_deleted(module: Any) -> None:
    generation = object.__new__(module.TimeSharedVllmGeneration)
    assert generation.shutdown() is True
    generation.__del__()


class Run:
    """A session: what the constructor asks of it, in order."""

    pipeline_id = "pipe-1"
    settings = RLixSettings.from_recipe({"sleeping_memory_mib": 9})
    coordinator = "handle"
    router_source = Frozen(RoutingSnapshot(0))

    def __init__(self) -> None:
        self.events: list[Any] = []

    @contextlib.contextmanager
    def build_turn(self) -> Iterator[None]:
        self.events.append("turn")
        yield
        self.events.append("turn over")

    def announce_leaders(self, leaders: dict[int, Any]) -> None:
        self.events.append({rank: leader.index for rank, leader in leaders.items()})

    def fail(self, error: BaseException) -> None:
        self.events.append(str(error))

    def leave(self) -> None:
        self.events.append("left")


def test_the_real_constructor_builds_in_its_turn_under_names_of_its_own(
    module: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any]
) -> None:
    base = importlib.import_module("nemo_rl.models.generation.vllm.vllm_generation")
    run, made = Run(), []

    class Group(FakeGroup):
        def __init__(self, cluster: Any, builder: Any, **kwargs: Any) -> None:
            run.events.append(kwargs["name_prefix"])
            made.append(builder)
            super().__init__({0: None, 1: None}, {}, None)  # type: ignore[dict-item]

    monkeypatch.setattr(base, "RayWorkerGroup", Group)
    monkeypatch.setattr(base, "RayWorkerBuilder", lambda *args, **kwargs: args)
    monkeypatch.setattr(module.session, "current", lambda: run)
    monkeypatch.setattr(module.session, "find", lambda: run)
    cluster = SimpleNamespace(
        world_size=lambda: 2,
        num_gpus_per_node=2,
        _init_placement_groups=lambda **kwargs: None,
    )
    cfg = config()
    needed = {key: None for key in base.VllmConfig.__required_keys__ if key not in cfg}
    generation = module.TimeSharedVllmGeneration(cluster=cluster, config={**needed, **cfg})
    second = fake_workers.WORKERS_PER_SHARD
    assert run.events == ["turn", "pipe-1-vllm_policy", {0: 0, 1: second}, "turn over"]
    shard = made[0][1]["rlix_shard"]
    assert shard["pipeline_id"] == "pipe-1"
    assert shard["sleeping_budget_bytes"] == 9 * 1024 * 1024
    assert generation.weight_synchronizer is None
    assert generation.init_collective("ip", 1, 2, train_world_size=1) == []
    for refused in ("update_weights_via_ipc_zmq", "update_weights_from_collective"):
        with pytest.raises(RuntimeError, match="synchronizer"):
            getattr(generation, refused)()
    with pytest.raises(SettingError):
        module.TimeSharedVllmGeneration(cluster=cluster, config=cfg, defer_model_load=True)
    assert generation.shutdown() is True
    assert run.events[-1] == "left", "the pipeline leaves before its workers die"
    assert generation.worker_group.shut_down == ["shutdown"]


def test_a_failed_build_leaves_an_object_that_ends_in_silence(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Refusing(Run):
        @contextlib.contextmanager
        def build_turn(self) -> Iterator[None]:
            raise GrantRequiredError("pipe", [0], "build")
            yield

    monkeypatch.setattr(module.session, "current", Refusing)
    with pytest.raises(GrantRequiredError):
        module.TimeSharedVllmGeneration(cluster=None, config=config())
    gc.collect()


@pytest.fixture
def health(module: Any) -> Any:
    name = "nemo_rl.models.generation.fleet_health"
    if importlib.util.find_spec(name) is None:
        pytest.skip("this version has no fleet health")
    return importlib.import_module(name)


def attach(generation: Any, health: Any) -> Any:
    monitor = health.GenerationFleetHealth(
        shard_count=2, policy=health.FleetHealthPolicy(unhealthy_threshold=2)
    )
    generation.attach_fleet_health(monitor, health.HealthyShardSelector(monitor=monitor))
    return monitor


def test_a_quarantined_shard_gets_no_requests_and_a_preempted_one_no_blame(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any], health: Any
) -> None:
    with running(module, monkeypatch, step_s=0.01) as (generation, below):
        monitor = attach(generation, health)
        monitor.retire(0, reason="test")
        for number in range(4):
            answer = asyncio.run(ask(generation, request(batch, prompt(number))))
            assert answer["gen_leader_worker_idx"] == [fake_workers.WORKERS_PER_SHARD]

        async def one() -> Any:
            return await ask(generation, request(batch, [4]))

        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(asyncio.run, one())
            for _ in range(3):
                wait_until(lambda: bool(below.shards[1].engine.running), 10.0)
                below.owner.shrink([1])
                below.owner.expand([1])
            check(answer.result(30), [4])
        assert monitor.state_of(1) is health.ShardState.HEALTHY
        assert monitor.snapshot()[1].consecutive_reported_failures == 0


def test_fleet_health_hears_of_failures_and_of_successes(
    module: Any, batch: Any, monkeypatch: pytest.MonkeyPatch, no_ray: list[Any], health: Any
) -> None:
    failures = importlib.import_module("nemo_rl.experience.failures")
    with running(module, monkeypatch) as (generation, _):
        monitor = attach(generation, health)
        generation.worker_group.broken.add(0)
        with pytest.raises(failures.GenerationUnavailable):
            asyncio.run(ask(generation, request(batch, [4])))
        assert monitor.snapshot()[0].consecutive_reported_failures == 1
        generation.worker_group.broken.clear()
        check(asyncio.run(ask(generation, request(batch, [4]))), [4])
        assert monitor.snapshot()[0].consecutive_reported_failures == 0
        for rank in (0, 1):
            monitor.retire(rank, reason="test")
        with pytest.raises(failures.NoHealthyShards):
            asyncio.run(ask(generation, request(batch, [4])))
