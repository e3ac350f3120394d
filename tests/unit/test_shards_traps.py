"""What has gone wrong for others with sleep, abort, drain, wake and weights: once each.

The faults of single calls are in ``test_shards_faults``, the drain itself in
``test_shards_admission``.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import gc
import pickle
import threading
import time
from collections.abc import Iterator

import pytest
from fakes.engine import WEIGHT_NAMES, FakeEngine, reference_tokens
from fakes.pipeline import SHORT, Background, FakePipeline, fake_pipeline, wait_until
from fakes.shard import BUDGET_BYTES, LEAVE, RAISE, FakeShard, cache_handle

from nemo_rl_rlix.errors import PipelineClosedError, ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.settings import PreemptedRequests
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot
from nemo_rl_rlix.shards.state import ShardState

S = ShardState


@pytest.fixture
def background() -> Iterator[Background]:
    loop = Background()
    yield loop
    loop.stop()


def greedy(name: str, tokens: int) -> GenerationRequest:
    return GenerationRequest(name, (len(name), *name.encode()), tokens, temperature=0.0)


def is_right(output: GenerationOutput, request: GenerationRequest, version: int = 0) -> bool:
    wanted = reference_tokens(version, request.prompt_ids, request.max_new_tokens)
    return output.token_ids == wanted


def start_on(
    p: FakePipeline, background: Background, rank: int, tokens: int, count: int
) -> list[tuple[GenerationRequest, concurrent.futures.Future[GenerationOutput]]]:
    """Start requests until ``count`` of them are in the engine of a rank."""
    started = []
    while len(p.shards[rank].engine.internal_ids()) < count:
        request = greedy(f"q{len(started)}", tokens)
        started.append((request, background.start(p.answer(request))))
        place = len(started)
        wait_until(lambda place=place: sum(p.router.in_flight().values()) == place)
        time.sleep(0.003)
    return started


def test_memory_is_never_unmapped_under_a_running_step(background: Background) -> None:
    """Two long generations, shrink: both go on elsewhere, the engine answers afterwards."""
    with fake_pipeline(2, active=(0, 1), make_engine=lambda: FakeEngine(step_s=0.01)) as p:
        started = start_on(p, background, 1, 60, 1)
        p.owner.shrink([1])
        steps = p.shards[1].engine.steps
        for request, future in started:
            assert is_right(future.result(10), request)
        assert p.shards[1].engine.steps == steps
        assert p.violations() == []
        p.owner.expand([1])
        assert p.states() == {0: "ACTIVE", 1: "ACTIVE"}


def test_requests_parked_on_a_shard_that_is_taken_finish_on_another(
    background: Background,
) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        started = start_on(p, background, 1, 400, 3)
        p.owner.shrink([1])
        for request, future in started:
            output = future.result(10)
            assert is_right(output, request)
            assert output.dp_rank == 0
        assert p.stats.counts.preempted > 0


def test_a_second_turn_sent_while_the_shard_is_being_taken_goes_elsewhere(
    background: Background,
) -> None:
    """A caller whose first turn ends at the shrink sends the next one 50 ms later."""
    delayed = lambda: FakeEngine(admission_delay_s=0.1)  # noqa: E731
    with fake_pipeline(2, active=(0, 1), make_engine=delayed) as p:

        async def two_turns() -> list[GenerationOutput]:
            first = await p.answer(greedy("turn", 5))
            await asyncio.sleep(0.05)
            second = await p.answer(greedy("turns", 5))
            return [first, second]

        conversations = [background.start(two_turns()) for _ in range(4)]
        wait_until(lambda: p.shards[1].gate.in_flight > 0)
        p.owner.shrink([1])
        assert p.shards[1].gate.in_flight == 0  # callers, not only the engine's table
        for conversation in conversations:
            first, second = conversation.result(10)
            assert is_right(first, greedy("turn", 5))
            assert is_right(second, greedy("turns", 5))
            assert second.dp_rank == 0
        assert p.violations() == []


def test_a_request_that_passed_the_gate_just_before_does_not_survive_the_sleep(
    background: Background,
) -> None:
    delayed = lambda: FakeEngine(admission_delay_s=0.1)  # noqa: E731
    with fake_pipeline(1, active=(0,), make_engine=delayed) as p:
        asked = background.start(p.answer(greedy("r", 5)))
        wait_until(lambda: p.shards[0].engine.preprocessing == 1)
        p.owner.shrink([0])
        assert p.shards[0].engine.internal_ids() == []
        assert p.shards[0].engine.preprocessing == 0
        assert not asked.done()
        p.owner.expand([0])
        assert is_right(asked.result(10), greedy("r", 5))
        assert p.violations() == []


def test_the_time_of_a_drain_does_not_depend_on_the_longest_request(
    background: Background,
) -> None:
    with fake_pipeline(1, active=(0,), make_engine=lambda: FakeEngine(step_s=0.02)) as p:
        background.start(p.answer(greedy("long", 500)))  # ten seconds
        wait_until(lambda: p.shards[0].engine.steps > 0)
        started = time.monotonic()
        p.owner.shrink([0])
        assert time.monotonic() - started < 1.0
        assert p.state(0) is S.ASLEEP


def test_no_decision_comes_from_the_gauge(background: Background) -> None:
    with fake_pipeline(1, active=(0,)) as p:
        for number in range(3):
            background.start(p.answer(greedy(f"r{number}", 5000)))
        wait_until(lambda: p.shards[0].engine.gauge_running == 3)
        report = p.owner.shrink([0])
        assert p.shards[0].engine.gauge_running == 3  # it refreshes on a step only
        assert report.outcomes[0].state == "ASLEEP"
        assert report.outcomes[0].aborted == 3


def test_an_abort_that_does_nothing_is_reported_and_never_followed_by_a_sleep(
    background: Background,
) -> None:
    """Aborts by the wrong kind of id: the table does not empty."""
    limits = SHORT.model_copy(update={"drain_s": 0.3})
    with fake_pipeline(2, active=(0, 1), deadlines=limits) as p:
        started = start_on(p, background, 1, 400, 2)
        engine, abort = p.shards[1].engine, p.shards[1].engine.abort

        async def by_external_id(ids: list[str], *, internal: bool = False) -> None:
            await abort(ids, internal=False)

        engine.abort = by_external_id  # type: ignore[method-assign]
        begun = time.monotonic()
        report = p.owner.shrink([1])
        assert time.monotonic() - begun < 2.0
        assert "requests left" in report.outcomes[0].cause
        assert "sleep" not in p.shards[1].calls
        assert p.shards[1].held_bytes == 0
        for request, future in started:
            assert is_right(future.result(10), request)
        assert p.violations() == []


def test_an_abort_is_no_sample_even_where_nothing_can_go_on(background: Background) -> None:
    for policy in PreemptedRequests:
        with fake_pipeline(1, active=(0,)) as p:
            asked = background.start(p.answer(greedy("r", 100), policy))
            wait_until(lambda p=p: p.shards[0].engine.steps >= 7)
            p.owner.shrink([0])
            time.sleep(0.02)
            assert not asked.done()
            p.owner.close()
            with pytest.raises(PipelineClosedError):
                asked.result(5)


def test_shrinking_to_nothing_and_again_is_ordinary(background: Background) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        asked = background.start(p.answer(greedy("r", 200)))
        wait_until(lambda: p.router.in_flight() != {})
        p.owner.shrink([0, 1])
        assert p.states() == {0: "ASLEEP", 1: "ASLEEP"}
        before = p.table.snapshot()
        calls = [list(shard.calls) for shard in p.shards.values()]
        report = p.owner.shrink([1, 1])
        assert [outcome.state for outcome in report.outcomes] == ["ASLEEP"]
        assert [shard.calls for shard in p.shards.values()] == calls
        assert p.table.snapshot().states == before.states
        assert not asked.done()
        p.owner.expand([1])
        assert asked.result(5).dp_rank == 1


def test_ranks_that_nobody_knows_are_ignored() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        assert p.owner.shrink([7, -1]).outcomes == ()
        assert p.owner.expand([7]).outcomes == ()
        p.owner.suspect(7)
        assert p.state(0) is S.ACTIVE


def test_a_shard_that_was_never_built_is_not_served_by_an_expand() -> None:
    with fake_pipeline(2) as p:
        p.table._records[1] = type(p.table.get(1))(1)
        assert p.owner.expand([1]).outcomes[0].state == "UNBUILT"
        assert p.owner.shrink([1]).outcomes[0].state == "UNBUILT"


def test_the_routing_state_survives_the_way_into_another_process() -> None:
    with fake_pipeline(2, active=(0,)) as p:
        snapshot = p.table.snapshot()
        assert pickle.loads(pickle.dumps(snapshot)) == snapshot
        assert (snapshot.active, snapshot.preempted) == ({0}, frozenset())


def test_a_dispatcher_with_a_stale_active_set_does_not_deadlock(background: Background) -> None:
    """The replica never hears of the shrink; the gate turns the request away."""
    with fake_pipeline(2, active=(0, 1)) as p:
        stale = RoutingSnapshot(10_000, {0: "ACTIVE", 1: "ACTIVE"})
        p.router.apply(stale)
        p.owner.shrink([0])
        output = background.start(p.answer(greedy("r", 5))).result(5)
        assert output.dp_rank == 1
        assert (p.stats.counts.refused, output.dispatches) == (1, 1)


def test_a_sleep_that_fails_after_unmapping_leaves_a_known_state() -> None:
    """As vLLM's does when another process of the card grew meanwhile."""
    with fake_pipeline(2, active=(0, 1)) as p:
        engine = p.shards[0].engine
        asleep = engine.sleep

        def unmap_and_raise(level: int) -> None:
            asleep(level)
            raise RuntimeError("memory usage increased after sleeping")

        engine.sleep = unmap_and_raise  # type: ignore[method-assign]
        report = p.owner.shrink([0])
        assert report.outcomes[0].state == "FAILED"
        assert not p.shards[0].alive
        p.owner.expand([0])
        wait_until(lambda: p.state(0) is S.ACTIVE)
        output = asyncio.run(p.answer(greedy("r", 6)))
        assert is_right(output, greedy("r", 6))
        assert p.violations() == []


