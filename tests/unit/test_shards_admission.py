"""The gate in front of an engine, and the drain behind it."""

from __future__ import annotations

import asyncio
import pickle
import threading
import time
from collections.abc import Sequence

import pytest
from fakes.engine import FakeEngine
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import PartialGeneration, Segment, ShardPreemptedError
from nemo_rl_rlix.shards.admission import AdmissionGate
from nemo_rl_rlix.shards.preempt import DrainState, drain_engine, drain_engine_async, observe


def test_a_gate_starts_closed_and_says_who_refuses_and_since_when() -> None:
    gate = AdmissionGate(3)
    gate.close(9)
    with pytest.raises(ShardPreemptedError) as refused, gate.enter():
        pass
    assert (refused.value.dp_rank, refused.value.epoch, gate.refused) == (3, 9, 1)
    assert refused.value.partial == PartialGeneration()
    assert gate.in_flight == 0


def test_callers_are_counted_in_and_out_whatever_happens_to_them() -> None:
    gate = AdmissionGate(0)
    gate.open(1, 5)
    with gate.enter() as version:
        assert (version, gate.in_flight) == (5, 1)
        with pytest.raises(RuntimeError), gate.enter():
            gate.close(2)
            raise RuntimeError
        assert gate.in_flight == 1
    assert gate.in_flight == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6)), max_size=12))
def test_only_an_opening_that_is_not_older_than_the_last_word_opens(
    acts: list[tuple[bool, int]],
) -> None:
    gate, newest, is_open = AdmissionGate(0), -1, False
    for opens, epoch in acts:
        (gate.open(epoch, 0) if opens else gate.close(epoch))
        is_open = opens and (is_open or epoch >= newest)
        newest = max(newest, epoch)
        assert (gate.is_open, gate.epoch) == (is_open, newest)


