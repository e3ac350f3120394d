"""The router: choosing, waiting, ending, in any number of event loops."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    NoLiveShardError,
    PipelineClosedError,
)
from nemo_rl_rlix.settings import RoutingSettings
from nemo_rl_rlix.shards.router import Refusal, ShardRouter, choose_rank
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot

SETTINGS = RoutingSettings(long_poll_s=0.2, liveness_s=5.0, redispatch_backoff_s=0.002)


class Source:
    """An owner that a test speaks for; copies of it that were pickled share its state."""

    shared: Source

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.state = RoutingSnapshot(epoch=1)
        self.error: Exception | None = None
        self.suspects: list[int] = []
        self.polls = 0
        Source.shared = self

    def __reduce__(self) -> tuple[object, ...]:
        return (_shared_source, ())

    def say(self, **changes: object) -> None:
        with self.changed:
            fields = self.state.__dict__ | changes
            self.state = RoutingSnapshot(**fields | {"epoch": self.state.epoch + 1})
            self.changed.notify_all()

    def active(self, *ranks: int, asleep: tuple[int, ...] = ()) -> None:
        self.say(states=dict.fromkeys(ranks, "ACTIVE") | dict.fromkeys(asleep, "ASLEEP"))

    def fail_with(self, error: Exception) -> None:
        with self.changed:
            self.error = error
            self.changed.notify_all()

    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        with self.changed:
            self.polls += 1
            self.changed.wait_for(lambda: self.error or self.state.epoch > epoch, timeout_s)
            if self.error is not None:
                raise self.error
            return self.state

    def suspect(self, dp_rank: int) -> None:
        self.suspects.append(dp_rank)


def _shared_source() -> Source:
    return Source.shared


@contextmanager
def routing(settings: RoutingSettings = SETTINGS) -> Iterator[tuple[ShardRouter, Source]]:
    source = Source()
    router = ShardRouter(source, settings, name="p")
    try:
        yield router, source
    finally:
        router.close()


def in_time(coroutine, limit_s: float = 5.0):
    async def main():
        return await asyncio.wait_for(coroutine, limit_s)

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("active", "in_flight", "refusals", "expected"),
    [
        ([], {}, {}, None),
        ([0, 1], {}, {}, 0),
        ([0, 1], {0: 1}, {}, 1),
        ([0, 1], {0: 1, 1: 1}, {}, 0),
        ([1, 2], {0: 0, 1: 3, 2: 2}, {}, 2),
        ([0, 1], {}, {0: Refusal(11, 99.0)}, 1),  # the state does not know of it yet
        ([0, 1], {}, {0: Refusal(10, 99.0)}, 0),  # it does
        ([0, 1], {}, {0: Refusal(11, 4.9)}, 0),  # it never will
        ([0], {}, {0: Refusal(11, 99.0)}, None),
    ],
)
def test_choose_rank(
    active: list[int],
    in_flight: dict[int, int],
    refusals: dict[int, Refusal],
    expected: int | None,
) -> None:
    assert choose_rank(frozenset(active), in_flight, refusals, 10, 5.0) == expected


ranks = st.integers(0, 5)


@given(
    st.frozensets(ranks),
    st.dictionaries(ranks, st.integers(0, 9)),
    st.dictionaries(ranks, st.builds(Refusal, st.integers(0, 20), st.floats(0, 10))),
)
def test_the_chosen_rank_serves_is_not_refused_and_is_a_least_loaded_one(
    active: frozenset[int], in_flight: dict[int, int], refusals: dict[int, Refusal]
) -> None:
    chosen = choose_rank(active, in_flight, refusals, 10, 5.0)
    usable = {r for r in active if r not in refusals or refusals[r].is_over(10, 5.0)}
    if chosen is None:
        assert not usable
    else:
        assert chosen in usable
        assert in_flight.get(chosen, 0) == min(in_flight.get(r, 0) for r in usable)


def test_requests_spread_and_places_are_given_back() -> None:
    with routing() as (router, source):
        source.active(0, 1)

        async def main() -> None:
            chosen = [(await router.acquire())[0] for _ in range(4)]
            assert sorted(chosen) == [0, 0, 1, 1]
            assert router.in_flight() == {0: 2, 1: 2}
            for rank in chosen:
                router.release(rank)

        in_time(main())
        assert router.in_flight() == {}


def test_waiters_of_many_event_loops_are_woken_by_one_change() -> None:
    with routing(SETTINGS.model_copy(update={"long_poll_s": 4.0})) as (router, source):
        source.active(asleep=(0,))
        got: list[tuple[int, int]] = []

        async def several() -> None:
            got.extend(await asyncio.gather(*(router.acquire() for _ in range(5))))

        threads = [threading.Thread(target=in_time, args=(several(),)) for _ in range(10)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + 5
        while router.waiting < 50 and time.monotonic() < end:
            time.sleep(0.002)
        assert router.waiting == 50
        started = time.monotonic()
        source.active(0)
        for thread in threads:
            thread.join(5)
        assert time.monotonic() - started < 2.0  # not at the end of a poll
        assert len(got) == 50
        assert (router.waiting, router.in_flight()) == (0, {0: 50})


def test_the_cap_holds_and_nobody_is_passed_by_more_than_the_places_there_are() -> None:
    """Requests arrive faster than places are given back. Who queues first: the tests below."""
    with routing(SETTINGS.model_copy(update={"max_in_flight_per_shard": 2})) as (router, source):
        source.active(0, 1)
        served: list[int] = []
        most = 0

        async def request(number: int) -> None:
            nonlocal most
            rank, _ = await router.acquire()
            served.append(number)
            most = max(most, *router.in_flight().values())
            await asyncio.sleep(0.002)
            router.release(rank)

        async def main() -> None:
            requests = []
            for number in range(60):
                requests.append(asyncio.create_task(request(number)))
                await asyncio.sleep(0.0002)
            await asyncio.gather(*requests)

        in_time(main())
        # Two shards give back up to four places at once; those who get them run in any order.
        assert max(abs(place - number) for place, number in enumerate(served)) < 4
        assert most == 2
        assert (router.waiting, router.in_flight()) == (0, {})


def test_a_caller_that_comes_back_at_once_leaves_the_place_to_one_that_waits() -> None:
    settings = SETTINGS.model_copy(update={"max_in_flight_per_shard": 1})
    with routing(settings) as (router, source):
        source.active(0)

        async def main() -> None:
            rank, _ = await router.acquire()
            waiting = asyncio.create_task(router.acquire())
            while not router.waiting:
                await asyncio.sleep(0.001)
            router.release(rank)
            again = asyncio.create_task(router.acquire())
            done, _ = await asyncio.wait((waiting, again), return_when=asyncio.FIRST_COMPLETED)
            assert done == {waiting}
            waiting.result()
            again.cancel()

        in_time(main())


def test_a_place_offered_to_a_waiter_that_goes_is_offered_to_the_next() -> None:
    settings = SETTINGS.model_copy(update={"max_in_flight_per_shard": 1, "long_poll_s": 30.0})
    with routing(settings) as (router, source), pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_rl_rlix.shards.router.REFUSAL_S", 30.0)
        source.active(0)

        async def main() -> None:
            rank, _ = await router.acquire()
            first, second = (asyncio.create_task(router.acquire()) for _ in range(2))
            while router.waiting < 2:
                await asyncio.sleep(0.001)
            router.release(rank)
            first.cancel()
            assert (await asyncio.wait_for(second, 3.0))[0] == rank

        in_time(main())


@pytest.mark.parametrize("how", ["cancel", "timeout", "its loop ends"])
def test_a_waiter_that_goes_leaves_nothing_behind(how: str) -> None:
    with routing() as (router, source):
        source.active(asleep=(0,))

        async def main() -> None:
            waiting = asyncio.create_task(router.acquire())
            while not router.waiting:
                await asyncio.sleep(0.001)
            if how == "cancel":
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            elif how == "timeout":
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(waiting, 0.01)

        in_time(main())
        assert router.waiting == 0
        source.active(0)
        assert in_time(router.acquire())[0] == 0
        assert router.in_flight() == {0: 1}


def test_a_loop_that_closes_with_a_waiter_does_not_end_the_polls() -> None:
    with routing() as (router, source):
        source.active(asleep=(0,))
        loop = asyncio.new_event_loop()
        waiting = loop.create_task(router.acquire())
        loop.run_until_complete(asyncio.sleep(0.01))
        assert router.waiting == 1
        loop.close()  # a rollout thread that ended badly
        source.active(0)
        assert in_time(router.acquire())[0] == 0
        waiting.get_coro().close()
        waiting._log_destroy_pending = False


def test_a_copy_made_in_use_starts_from_the_last_state_and_follows_on_its_own() -> None:
    with routing() as (router, source):
        source.active(0)
        rank, epoch = in_time(router.acquire())
        copy = pickle.loads(pickle.dumps(router))
        try:
            assert copy.snapshot == router.snapshot
            assert (copy.in_flight(), copy.waiting) == ({}, 0)
            source.active(1, asleep=(0,))
            end = time.monotonic() + 2
            while copy.snapshot.active != {1} and time.monotonic() < end:
                in_time(copy.acquire())
            assert in_time(copy.acquire())[0] == 1
            assert router.in_flight() == {0: 1}
        finally:
            copy.close()
        assert (rank, epoch) == (0, 2)


def test_a_dispatcher_whose_state_is_stale_goes_on_once_it_learns() -> None:
    """Its copy says that rank 0 serves; the gate there says otherwise."""
    with routing() as (router, source):
        source.active(0)

        async def main() -> None:
            rank, epoch = await router.acquire()
            router.avoid(rank, chosen_at=epoch, closed_at=epoch + 1)
            router.release(rank)
            waiting = asyncio.create_task(router.acquire())
            await asyncio.sleep(0.05)
            assert not waiting.done()  # it does not hammer the shard
            source.active(1, asleep=(0,))
            assert (await waiting)[0] == 1

        in_time(main())


def test_a_refusal_that_the_owner_does_not_confirm_ends_by_itself() -> None:
    with routing() as (router, source):
        source.active(0)

        async def main() -> float:
            rank, epoch = await router.acquire()
            router.avoid(rank, chosen_at=epoch, closed_at=-1)
            started = time.monotonic()
            assert (await router.acquire())[0] == 0
            return time.monotonic() - started

        assert 0.5 < in_time(main()) < 3.0
        assert source.suspects == [0]


def test_a_shard_that_refuses_knowingly_is_not_suspected() -> None:
    with routing() as (router, source):
        source.active(0, 1)
        rank, epoch = in_time(router.acquire())
        router.avoid(rank, chosen_at=epoch, closed_at=7)
        assert in_time(router.acquire())[0] == 1
        assert source.suspects == []


def test_older_states_are_ignored() -> None:
    with routing() as (router, _):
        router.apply(RoutingSnapshot(9, {0: "ACTIVE"}))
        router.apply(RoutingSnapshot(8, {1: "ACTIVE"}))
        assert router.snapshot.active == {0}


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"closed": True}, PipelineClosedError, "ended"),
        ({"failure": "all engines burnt"}, NoLiveShardError, "all engines burnt"),
    ],
)
def test_what_the_owner_says_ends_the_wait(
    change: dict[str, object], error: type[Exception], text: str
) -> None:
    with routing() as (router, source):

        async def main() -> None:
            waiting = asyncio.create_task(router.acquire())
            await asyncio.sleep(0.02)
            source.say(**change)
            await waiting

        with pytest.raises(error, match=text):
            in_time(main())
        assert router.waiting == 0


@pytest.mark.parametrize(
    "error", [ControlPlaneLostError("the actor died"), ValueError("the actor died")]
)
def test_an_owner_that_is_lost_ends_the_wait_whatever_the_poll_raised(error: Exception) -> None:
    with routing() as (router, source):

        async def main() -> None:
            waiting = asyncio.create_task(router.acquire())
            await asyncio.sleep(0.02)
            source.fail_with(error)
            started = time.monotonic()
            with pytest.raises(NoLiveShardError, match="the actor died"):
                await waiting
            assert time.monotonic() - started < 1.0

        in_time(main())


def test_late_answers_are_borne_until_the_liveness_limit() -> None:
    settings = SETTINGS.model_copy(update={"liveness_s": 0.4})
    with routing(settings) as (router, source):

        async def main() -> None:
            waiting = asyncio.create_task(router.acquire())
            await asyncio.sleep(0.02)
            source.fail_with(DeadlineExceededError("poll", 0.1))
            await asyncio.sleep(0.1)
            assert not waiting.done()
            with pytest.raises(NoLiveShardError):
                await waiting

        in_time(main())


def test_a_quiet_owner_that_answers_polls_is_alive_however_long_the_wait() -> None:
    settings = SETTINGS.model_copy(update={"long_poll_s": 5.0, "liveness_s": 0.3})
    with routing(settings) as (router, source):
        source.active(asleep=(0,))

        async def main() -> None:
            waiting = asyncio.create_task(router.acquire())
            await asyncio.sleep(0.9)
            assert not waiting.done()
            source.active(0)
            assert (await waiting)[0] == 0

        in_time(main())


def test_closing_a_router_ends_its_waits_and_refuses_new_ones() -> None:
    with routing() as (router, _):

        async def main() -> None:
            waiting = asyncio.create_task(router.acquire())
            await asyncio.sleep(0.02)
            router.close()
            with pytest.raises(NoLiveShardError, match="closed"):
                await waiting
            with pytest.raises(NoLiveShardError, match="closed"):
                await router.acquire()

        in_time(main())


def test_polls_are_long_not_busy() -> None:
    with routing() as (router, source):
        source.active(0)
        in_time(router.acquire())
        before = source.polls
        time.sleep(0.5)
        assert source.polls - before <= 5