def test_a_request_for_a_sleeping_shard_is_refused_and_does_not_wait_inside_it() -> None:
    with fake_pipeline(1) as p:
        with pytest.raises(ShardPreemptedError) as refused:
            asyncio.run(p.shards[0].serve(greedy("r", 3)))
        assert refused.value.partial.token_ids == ()
        assert p.shards[0].engine.internal_ids() == []


def test_a_request_that_got_into_a_sleeping_engine_never_runs_on_unsynced_weights(
    background: Background,
) -> None:
    with fake_pipeline(1) as p:
        life = p.shards[0]._process
        assert life is not None
        stray = life.submit(life.engine.generate("stray", (1,), 3))
        wait_until(lambda: life.engine.internal_ids() != [])
        p.owner.expand([0])
        wait_until(lambda: p.state(0) is S.ACTIVE)
        assert stray.exception(1) is not None or stray.result().finish_reason == "abort"
        assert is_right(background.start(p.answer(greedy("r", 4))).result(5), greedy("r", 4))


def test_nothing_is_admitted_before_every_tag_is_awake_and_synced(
    background: Background,
) -> None:
    """Callers knock all the while; a step between the two wakes would crash the engine."""
    with fake_pipeline(1) as p:
        admitted_at: list[tuple[str, int]] = []

        def knock(call: str) -> None:
            for _ in range(5):
                try:
                    asyncio.run(p.shards[0].serve(greedy("knock", 2)))
                    admitted_at.append((call, p.table.get(0).weights_version))
                except ShardPreemptedError:
                    pass

        for call in ("wake_weights", "receive", "finalize_weights", "wake_kv_cache", "probe"):
            p.shards[0].before[call] = lambda call=call: knock(call)
        p.owner.expand([0])
        assert admitted_at == []
        assert p.violations() == []
        assert p.state(0) is S.ACTIVE


