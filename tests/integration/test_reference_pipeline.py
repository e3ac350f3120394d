"""Whole pipelines on a real Ray cluster: shared, preempted, killed, resumed."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from nemo_rl_rlix.observe.trace import EventKind, read_events
from nemo_rl_rlix.reference.demo import run_demo
from nemo_rl_rlix.reference.options import DemoMode, DemoOptions
from nemo_rl_rlix.reference.present import write_artifacts
from nemo_rl_rlix.reference.report import DemoResult, broken_guarantees
from nemo_rl_rlix.settings import PreemptedRequests

STEPS = 6


@pytest.fixture(scope="module")
def killed_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, DemoOptions]:
    out = tmp_path_factory.mktemp("demo") / "out"
    options = DemoOptions.checked(
        out=out,
        steps=STEPS,
        mode=DemoMode.SHARED,
        kill_shard=True,
        plain=True,
        json_path=out / "records.json",
    )
    return run_demo(options), options


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_pipelines_share_two_gpus_and_outlive_a_killed_shard(
    killed_run: tuple[DemoResult, DemoOptions],
) -> None:
    report = killed_run[0].shared
    assert report is not None
    assert report.shard_killed
    assert broken_guarantees([report]) == []
    for pipeline in report.pipelines:
        assert pipeline.steps == STEPS
        assert pipeline.rollout_tokens > 0
    assert sum(p.redispatched for p in report.pipelines) > 0
    # Both trained on GPUs that both also generate on, so shards changed hands.
    assert len(report.switch_seconds) >= STEPS


@pytest.mark.ray
@pytest.mark.slow
def test_gpus_are_never_used_by_two_at_once(
    killed_run: tuple[DemoResult, DemoOptions],
) -> None:
    """What each GPU did, read from the trace, which no scheduler had a hand in."""
    trace = killed_run[0].traces[0]
    spans = defaultdict(list)
    for event in read_events(trace.directory):
        parts = event.track.split("/")
        if event.kind is EventKind.SPAN and parts[0] == "gpu" and event.name in PRIVATE:
            spans[parts[1]].append((event.start_s, event.end_s, parts[2], event.name))
    assert set(spans) == {"0", "1"}
    for uses in spans.values():
        uses.sort()
        for (_, end, owner, what), (start, _, other, then) in pairwise(uses):
            # Other pipelines' spans begin after this one ended; clocks are one host's.
            assert owner == other or start >= end - 0.002, (owner, what, other, then)


PRIVATE = ("generate", "train", "onload")


@pytest.mark.ray
@pytest.mark.slow
def test_picture_trace_and_records_are_written(
    killed_run: tuple[DemoResult, DemoOptions],
) -> None:
    result, options = killed_run
    artifacts = write_artifacts(result, options)
    assert artifacts.picture.stat().st_size > 10_000
    assert artifacts.trace.stat().st_size > 1_000
    assert artifacts.records is not None
    records = json.loads(Path(artifacts.records).read_text())
    lost = [r for r in records if r["metric"] == "lost_groups"]
    assert {r["params"]["pipeline"] for r in lost} == {"p0", "p1"}
    assert all(r["value"] == 0 and r["params"]["mode"] == "shared" for r in lost)


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_own_problems_with_restart_alone(tmp_path: Path) -> None:
    data = tmp_path / "problems.jsonl"
    data.write_text(
        "".join(
            json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) + "\n"
            for a in range(10)
            for b in range(10)
        )
    )
    options = DemoOptions.checked(
        out=tmp_path / "out",
        steps=4,
        mode=DemoMode.ALONE,
        data=data,
        policy=PreemptedRequests.RESTART,
        plain=True,
    )
    report = run_demo(options).alone
    assert report is not None
    assert broken_guarantees([report]) == []
    assert [p.steps for p in report.pipelines] == [4, 4]
    assert all(p.tokens_kept == 0 for p in report.pipelines)
