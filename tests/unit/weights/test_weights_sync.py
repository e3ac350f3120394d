"""Selective sync: complete, the right version, finalised once, each rank for itself."""

import threading
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, cast

import pytest

from nemo_rl_rlix.errors import CacheNotReadyError, CoverageError, DeadlineExceededError
from nemo_rl_rlix.settings import Deadlines
from nemo_rl_rlix.shards.protocol import InferenceShard, ReceiveReport
from nemo_rl_rlix.weights.book import CacheBook
from nemo_rl_rlix.weights.errors import VersionOrderError
from nemo_rl_rlix.weights.sync import check_coverage, sync_shard, sync_shards
from nemo_rl_rlix.weights.types import BucketLayout, CacheHandle, SharedMemoryHandle

HANDLE = CacheHandle(
    "p",
    7,
    0,
    BucketLayout((), (), (), (), 0, ties=(("head", "embed"),)),
    SharedMemoryHandle("/nowhere", 0, "00", "n"),
    "",
)
DEADLINES = Deadlines(receive_s=0.2, finalize_s=0.1)


class FakeShard:
    """The two calls that a sync makes, and a record of them."""

    def __init__(self, dp_rank: int = 0, **changes: Any) -> None:
        self.dp_rank = dp_rank
        names = frozenset({"embed", "w"})
        self.report = replace(ReceiveReport(7, names, names, 10, 0.0), **changes)
        self.calls: list[str] = []
        self.error: Exception | None = None
        self.hang: threading.Event | None = None
        self.versions: list[int] = []

    def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        self.calls.append("receive")
        self.versions.append(source.weights_version)
        assert timeout_s == DEADLINES.receive_s
        if self.hang is not None:
            self.hang.wait(20)
        if self.error is not None:
            raise self.error
        return self.report

    def finalize_weights(self, *, timeout_s: float) -> None:
        assert timeout_s == DEADLINES.finalize_s
        self.calls.append("finalize")


def shard(fake: FakeShard) -> InferenceShard:
    return cast(InferenceShard, fake)


def test_a_complete_set_is_finalised_exactly_once() -> None:
    fake = FakeShard()
    assert sync_shard(shard(fake), HANDLE, DEADLINES) == fake.report
    assert fake.calls == ["receive", "finalize"]


@pytest.mark.parametrize(
    ("expected", "loaded", "missing", "unexpected"),
    [
        # NovaSky-AI/SkyRL#1505: the engine has a parameter that nobody sent.
        ({"embed", "w", "extra"}, {"embed", "w"}, ["extra"], []),
        ({"embed"}, {"embed", "w"}, [], ["w"]),
        ({"embed", "x"}, {"embed", "y"}, ["x"], ["y"]),
        (set(), {"w"}, [], ["w"]),
        ({"head"}, set(), ["embed"], []),
    ],
)
def test_an_incomplete_set_is_an_error_and_is_not_finalised(
    expected: set[str], loaded: set[str], missing: list[str], unexpected: list[str]
) -> None:
    fake = FakeShard(expected=frozenset(expected), loaded=frozenset(loaded))
    with pytest.raises(CoverageError) as caught:
        sync_shard(shard(fake), HANDLE, DEADLINES)
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)
    assert fake.calls == ["receive"]


@pytest.mark.parametrize("expected", [{"embed"}, {"head"}, {"embed", "head"}])
@pytest.mark.parametrize("loaded", [{"embed"}, {"head"}, {"embed", "head"}])
def test_either_name_of_a_tie_stands_for_both(expected: set[str], loaded: set[str]) -> None:
    report = ReceiveReport(7, frozenset(loaded), frozenset(expected), 0, 0.0)
    check_coverage(0, report, HANDLE.layout.ties)


def test_another_version_than_the_one_that_was_leased_is_an_error() -> None:
    fake = FakeShard(weights_version=6)
    with pytest.raises(VersionOrderError, match="6 instead of 7"):
        sync_shard(shard(fake), HANDLE, DEADLINES)
    assert fake.calls == ["receive"]


def test_a_rank_that_fails_does_not_stop_the_others() -> None:
    fakes = [FakeShard(rank) for rank in range(4)]
    fakes[1].error = RuntimeError("out of memory")
    fakes[2].report = replace(fakes[2].report, loaded=frozenset({"w"}))
    outcomes = sync_shards([shard(f) for f in fakes], nullcontext(HANDLE), DEADLINES)
    assert [outcome.dp_rank for outcome in outcomes] == [0, 1, 2, 3]
    assert [type(outcome.error) for outcome in outcomes] == [
        type(None),
        RuntimeError,
        CoverageError,
        type(None),
    ]
    assert [outcome.report is not None for outcome in outcomes] == [True, False, False, True]


def test_shards_are_synced_at_the_same_time() -> None:
    barrier = threading.Barrier(3, timeout=5)

    class Meeting(FakeShard):
        def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
            barrier.wait()
            return super().receive(source, timeout_s=timeout_s)

    fakes = [Meeting(rank) for rank in range(3)]
    outcomes = sync_shards([shard(f) for f in fakes], nullcontext(HANDLE), DEADLINES)
    assert all(outcome.error is None for outcome in outcomes)


def test_a_shard_that_never_answers_fails_in_bounded_time() -> None:
    # PrimeIntellect-ai/prime-rl#2673
    fakes = [FakeShard(0), FakeShard(1)]
    fakes[1].hang = threading.Event()
    started = time.monotonic()
    outcomes = sync_shards([shard(f) for f in fakes], nullcontext(HANDLE), DEADLINES, grace_s=0.1)
    assert time.monotonic() - started < 3
    assert outcomes[0].error is None
    assert isinstance(outcomes[1].error, DeadlineExceededError)
    fakes[1].hang.set()


def test_the_lease_is_held_while_shards_read_and_not_longer() -> None:
    book = CacheBook(1)
    slot = book.begin_build(1.0)
    book.commit(replace(HANDLE, slot=slot))
    fake = FakeShard()
    fake.hang = threading.Event()
    result: list[object] = []
    deadlines = Deadlines(receive_s=DEADLINES.receive_s, finalize_s=DEADLINES.finalize_s)
    thread = threading.Thread(
        target=lambda: result.extend(sync_shards([shard(fake)], book.lease(), deadlines))
    )
    thread.start()
    while not fake.calls:
        time.sleep(0.01)
    with pytest.raises(DeadlineExceededError):
        book.begin_build(0.02)
    fake.hang.set()
    thread.join(5)
    assert len(result) == 1
    assert book.begin_build(1.0) == slot


def test_without_a_cache_no_shard_is_called() -> None:
    fake = FakeShard()
    with pytest.raises(CacheNotReadyError):
        sync_shards([shard(fake)], CacheBook(2).lease(), DEADLINES)
    assert fake.calls == []