def test_an_expand_wakes_in_the_order_that_leaves_room_for_weights() -> None:
    with fake_pipeline(1) as p:
        p.shards[0].calls.clear()
        p.owner.expand([0])
        assert p.shards[0].calls == [
            "close_admission", "drain", "wake_weights", "receive", "finalize_weights",
            "wake_kv_cache", "reset_prefix_cache", "probe", "open_admission",
        ]  # fmt: skip
        p.shards[0].calls.clear()
        p.owner.shrink([0])
        assert p.shards[0].calls == ["close_admission", "drain", "sleep"]


@pytest.mark.parametrize(
    ("lacking", "unknown"),
    [(WEIGHT_NAMES[1:], ()), (WEIGHT_NAMES[:2], ()), (WEIGHT_NAMES, ("foreign",)), ((), ())],
)
def test_a_sync_that_is_not_complete_never_activates(
    lacking: tuple[str, ...], unknown: tuple[str, ...]
) -> None:
    """A missing weight, a missing buffer, one too many, nothing at all."""
    rebuild = threading.Event()
    with fake_pipeline(1, rebuild_pause=lambda _: rebuild.wait(5)) as p:
        p.weights.names = (*lacking, *unknown)
        report = p.owner.expand([0])
        assert report.outcomes[0].state == "FAILED"
        assert "weight sync incomplete" in report.outcomes[0].cause
        assert S.ACTIVE not in {change.after for change in p.history}
        rebuild.set()


