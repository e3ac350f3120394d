"""Selective sync: complete, the right version, finalised once."""

from dataclasses import replace
from typing import Any, cast

import pytest

from nemo_rl_rlix.errors import CoverageError
from nemo_rl_rlix.settings import Deadlines
from nemo_rl_rlix.shards.protocol import InferenceShard, ReceiveReport
from nemo_rl_rlix.weights.errors import VersionOrderError
from nemo_rl_rlix.weights.sync import check_coverage, sync_shard
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

    def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        self.calls.append("receive")
        assert timeout_s == DEADLINES.receive_s
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
