"""A whole pipeline's inference side out of fakes: shards, table, owner, router."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from fakes.engine import FakeEngine
from fakes.shard import FakeShard, FakeWeights
from nemo_rl_rlix.settings import Deadlines, PreemptedRequests, RoutingSettings
from nemo_rl_rlix.shards.owner import ShardOwner
from nemo_rl_rlix.shards.redispatch import DispatchStats, generate
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.shards.router import ShardRouter
from nemo_rl_rlix.shards.sequences import SequenceContext
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot
from nemo_rl_rlix.shards.state import ShardState
from nemo_rl_rlix.shards.table import ShardTable, Transition

SHORT = Deadlines(
    drain_s=5.0,
    sleep_s=5.0,
    wake_s=5.0,
    receive_s=5.0,
    finalize_s=5.0,
    probe_s=5.0,
    control_s=5.0,
    build_s=20.0,
    kill_s=5.0,
    resize_s=30.0,
)
"""Deadlines in seconds: long for a busy machine, and a hang takes a small share of one."""

ROUTING = RoutingSettings(long_poll_s=0.2, liveness_s=10.0, redispatch_backoff_s=0.002)


class LocalSource:
    """A router's way to a table in the same process."""

    def __init__(self, table: ShardTable, owner: ShardOwner) -> None:
        self._table = table
        self._owner = owner

    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        return self._table.wait_newer(epoch, timeout_s)

    def suspect(self, dp_rank: int) -> None:
        threading.Thread(target=self._owner.suspect, args=(dp_rank,), daemon=True).start()


@dataclass
class FakePipeline:
    """Everything of one pipeline, wired as the coordinator wires it."""

    shards: dict[int, FakeShard]
    table: ShardTable
    weights: FakeWeights
    owner: ShardOwner
    router: ShardRouter
    stats: DispatchStats = field(default_factory=DispatchStats)
    history: list[Transition] = field(default_factory=list)

    def state(self, rank: int) -> ShardState:
        return self.table.get(rank).state

    def states(self) -> dict[int, str]:
        return {rank: self.state(rank).value for rank in self.shards}

    def publish(self, version: int) -> None:
        """A training step: a new cache, then refresh and publish."""
        self.weights.cache_ready_step = version
        self.owner.refresh_and_publish(version)

    async def answer(
        self,
        request: GenerationRequest,
        policy: PreemptedRequests = PreemptedRequests.RESUME,
    ) -> GenerationOutput:
        return await generate(
            request,
            router=self.router,
            send=lambda rank, part: self.shards[rank].serve(part),
            policy=policy,
            stats=self.stats,
            backoff_s=ROUTING.redispatch_backoff_s,
        )

    def violations(self) -> list[str]:
        return [text for shard in self.shards.values() for text in shard.violations]


@contextlib.contextmanager
def fake_pipeline(
    ranks: int = 2,
    *,
    active: tuple[int, ...] = (),
    deadlines: Deadlines = SHORT,
    routing: RoutingSettings = ROUTING,
    sleep_level: int = 2,
    clear_cache: bool = False,
    make_engine: Callable[[], FakeEngine] = FakeEngine,
    rebuild_pause: Callable[[float], None] = lambda _: time.sleep(0.005),
    cache: int = 0,
    hang_share: float = 0.02,
) -> Iterator[FakePipeline]:
    """A built pipeline with ``active`` ranks serving; everything is ended at the exit."""
    history: list[Transition] = []
    shards = {rank: FakeShard(rank, make_engine, hang_share=hang_share) for rank in range(ranks)}
    table = ShardTable(shards, listener=history.append)
    weights = FakeWeights(cache)
    context = SequenceContext(table, weights, deadlines, sleep_level, clear_cache)
    owner = ShardOwner(shards, context, name="fake", pause=rebuild_pause)
    router = ShardRouter(LocalSource(table, owner), routing, name="fake")
    pipeline = FakePipeline(shards, table, weights, owner, router, history=history)
    try:
        owner.build()
        if active:
            owner.expand(active)
            assert table.snapshot().active == frozenset(active)
        yield pipeline
    finally:
        router.close()
        owner.close()
        for shard in shards.values():
            shard.close()


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Wait for something that other threads bring about.

    Raises:
        AssertionError: It did not come.
    """
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, f"did not come about within {timeout_s:g} s"
        time.sleep(0.002)


class Background:
    """Requests that run on an event loop in a thread, while the test acts."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def start(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()