def test_an_engine_with_a_tensor_that_the_cache_lacks_is_not_activated() -> None:
    extra = lambda: FakeEngine(names=(*WEIGHT_NAMES, "adapter"))  # noqa: E731
    with fake_pipeline(1, make_engine=extra) as p:
        report = p.owner.expand([0])
        assert "missing ['adapter']" in report.outcomes[0].cause


@pytest.mark.parametrize("sleep_level", [1, 2])
def test_answers_are_the_same_over_cycles_of_sleep(sleep_level: int) -> None:
    """Bit-equal, buffers included; level 1 keeps the weights and copies nothing again."""
    with fake_pipeline(1, active=(0,), sleep_level=sleep_level) as p:
        for _ in range(4):
            assert is_right(asyncio.run(p.answer(greedy("r", 20))), greedy("r", 20))
            p.owner.shrink([0])
            record = p.table.get(0)
            assert record.weights_discarded is (sleep_level == 2)
            p.owner.expand([0])
        assert p.shards[0].calls.count("receive") == (1 if sleep_level == 1 else 5)


def test_a_level_1_shard_that_slept_through_a_training_step_is_synced() -> None:
    with fake_pipeline(1, active=(0,), sleep_level=1) as p:
        p.owner.shrink([0])
        p.publish(1)
        p.owner.expand([0])
        assert is_right(asyncio.run(p.answer(greedy("r", 20))), greedy("r", 20), version=1)


def test_sleeping_or_waking_twice_is_a_no_op() -> None:
    shard = FakeShard(0)
    shard.build(timeout_s=5)
    first = shard.sleep(level=2, timeout_s=5)
    gc.collect()
    assert shard.sleep(level=2, timeout_s=5) == first
    shard.wake(tags=("weights",), timeout_s=5)
    shard.receive(cache_handle(1), timeout_s=5)
    shard.wake(tags=("weights",), timeout_s=5)
    shard.wake(tags=("kv_cache",), timeout_s=5)
    shard.wake(tags=("kv_cache",), timeout_s=5)
    shard.probe(timeout_s=5)
    shard.close()
    with fake_pipeline(1, active=(0,)) as p:
        p.shards[0].calls.clear()
        assert p.owner.expand([0, 0]).outcomes[0].state == "ACTIVE"
        assert p.shards[0].calls == []