def test_a_gate_that_threads_hammer_loses_nobody() -> None:
    gate, refused = AdmissionGate(0), [0] * 8
    gate.open(0, 0)

    def call(place: int) -> None:
        for _ in range(300):
            try:
                with gate.enter():
                    pass
            except ShardPreemptedError:
                refused[place] += 1

    threads = [threading.Thread(target=call, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for epoch in range(50):
        gate.close(epoch)
        gate.open(epoch, epoch)
    for thread in threads:
        thread.join()
    assert (gate.in_flight, gate.refused) == (0, sum(refused))


@pytest.mark.parametrize(
    ("looks", "empty_reads", "leftover", "aborted", "done"),
    [
        ([([], 0)], 1, 0, 0, False),
        ([([], 0), ([], 0)], 2, 0, 0, True),
        ([(["a"], 1), ([], 0), ([], 0)], 2, 0, 1, True),
        ([([], 0), (["a"], 1), ([], 0)], 1, 0, 1, False),  # it was still being preprocessed
        ([([], 1), ([], 1)], 0, 1, 0, False),  # past the gate, not in the table yet
        ([(["a", "b"], 0), (["b"], 0)], 0, 1, 2, False),
        ([(["a"], 3)], 0, 3, 1, False),
    ],
)
def test_observe(
    looks: list[tuple[list[str], int]], empty_reads: int, leftover: int, aborted: int, done: bool
) -> None:
    state = DrainState()
    for table, callers in looks:
        state = observe(state, table, callers)
    assert (state.empty_reads, state.leftover, len(state.aborted), state.done) == (
        empty_reads,
        leftover,
        aborted,
        done,
    )


@given(st.lists(st.tuples(st.lists(st.sampled_from("abc"), unique=True), st.integers(0, 2))))
def test_a_drain_is_done_after_two_empty_looks_in_a_row_and_only_then(
    looks: list[tuple[list[str], int]],
) -> None:
    state = DrainState()
    for table, callers in looks:
        state = observe(state, table, callers)
    last_two = [not table and not callers for table, callers in looks[-2:]]
    assert state.done is (last_two == [True, True])


class Table:
    """An engine as the threaded drain sees it."""

    def __init__(self, ids: Sequence[str], *, obeys: bool = True) -> None:
        self.ids, self.obeys, self.aborts = list(ids), obeys, list[str]()

    def abort(self, ids: Sequence[str]) -> None:
        self.aborts += ids
        if self.obeys:
            self.ids = [number for number in self.ids if number not in ids]


def test_the_threaded_drain_ends_idle_or_says_what_is_left() -> None:
    table = Table(["a", "b"])
    report = drain_engine(
        pause=lambda: None,
        table=lambda: table.ids,
        abort=table.abort,
        callers=lambda: 0,
        timeout_s=1.0,
    )
    assert (report.idle, report.aborted, report.leftover) == (True, 2, 0)
    deaf = Table(["a"], obeys=False)
    report = drain_engine(
        pause=lambda: None,
        table=lambda: deaf.ids,
        abort=deaf.abort,
        callers=lambda: 0,
        timeout_s=0.05,
    )
    assert (report.idle, report.leftover) == (False, 1)
    assert report.seconds < 0.5


async def drain(
    engine: FakeEngine, gate: AdmissionGate, *, internal: bool = True, timeout_s: float = 1.0
):
    async def abort(ids: Sequence[str]) -> None:
        await engine.abort(ids, internal=internal)

    return await drain_engine_async(
        pause=lambda: engine.pause("keep" if not internal else "abort"),
        table=engine.internal_ids,
        abort=abort,
        callers=lambda: gate.in_flight,
        timeout_s=timeout_s,
    )


def awake_engine(**options: float) -> FakeEngine:
    engine = FakeEngine(**options)
    engine.wake(("weights", "kv_cache"))
    engine.load({"embed": 1, "head": 2, "rope_buffer": 3})
    return engine


async def ask(engine: FakeEngine, gate: AdmissionGate, name: str, tokens: int) -> str:
    with gate.enter():
        return (await engine.generate(name, (1, 2), tokens)).finish_reason


def test_requests_that_the_pause_itself_aborts_are_counted() -> None:
    async def main() -> None:
        engine, gate = awake_engine(), AdmissionGate(0)
        gate.open(0, 0)
        asked = [asyncio.create_task(ask(engine, gate, f"r{i}", 10_000)) for i in range(3)]
        await asyncio.sleep(0.02)
        gate.close(1)
        report = await drain(engine, gate)
        assert (report.idle, report.aborted) == (True, 3)
        assert await asyncio.gather(*asked) == ["abort"] * 3

    asyncio.run(main())


def test_a_request_that_is_still_being_admitted_does_not_survive() -> None:
    """The engine's own abort misses it: it is in no table yet."""

    async def main() -> None:
        engine, gate = awake_engine(admission_delay_s=0.1), AdmissionGate(0)
        gate.open(0, 0)
        asked = asyncio.create_task(ask(engine, gate, "late", 10_000))
        await asyncio.sleep(0)
        assert engine.preprocessing == 1
        gate.close(1)
        report = await drain(engine, gate)
        assert (report.idle, report.aborted) == (True, 1)
        assert report.seconds >= 0.09
        engine.sleep(2)
        await asyncio.sleep(0.05)
        assert (await asked, engine.violation, engine.internal_ids()) == ("abort", "", [])

    asyncio.run(main())


def test_an_abort_by_the_wrong_kind_of_id_is_noticed_within_the_deadline() -> None:
    async def main() -> None:
        engine, gate = awake_engine(), AdmissionGate(0)
        gate.open(0, 0)
        asked = asyncio.create_task(ask(engine, gate, "r", 10_000))
        await asyncio.sleep(0.01)
        gate.close(1)
        started = time.monotonic()
        report = await drain(engine, gate, internal=False, timeout_s=0.1)
        assert time.monotonic() - started < 0.5
        assert (report.idle, report.leftover) == (False, 1)
        asked.cancel()

    asyncio.run(main())


def test_a_pause_that_never_answers_ends_with_the_deadline() -> None:
    async def main() -> None:
        async def hang() -> None:
            await asyncio.Event().wait()

        async def abort(ids: Sequence[str]) -> None:
            raise AssertionError

        report = await drain_engine_async(
            pause=hang, table=list, abort=abort, callers=lambda: 0, timeout_s=0.05
        )
        assert not report.idle

    asyncio.run(main())


def test_a_frozen_gauge_delays_nothing() -> None:
    async def main() -> None:
        engine, gate = awake_engine(), AdmissionGate(0)
        gate.open(0, 0)
        asked = [asyncio.create_task(ask(engine, gate, f"r{i}", 10_000)) for i in range(3)]
        await asyncio.sleep(0.02)
        gate.close(1)
        report = await drain(engine, gate)
        assert (engine.gauge_running, report.idle) == (3, True)
        await asyncio.gather(*asked)

    asyncio.run(main())


def test_the_error_of_a_preemption_survives_pickling() -> None:
    partial = PartialGeneration((1, 2), (-0.1, -0.2), (Segment(4, 2),))
    error = pickle.loads(pickle.dumps(ShardPreemptedError(2, partial, 17)))
    assert (error.dp_rank, error.partial, error.epoch) == (2, partial, 17)
