"""Anything in any order: requests, resizes, training steps, deaths and faults at once.

Real table, owner, router and re-dispatch over fake engines. Resizes of one rank come
one after the other, as a scheduler sends them; everything else crosses freely.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.engine import FakeEngine, reference_tokens, weights_of
from fakes.pipeline import Background, FakePipeline, fake_pipeline, wait_until
from fakes.shard import BUDGET_BYTES, DIE, HANG, LEAVE, RAISE
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from nemo_rl_rlix.settings import PreemptedRequests
from nemo_rl_rlix.shards import preempt
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.shards.state import SERVING, ShardState
from nemo_rl_rlix.shards.table import Transition

RANKS = (0, 1)
FAULTS_OF_A_RANK = 3
"""Fewer than the failures in a row after which a pipeline is given up."""

FAULTY_CALLS = (
    "close_admission", "open_admission", "drain", "sleep", "wake_weights", "receive",
    "finalize_weights", "wake_kv_cache", "reset_prefix_cache", "probe", "ping", "pause_keep",
    "resume", "build",
)  # fmt: skip

some_ranks = st.sets(st.sampled_from(RANKS), min_size=1).map(sorted)
acts = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, 40)),
    st.tuples(st.just("ask"), st.integers(1, 40)),
    st.tuples(st.just("shrink"), some_ranks, st.booleans()),
    st.tuples(st.just("expand"), some_ranks, st.booleans()),
    st.tuples(st.just("train"), st.booleans()),
    st.tuples(st.just("die"), st.sampled_from(RANKS)),
    st.tuples(
        st.just("fault"),
        st.sampled_from(RANKS),
        st.sampled_from(FAULTY_CALLS),
        st.sampled_from((HANG, RAISE, DIE)),
    ),
    st.tuples(st.just("fault"), st.sampled_from(RANKS), st.just("sleep"), st.just(LEAVE)),
    st.tuples(st.just("watch")),
    st.tuples(st.just("wait"), st.sampled_from((0.001, 0.006))),
)


@dataclass
class World:
    """One example: what it does, and what it saw that must not be."""

    p: FakePipeline
    background: Background
    threads: ThreadPoolExecutor
    policy: PreemptedRequests
    wrong: list[str] = field(default_factory=list)
    asked: list[tuple[GenerationRequest, Future[GenerationOutput]]] = field(default_factory=list)
    running: list[Future[Any]] = field(default_factory=list)
    faults: Counter[int] = field(default_factory=Counter)
    version: int = 0
    last_epoch: int = 0
    turns: dict[int, threading.Lock] = field(
        default_factory=lambda: {rank: threading.Lock() for rank in RANKS}
    )
    training: threading.Lock = field(default_factory=threading.Lock)

    def on_change(self, change: Transition) -> None:
        """Called under the table's mutex at every change."""
        table, shard = self.p.table, self.p.shards[change.dp_rank]
        if change.epoch <= self.last_epoch:
            self.wrong.append(f"epoch {change.epoch} after {self.last_epoch}")
        self.last_epoch = change.epoch
        record = table._records[change.dp_rank]
        if record.state in SERVING and not record.granted:
            self.wrong.append(f"{change}: serves without a grant")
        if change.after is ShardState.ACTIVE:
            if record.weights_discarded or record.weights_version < table._published:
                self.wrong.append(f"{change}: active with old weights ({table._published})")
            right = weights_of(record.weights_version)
            if shard.alive and shard.engine.weights != right:
                self.wrong.append(f"{change}: the engine holds other weights")

    def do(self, act: tuple[Any, ...]) -> None:
        getattr(self, f"do_{act[0]}")(*act[1:])

    def do_ask(self, tokens: int) -> None:
        place = len(self.asked)
        request = GenerationRequest(f"r{place}", (place % 3, 7), tokens, temperature=0.0)
        self.asked.append((request, self.background.start(self.p.answer(request, self.policy))))

    def do_shrink(self, ranks: list[int], wait: bool) -> None:
        def act() -> None:
            with self.turns_of(ranks):
                self.p.owner.shrink(ranks)
                for rank in ranks:
                    held, state = self.p.shards[rank].held_bytes, self.p.state(rank)
                    if held > BUDGET_BYTES:
                        self.wrong.append(f"shard {rank} is {state} after a shrink, {held} bytes")

        self.run(act, wait)

    def do_expand(self, ranks: list[int], wait: bool) -> None:
        def act() -> None:
            with self.turns_of(ranks):
                self.p.owner.expand(ranks)

        self.run(act, wait)

    def do_train(self, wait: bool) -> None:
        def act() -> None:
            with self.training:
                self.version += 1
                self.p.publish(self.version)
                if self.p.table.published_version != self.version:
                    self.wrong.append(f"version {self.version} is not published")

        self.run(act, wait)

    def do_die(self, rank: int) -> None:
        life = self.p.shards[rank]._process
        if life is not None and self.may_break(rank):
            life.end()

    def do_fault(self, rank: int, call: str, fault: str) -> None:
        if self.may_break(rank):
            self.p.shards[rank].faults.setdefault(call, []).append(fault)

    def do_watch(self) -> None:
        self.run(self.p.owner.check_serving, False)

    def do_wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def may_break(self, rank: int) -> bool:
        self.faults[rank] += 1
        return self.faults[rank] <= FAULTS_OF_A_RANK

    @contextlib.contextmanager
    def turns_of(self, ranks: list[int]) -> Iterator[None]:
        with contextlib.ExitStack() as turns:
            for rank in ranks:
                turns.enter_context(self.turns[rank])
            yield

    def run(self, act: Callable[[], None], wait: bool) -> None:
        self.running.append(self.threads.submit(act))
        if wait:
            self.running[-1].result(20)

    def finish(self) -> None:
        """Heal everything; then every wait must end, with the right answer."""
        for running in self.running:
            running.result(20)
        for shard in self.p.shards.values():
            shard.faults.clear()
        self.p.owner.expand(RANKS)
        self.p.owner.check_serving()
        wait_until(lambda: self.p.table.snapshot().active == set(RANKS), 15)
        outputs = [future.result(20) for _, future in self.asked]
        for (request, _), output in zip(self.asked, outputs, strict=True):
            check_answer(request, output)
        counts = self.p.stats.counts
        assert counts.finished == len(self.asked)
        assert self.p.table.snapshot().failure == ""
        assert self.p.table.published_version == self.version
        assert set(self.p.table.snapshot().weights_versions.values()) == {self.version}
        assert (self.p.router.in_flight(), self.p.router.waiting) == ({}, 0)
        assert [shard.gate.in_flight for shard in self.p.shards.values()] == [0, 0]
        assert self.p.weights.leases == 0
        assert self.p.violations() == []
        assert self.wrong == []