def test_health_is_a_generated_token_not_a_status() -> None:
    """The process answers a ping and steps no more: it is never routed to."""
    limits = SHORT.model_copy(update={"probe_s": 0.3})
    with fake_pipeline(
        1, deadlines=limits, make_engine=lambda: FakeEngine(step_s=9.0), hang_share=1.0
    ) as p:
        started = time.monotonic()
        report = p.owner.expand([0])
        assert time.monotonic() - started < 2.0
        assert S.ACTIVE not in {change.after for change in p.history}
        assert "probe" in report.outcomes[0].cause


def test_a_sleep_that_frees_a_third_does_not_hand_the_gpu_over_until_the_process_is_gone() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        p.shards[0].faults["sleep"] = [LEAVE]
        report = p.owner.shrink([0])
        assert "sleeping_memory_mib" in report.outcomes[0].cause
        assert p.shards[0].held_bytes == 0
        assert p.shards[0].calls[-1] == "kill"


@pytest.mark.parametrize("clear_cache", [False, True])
def test_a_refresh_keeps_requests_and_their_tokens_say_their_versions(
    background: Background, clear_cache: bool
) -> None:
    with fake_pipeline(1, active=(0,), clear_cache=clear_cache) as p:
        request = greedy("r", 200)
        asked = background.start(p.answer(request))
        wait_until(lambda: p.shards[0].engine.steps > 20)
        p.publish(1)
        assert p.shards[0].engine.internal_ids() != []
        output = asked.result(10)
        old, new = output.segments
        assert (old.weights_version, new.weights_version) == (0, 1)
        assert (output.dispatches, p.stats.counts.preempted) == (1, 0)
        prefix = output.token_ids[: old.num_tokens]
        assert prefix == reference_tokens(0, request.prompt_ids, old.num_tokens)
        # With the cache cleared, what follows is what the new weights say of all before.
        recomputed = reference_tokens(1, (*request.prompt_ids, *prefix), new.num_tokens)
        assert (output.token_ids[old.num_tokens :] == recomputed) is clear_cache


@pytest.mark.parametrize("clear_cache", [False, True])
def test_requests_after_a_refresh_see_only_the_new_weights(clear_cache: bool) -> None:
    """The prefix of an earlier request with the same prompt is not used again."""
    with fake_pipeline(1, active=(0,), clear_cache=clear_cache) as p:
        for version in (0, 1, 2):
            if version:
                p.publish(version)
            output = asyncio.run(p.answer(greedy("r", 20)))
            assert is_right(output, greedy("r", 20), version)
            assert [segment.weights_version for segment in output.segments] == [version]


@pytest.mark.parametrize("at", ["wake_weights", "finalize_weights", "probe", "open_admission"])
def test_a_version_published_while_a_shard_comes_in_is_synced_before_it_serves(at: str) -> None:
    """At any point, up to the last call before the activation."""
    with fake_pipeline(1) as p:

        def publish() -> None:
            if p.table.published_version == 0:
                p.weights.cache_ready_step = 1
                assert p.table.publish(1) == []

        p.shards[0].before[at] = publish
        p.owner.expand([0])
        record = p.table.get(0)
        assert (record.state, record.weights_version) == (S.ACTIVE, 1)
        assert is_right(asyncio.run(p.answer(greedy("r", 20))), greedy("r", 20), version=1)
        active = [change for change in p.history if change.after is S.ACTIVE]
        assert [change.weights_version for change in active] == [1]


def test_a_version_published_between_the_gate_and_the_activation_is_synced() -> None:
    with fake_pipeline(1) as p:
        activate = p.table.activate

        def publish_and_activate(rank: int) -> bool:
            p.weights.cache_ready_step = 1
            assert p.table.publish(1) == []
            return activate(rank)

        p.table.activate = publish_and_activate  # type: ignore[method-assign]
        p.owner.expand([0])
        assert p.table.get(0).weights_version == 1
        assert is_right(asyncio.run(p.answer(greedy("r", 20))), greedy("r", 20), version=1)


