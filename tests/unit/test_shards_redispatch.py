"""A request is answered exactly once, however often its shard is taken."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import pytest
from fakes.engine import FakeEngine, reference_tokens, weights_of
from fakes.pipeline import Background, fake_pipeline, wait_until
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import (
    NoLiveShardError,
    PartialGeneration,
    Segment,
    ShardPreemptedError,
)
from nemo_rl_rlix.settings import PreemptedRequests, RoutingSettings
from nemo_rl_rlix.shards.redispatch import (
    DispatchCounts,
    DispatchStats,
    complete_from,
    generate,
)
from nemo_rl_rlix.shards.requests import (
    GenerationOutput,
    GenerationRequest,
    join_output,
    join_partial,
    join_segments,
)
from nemo_rl_rlix.shards.router import ShardRouter
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot

RESTART, RESUME = PreemptedRequests.RESTART, PreemptedRequests.RESUME


def part(tokens: Iterable[int], version: int = 0) -> PartialGeneration:
    ids = tuple(tokens)
    segments = (Segment(version, len(ids)),) if ids else ()
    return PartialGeneration(ids, tuple(-0.01 * token for token in ids), segments)


def output(tokens: Iterable[int], version: int = 0, reason: str = "length") -> GenerationOutput:
    new = part(tokens, version)
    return GenerationOutput("r", new.token_ids, new.logprobs, new.segments, reason, 0)


REQUEST = GenerationRequest("r", (1, 2, 3), 5, stop_ids=(9,))


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([], None),
        ([4], None),
        ([4, 9], "stop"),
        ([9, 4], None),  # a stop that did not stop is not the last word
        ([4, 5, 6, 7], None),
        ([4, 5, 6, 7, 8], "length"),
        ([4, 5, 6, 7, 9], "stop"),
    ],
)
def test_complete_from(tokens: list[int], reason: str | None) -> None:
    done = complete_from(part(tokens), REQUEST, 1)
    if reason is None:
        assert done is None
    else:
        assert done == GenerationOutput(
            "r",
            tuple(tokens),
            part(tokens).logprobs,
            part(tokens).segments,
            reason,
            1,
            tokens_kept=len(tokens),
        )


segments = st.lists(st.builds(Segment, st.integers(0, 3), st.integers(0, 4)), max_size=5)


@given(segments, segments)
def test_joined_segments_say_the_version_of_every_token_in_order(
    first: list[Segment], second: list[Segment]
) -> None:
    def versions(runs: Iterable[Segment]) -> list[int]:
        return [run.weights_version for run in runs for _ in range(run.num_tokens)]

    joined = join_segments(tuple(first), tuple(second))
    assert versions(joined) == versions([*first, *second])
    assert all(run.num_tokens > 0 for run in joined)
    assert all(a.weights_version != b.weights_version for a, b in itertools.pairwise(joined))


def test_joined_parts_and_outputs_keep_tokens_logprobs_and_versions_together() -> None:
    joined = join_partial(part([1, 2], 0), part([3], 1))
    assert joined == PartialGeneration(
        (1, 2, 3), (-0.01, -0.02, -0.03), (Segment(0, 2), Segment(1, 1))
    )
    whole = join_output(joined, output([4], 1))
    assert whole.token_ids == (1, 2, 3, 4)
    assert whole.logprobs == (-0.01, -0.02, -0.03, -0.04)
    assert whole.segments == (Segment(0, 2), Segment(1, 2))
    assert whole.tokens_kept == 3


class _Still:
    """A source whose state never changes."""

    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        return RoutingSnapshot(1, {0: "ACTIVE", 1: "ACTIVE"})

    def suspect(self, dp_rank: int) -> None:
        return


@contextmanager
def two_shards() -> Iterator[ShardRouter]:
    router = ShardRouter(_Still(), RoutingSettings(long_poll_s=0.1), name="p")
    router.apply(RoutingSnapshot(1, {0: "ACTIVE", 1: "ACTIVE"}))
    router._follow = lambda: None  # type: ignore[method-assign]
    try:
        yield router
    finally:
        router.close()


def run(
    script: list[object], policy: PreemptedRequests, request: GenerationRequest = REQUEST
) -> tuple[GenerationOutput, DispatchCounts, list[GenerationRequest], ShardRouter]:
    """Answer a request with what each dispatch in turn is to return or raise."""
    asked: list[GenerationRequest] = []
    answers = iter(script)
    stats = DispatchStats()

    async def send(rank: int, sent: GenerationRequest) -> GenerationOutput:
        asked.append(sent)
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        assert isinstance(answer, GenerationOutput)
        return answer

    with two_shards() as router:
        router.avoid = lambda *_, **__: None  # type: ignore[method-assign]
        coroutine = generate(
            request, router=router, send=send, policy=policy, stats=stats, backoff_s=0.0
        )
        result = asyncio.run(coroutine)
    assert next(answers, None) is None
    assert router.in_flight() == {}
    return result, stats.counts, asked, router


def test_an_undisturbed_request_is_passed_through() -> None:
    result, counts, asked, _ = run([output([4, 5, 6, 7, 8])], RESUME)
    assert result == output([4, 5, 6, 7, 8])
    assert asked == [REQUEST]
    assert counts == DispatchCounts(finished=1, dispatched=1)


def test_resume_sends_what_was_sampled_and_joins() -> None:
    script = [ShardPreemptedError(0, part([4, 5], 0), 3), output([6, 7, 8], 1)]
    result, counts, asked, _ = run(script, RESUME)
    assert asked[1].prior == part([4, 5], 0)
    assert result.token_ids == (4, 5, 6, 7, 8)
    assert result.segments == (Segment(0, 2), Segment(1, 3))
    assert (result.dispatches, result.tokens_kept, result.tokens_dropped) == (2, 2, 0)
    assert counts == DispatchCounts(finished=1, dispatched=2, preempted=1, tokens_kept=2)


def test_restart_begins_again_and_counts_what_was_lost() -> None:
    script = [ShardPreemptedError(0, part([4, 5], 0), 3), output([6, 7, 8, 1, 2], 1)]
    result, counts, asked, _ = run(script, RESTART)
    assert asked[1] == REQUEST
    assert result.token_ids == (6, 7, 8, 1, 2)
    assert (result.dispatches, result.tokens_kept, result.tokens_dropped) == (2, 0, 2)
    assert counts == DispatchCounts(finished=1, dispatched=2, preempted=1, tokens_dropped=2)


def test_a_refusal_is_no_dispatch_that_a_shard_accepted() -> None:
    result, counts, _, _ = run([ShardPreemptedError(0, epoch=3), output([4])], RESUME)
    assert result.dispatches == 1
    assert (counts.refused, counts.preempted, counts.redispatched) == (1, 0, 1)


def test_a_shard_that_died_counts_as_preempted() -> None:
    result, counts, _, _ = run([ShardPreemptedError(0), output([4])], RESUME)
    assert result.dispatches == 2
    assert (counts.refused, counts.preempted) == (0, 1)


@pytest.mark.parametrize("tokens", [[4, 9], [4, 5, 6, 7, 8]])
def test_an_abort_that_met_the_last_token_is_the_answer_and_is_not_sent_again(
    tokens: list[int],
) -> None:
    result, counts, asked, _ = run([ShardPreemptedError(1, part(tokens), 3)], RESUME)
    assert result.token_ids == tuple(tokens)
    assert result.finish_reason in ("stop", "length")
    assert (len(asked), result.dispatches, counts.finished) == (1, 1, 1)


def test_ten_preemptions_lose_and_repeat_nothing() -> None:
    request = GenerationRequest("r", (1,), 11)
    script = [
        *(ShardPreemptedError(0, part([token], token), 3) for token in range(10)),
        output([10], 10),
    ]
    result, counts, _, _ = run(script, RESUME, request)
    assert result.token_ids == tuple(range(11))
    assert (counts.preempted, counts.finished, counts.tokens_kept) == (10, 1, 10)
    assert len(result.segments) == 11


@pytest.mark.parametrize("policy", [RESTART, RESUME])
def test_an_aborted_output_is_never_taken_for_a_finished_one(policy: PreemptedRequests) -> None:
    """A worker that yields seven tokens, then an abort, as an ordinary output."""
    request = GenerationRequest("r", (1,), 9)
    script = [output(range(7), 0, "abort"), output([7, 8] if policy is RESUME else range(9), 0)]
    result, counts, _, _ = run(script, policy, request)
    assert result.token_ids == tuple(range(9))
    assert result.finish_reason == "length"
    assert counts.preempted == 1


def test_an_error_of_the_request_itself_is_raised_and_gives_the_place_back() -> None:
    with pytest.raises(ValueError, match="too long"):
        run([ValueError("prompt too long")], RESUME)


def test_a_cancelled_request_gives_its_place_back() -> None:
    with two_shards() as router:

        async def send(rank: int, sent: GenerationRequest) -> GenerationOutput:
            await asyncio.Event().wait()
            raise AssertionError

        async def main() -> None:
            task = asyncio.create_task(
                generate(
                    REQUEST,
                    router=router,
                    send=send,
                    policy=RESUME,
                    stats=DispatchStats(),
                    backoff_s=0.0,
                )
            )
            await asyncio.sleep(0.01)
            assert router.in_flight() == {0: 1}
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

        asyncio.run(main())
        assert router.in_flight() == {}


@given(st.lists(st.integers(0, 3), max_size=6), st.sampled_from([RESTART, RESUME]))
def test_whatever_the_cuts_the_answer_is_the_uninterrupted_one(
    cuts: list[int], policy: PreemptedRequests
) -> None:
    """Each dispatch is taken after so many tokens, the last one is not."""
    prompt, wanted = (7, 7), 12
    whole = reference_tokens(3, prompt, wanted)
    lengths = iter(cuts)

    async def send(rank: int, sent: GenerationRequest) -> GenerationOutput:
        done = len(sent.prior.token_ids)
        new = reference_tokens(3, (*prompt, *sent.prior.token_ids), wanted - done)
        cut = next(lengths, None)
        if cut is not None:
            raise ShardPreemptedError(rank, part(new[:cut], 3), 1)
        return output(new, 3)

    with two_shards() as router:
        router.avoid = lambda *_, **__: None  # type: ignore[method-assign]
        stats = DispatchStats()
        coroutine = generate(
            GenerationRequest("r", prompt, wanted),
            router=router,
            send=send,
            policy=policy,
            stats=stats,
            backoff_s=0.0,
        )
        result = asyncio.run(coroutine)
    assert result.token_ids == whole
    assert result.segments == (Segment(3, wanted),)
    assert stats.counts.tokens_kept + stats.counts.tokens_dropped >= sum(cuts[:1])


@pytest.mark.parametrize("policy", [RESTART, RESUME])
def test_tokens_of_preempted_generations_equal_those_of_undisturbed_ones(
    policy: PreemptedRequests,
) -> None:
    """Real engines, real shrinks: shards come and go under running requests."""
    with fake_pipeline(2, active=(0, 1)) as p:
        background = Background()
        requests = [GenerationRequest(f"r{i}", (i, 3), 120, temperature=0.0) for i in range(12)]
        asked = [background.start(p.answer(request, policy)) for request in requests]
        for rank in (0, 1, 0):
            wait_until(lambda rank=rank: p.router.in_flight().get(rank, 0) > 0)
            p.owner.shrink([rank])
            p.owner.expand([rank])
        outputs = [future.result(20) for future in asked]
        background.stop()
        for request, result in zip(requests, outputs, strict=True):
            assert result.token_ids == reference_tokens(0, request.prompt_ids, 120)
            assert result.segments == (Segment(0, 120),)
        assert p.stats.counts.finished == 12
        assert p.stats.counts.preempted > 0
        assert (p.stats.counts.tokens_kept > 0) is (policy is RESUME)
        assert (p.stats.counts.tokens_dropped > 0) is (policy is RESTART)
        assert p.violations() == []


def test_a_resumed_answer_says_which_version_each_token_is_from() -> None:
    with fake_pipeline(1, active=(0,)) as p:
        background = Background()
        asked = background.start(p.answer(GenerationRequest("r", (2, 3), 150, temperature=0.0)))
        wait_until(lambda: p.shards[0].engine.steps > 20)
        p.owner.shrink([0])
        p.publish(1)
        p.owner.expand([0])
        result = asked.result(10)
        background.stop()
        old, new = result.segments
        assert (old.weights_version, new.weights_version) == (0, 1)
        assert old.num_tokens + new.num_tokens == 150
        kept = result.token_ids[: old.num_tokens]
        assert kept == reference_tokens(0, (2, 3), old.num_tokens)
        assert result.token_ids[old.num_tokens :] == reference_tokens(
            1, (2, 3, *kept), new.num_tokens
        )


def test_requests_of_a_pipeline_beyond_saving_end_with_its_cause() -> None:
    with fake_pipeline(1) as p:
        background = Background()
        asked = background.start(p.answer(REQUEST))
        wait_until(lambda: p.router.waiting == 1)
        p.table.fail("the last engine burnt")
        with pytest.raises(NoLiveShardError, match="burnt"):
            asked.result(5)
        background.stop()


def test_the_toy_model_shows_what_the_other_tests_rely_on() -> None:
    """Stale weights, a stale buffer and a stale prefix each change the answer."""

    async def answer(engine: FakeEngine, prompt: tuple[int, ...]) -> tuple[int, ...]:
        return (await engine.generate("r", prompt, 12)).token_ids

    async def main() -> None:
        engine = FakeEngine()
        engine.wake(("weights", "kv_cache"))
        engine.load(weights_of(1))
        assert await answer(engine, (1, 2)) == reference_tokens(1, (1, 2), 12)
        assert reference_tokens(1, (1, 2), 12) != reference_tokens(2, (1, 2), 12)
        engine.load(weights_of(2))
        assert await answer(engine, (1, 2)) != reference_tokens(2, (1, 2), 12)  # old prefix
        assert engine.reset_prefix_cache()
        assert await answer(engine, (1, 2)) == reference_tokens(2, (1, 2), 12)
        engine.load({"rope_buffer": 5})
        engine.reset_prefix_cache()
        assert await answer(engine, (1, 2)) != reference_tokens(2, (1, 2), 12)

    asyncio.run(main())