def check_answer(request: GenerationRequest, output: GenerationOutput) -> None:
    """Every token is what its segment's version says after all tokens before it."""
    assert output.request_id == request.request_id
    assert (len(output.token_ids), output.finish_reason) == (request.max_new_tokens, "length")
    assert len(output.logprobs) == len(output.token_ids)
    before = request.prompt_ids
    for segment in output.segments:
        expected = reference_tokens(segment.weights_version, before, segment.num_tokens)
        before = (*before, *expected)
    assert (*request.prompt_ids, *output.token_ids) == before


@pytest.fixture(scope="module")
def background() -> Iterator[Background]:
    loop = Background()
    yield loop
    loop.stop()


@pytest.fixture(scope="module", autouse=True)
def quick_looks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preempt, "POLL_S", 0.0005)
        yield


@settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(
    script=st.lists(acts, min_size=4, max_size=16),
    policy=st.sampled_from(PreemptedRequests),
    sleep_level=st.sampled_from((1, 2)),
    admission_delay_s=st.sampled_from((0.0, 0.004)),
)
def test_nothing_is_lost_repeated_or_wrong(
    background: Background,
    script: list[tuple[Any, ...]],
    policy: PreemptedRequests,
    sleep_level: int,
    admission_delay_s: float,
) -> None:
    # With the cache cleared at a refresh, every token can be recomputed from its version.
    with (
        fake_pipeline(
            len(RANKS),
            sleep_level=sleep_level,
            clear_cache=True,
            make_engine=lambda: FakeEngine(step_s=0.0004, admission_delay_s=admission_delay_s),
            rebuild_pause=lambda _: time.sleep(0.001),
            hang_share=0.004,
        ) as p,
        ThreadPoolExecutor(16) as threads,
    ):
        world = World(p, background, threads, policy)
        record = p.table._listener
        assert record is not None

        def listener(change: Transition) -> None:
            record(change)
            world.on_change(change)

        p.table._listener = listener
        try:
            p.owner.expand([0])
            for act in script:
                world.do(act)
            world.finish()
        except BaseException:
            note(f"states {p.states()}; wrong {world.wrong}")
            for change in p.history:
                note(
                    f"{change.epoch} shard {change.dp_rank} {change.before} -> {change.after} {change.cause}"
                )
            raise