def test_the_version_advances_only_after_every_serving_shard_holds_it() -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        seen: list[int] = []
        for call in ("receive", "finalize_weights", "resume"):
            p.shards[1].before[call] = lambda: seen.append(p.table.published_version)
        p.publish(1)
        assert seen == [0, 0, 0]
        assert p.table.published_version == 1


@pytest.mark.parametrize("at", ["pause_keep", "receive", "finalize_weights"])
def test_a_refresh_that_a_shrink_overtakes_never_wakes_what_the_shrink_took(at: str) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            shrinks = []

            def shrink() -> None:
                if not shrinks:
                    shrinks.append(pool.submit(p.owner.shrink, [1]))
                    wait_until(lambda: p.state(1) is S.DRAINING)

            p.shards[1].before[at] = shrink
            p.publish(1)
            shrinks[0].result(5)
        assert p.states() == {0: "ACTIVE", 1: "ASLEEP"}
        assert "resume" not in p.shards[1].calls
        assert p.shards[1].calls.count("receive") == (1 if at == "pause_keep" else 2)
        assert p.shards[1].engine.asleep
        assert p.table.published_version == 1


@pytest.mark.parametrize("at", ["close_admission", "drain", "wake_weights", "receive", "probe"])
def test_a_shrink_takes_a_shard_that_is_still_on_its_way_in(at: str) -> None:
    with fake_pipeline(1) as p:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            shrinks = []

            def shrink() -> None:
                if not shrinks:
                    shrinks.append(pool.submit(p.owner.shrink, [0]))
                    wait_until(lambda: p.state(0) is S.DRAINING)

            p.shards[0].before[at] = shrink
            p.owner.expand([0])
            shrinks[0].result(5)
        assert p.state(0) is S.ASLEEP
        assert p.shards[0].held_bytes <= BUDGET_BYTES
        assert S.ACTIVE not in {change.after for change in p.history}
        assert p.violations() == []
        assert p.table.get(0).failures == 0


def test_a_shard_granted_before_the_first_cache_comes_in_with_it() -> None:
    with fake_pipeline(2, cache=-1) as p:
        started = time.monotonic()
        report = p.owner.expand([0])
        assert time.monotonic() - started < 2.0  # a resize does not wait for a training step
        assert report.outcomes[0].state == "ASLEEP"
        assert "cache" in report.outcomes[0].cause
        p.publish(1)
        assert p.states() == {0: "ACTIVE", 1: "ASLEEP"}


def test_a_version_without_a_cache_is_not_published() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        with pytest.raises(Exception, match="version 5 is to be published, the cache has 0"):
            p.owner.refresh_and_publish(5)
        assert p.table.published_version == 0
        assert p.state(0) is S.ACTIVE


def test_the_end_of_a_pipeline_ends_its_waits_and_its_engines(background: Background) -> None:
    with fake_pipeline(2, active=(0, 1)) as p:
        running = background.start(p.answer(greedy("r", 5000)))
        wait_until(lambda: p.router.in_flight() != {})
        p.owner.close()
        with pytest.raises(PipelineClosedError):
            running.result(5)
        with pytest.raises(PipelineClosedError):
            p.owner.expand([0])
        assert sum(shard.held_bytes for shard in p.shards.values()) == 0


def test_a_build_that_fails_at_the_start_is_raised() -> None:
    with fake_pipeline(2) as p:
        p.shards[1].faults["build"] = [RAISE]
        p.table._records[1] = type(p.table.get(1))(1)
        with pytest.raises(ShardFailedError, match="does not start"):
            p.owner.build()
        assert p.state(1) is S.UNBUILT
        p.owner.build()  # tried again
        assert p.state(1) is S.ASLEEP
