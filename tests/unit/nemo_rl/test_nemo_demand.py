"""What is wanted, when it is reported, and that reporting holds nothing up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import ControlPlaneLostError, DeadlineExceededError
from nemo_rl_rlix.nemo_rl.demand import (
    BufferView,
    Demand,
    measure,
    wanted_targets,
    worth_reporting,
)
from nemo_rl_rlix.nemo_rl.demand_reporter import DemandReporter


@pytest.mark.parametrize(
    ("allowed", "generating", "view", "wanted"),
    [
        ([0, 1], [], BufferView(), {0, 1}),
        # What training has taken is wanted no more, whoever may still fill it.
        ([3, 4], [3], BufferView(consumed=3), {4}),
        # Asked for by training, and no longer allowed for the collector.
        ([6], [], BufferView(consumed=4, polled=frozenset({5})), {5, 6}),
        # Resumed with an empty buffer: nothing was consumed in this run.
        ([40, 41], [], BufferView(polled=frozenset({40})), {40, 41}),
    ],
)
def test_wanted_targets(
    allowed: list[int], generating: list[int], view: BufferView, wanted: set[int]
) -> None:
    assert wanted_targets(allowed, generating, view) == wanted


@pytest.mark.parametrize(
    ("view", "open_requests", "expected"),
    [
        (BufferView(), 0, Demand(0, 16)),
        (BufferView(counts={1: 1, 2: 2}), 0, Demand(12, 16)),
        # More groups than a step needs are not more demand met.
        (BufferView(counts={1: 5, 2: 0}), 0, Demand(8, 16)),
        # Requests under way belong to the missing trajectories, the rest comes on top.
        (BufferView(counts={1: 1, 2: 2}), 3, Demand(12, 16)),
        (BufferView(counts={1: 1, 2: 2}), 9, Demand(12, 21)),
        (BufferView(counts={1: 2, 2: 2}, extra=6), 0, Demand(16, 22)),
    ],
)
def test_measure(view: BufferView, open_requests: int, expected: Demand) -> None:
    demand = measure({1, 2}, view, groups_per_target=2, generations=4, open_requests=open_requests)
    assert demand == expected


@given(
    counts=st.dictionaries(st.integers(0, 6), st.integers(0, 9)),
    targets=st.sets(st.integers(0, 6)),
    open_requests=st.integers(0, 50),
    extra=st.integers(0, 50),
)
def test_demand_is_never_less_than_what_is_open(
    counts: dict[int, int], targets: set[int], open_requests: int, extra: int
) -> None:
    view = BufferView(counts=counts, extra=extra)
    demand = measure(targets, view, groups_per_target=3, generations=2, open_requests=open_requests)
    assert 0 <= demand.collected <= demand.target
    assert demand.remaining >= open_requests + extra or demand.remaining >= extra
    assert demand.remaining >= max(open_requests, extra)
    missing = sum(max(0, 3 - counts.get(target, 0)) for target in targets) * 2
    assert demand.remaining == max(missing, open_requests) + extra


@pytest.mark.parametrize(
    ("last", "now", "worth"),
    [
        (None, Demand(0, 100), True),
        (Demand(0, 100), Demand(0, 100), False),
        (Demand(0, 100), Demand(1, 100), False),
        (Demand(0, 100), Demand(2, 100), True),
        (Demand(98, 100), Demand(100, 100), True),
        (Demand(5, 100), Demand(4, 100), True),
        (Demand(5, 100), Demand(5, 120), True),
        (Demand(0, 8), Demand(1, 8), True),
    ],
)
def test_worth_reporting(last: Demand | None, now: Demand, worth: bool) -> None:
    assert worth_reporting(last, now) is worth


def test_two_percent_steps_bound_the_number_of_reports() -> None:
    last, reports = None, 0
    for collected in range(10_001):
        now = Demand(collected, 10_000)
        if worth_reporting(last, now):
            last, reports = now, reports + 1
    assert reports == 51


class Hooks:
    def __init__(self) -> None:
        self.said: list[tuple[int, int] | None] = []
        self.error: Exception | None = None

    def before_training(self, step: int) -> None:
        raise AssertionError

    def after_training(self, step: int) -> None:
        raise AssertionError

    def report_progress(self, collected: int, target: int) -> None:
        if self.error is not None:
            raise self.error
        self.said.append((collected, target))

    def clear_progress(self) -> None:
        self.said.append(None)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_reports_follow_demand_and_are_withdrawn_at_its_end() -> None:
    hooks = Hooks()
    demand: list[Demand | None] = [Demand(0, 10)]
    reporter = DemandReporter(hooks, lambda: demand[-1], look_s=60.0, repeat_s=60.0)
    reporter.start()
    reporter.start()
    wait_until(lambda: hooks.said == [(0, 10)])
    for now, said in (
        (Demand(4, 10), (4, 10)),
        (Demand(10, 10), None),
        (Demand(0, 10), (0, 10)),
    ):
        demand.append(now)
        reporter.poke()
        wait_until(lambda said=said: hooks.said[-1] == said)  # type: ignore[misc]
    demand.append(Demand(0, 0))
    reporter.poke()
    wait_until(lambda: hooks.said[-1] is None)
    before = len(hooks.said)
    demand.append(None)
    reporter.poke()
    reporter.stop(5.0)
    assert len(hooks.said) == before, "what was withdrawn is not withdrawn again"


def test_an_unchanged_demand_is_repeated_now_and_then() -> None:
    hooks = Hooks()
    reporter = DemandReporter(hooks, lambda: Demand(1, 9), look_s=0.01, repeat_s=0.05)
    reporter.start()
    wait_until(lambda: len(hooks.said) >= 3)
    reporter.stop(5.0)
    assert hooks.said[:-1] == [(1, 9)] * (len(hooks.said) - 1)
    assert hooks.said[-1] is None


def test_a_poke_never_waits_for_a_look_or_a_report() -> None:
    hold, looked = threading.Event(), threading.Event()

    def observe() -> Demand:
        looked.set()
        assert hold.wait(10.0)
        return Demand(0, 1)

    reporter = DemandReporter(Hooks(), observe)
    reporter.start()
    assert looked.wait(10.0)
    started = time.monotonic()
    for _ in range(1000):
        reporter.poke()
    assert time.monotonic() - started < 1.0
    hold.set()
    reporter.stop(5.0)


def test_an_unknown_demand_changes_nothing_and_a_failed_report_ends_nothing() -> None:
    hooks = Hooks()
    answers: list[Demand | Exception] = [
        Demand(0, 4),
        DeadlineExceededError("view", 1.0),
        Demand(2, 4),
    ]
    hooks.error = ControlPlaneLostError("away for a moment")

    def observe() -> Demand:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        hooks.error = None if len(answers) == 1 else hooks.error
        if isinstance(answer, Exception):
            raise answer
        return answer

    reporter = DemandReporter(hooks, observe, look_s=0.01, repeat_s=60.0)
    reporter.start()
    wait_until(lambda: hooks.said == [(2, 4)])
    reporter.stop(5.0)
