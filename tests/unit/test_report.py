import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from nemo_rl_rlix.observe.busy import Activity
from nemo_rl_rlix.reference.report import (
    PipelineReport,
    RunReport,
    broken_guarantees,
    judge,
    percentile,
    quarter_means,
)
from nemo_rl_rlix.reference.report_records import Provenance, run_records
from nemo_rl_rlix.reference.tables import comparison_table, gpu_table


def shares(generate, train, switch):
    return {
        Activity.GENERATE: generate,
        Activity.TRAIN: train,
        Activity.SWITCH: switch,
        Activity.IDLE: 1 - generate - train - switch,
    }


def pipeline(mode, name="p0", tokens=1000, **changes):
    values = dict(
        steps=8,
        reward_start=0.2,
        reward_end=0.6,
        rollout_tokens=tokens,
        wall_s=10.0,
        preempted=4,
        redispatched=3,
        tokens_kept=120,
        switch_in_seconds=(0.1, 0.2),
        switch_out_seconds=(0.3,),
    )
    return PipelineReport(mode=mode, pipeline=name, **{**values, **changes})


def run(mode, tokens=1000, gpu=(0.4, 0.2, 0.0), **changes):
    return RunReport(
        mode=mode,
        seed=3,
        policy="resume",
        pipelines=tuple(pipeline(mode, name, tokens, **changes) for name in ("p0", "p1")),
        gpu_busy={0: shares(*gpu), 1: shares(*gpu)},
    )


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 0, 0, 0, 0, 3, 5], (1, 4)),
        ([0, 0, 0, 1, 9, 9, 9], (0, 9)),  # a quarter of 7 is 1
        ([2, 4], (2, 4)),
        ([5], (5, 5)),
    ],
)
def test_quarter_means(rewards, expected):
    assert quarter_means(rewards) == expected


def test_no_rewards_have_no_mean():
    assert all(math.isnan(value) for value in quarter_means([]))


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [([3, 1, 2], 0.5, 2), ([1, 2, 3, 4], 0.5, 2), (range(1, 11), 0.9, 9), ([7], 0.9, 7)],
)
def test_percentile(values, share, expected):
    assert percentile(list(values), share) == expected


@pytest.mark.parametrize(
    ("shared", "text"),
    [
        (run("shared", 1310, (0.6, 0.25, 0.05)), "sharing pays: 1.31x"),
        (
            run("shared", 900, (0.36, 0.2, 0.0)),
            "sharing lost: 0.90x because the GPUs were idle for 44% of the time (alone 40%)",
        ),
        (
            run("shared", 800, (0.3, 0.2, 0.3)),
            "sharing lost: 0.80x because the GPUs were changing hands for 30% of the time (alone 0%)",
        ),
        (
            run("shared", 800, (0.2, 0.5, 0.05)),
            "sharing lost: 0.80x because the GPUs were training for 50% of the time (alone 20%)",
        ),
        (
            run("shared", 500, (0.45, 0.2, 0.0), tokens_dropped=500),
            "sharing lost: 0.50x because 50% of the sampled tokens were thrown away (alone 0%)",
        ),
        (
            run("shared", 900, (0.6, 0.2, 0.1)),
            "sharing lost: 0.90x because a generating GPU sampled 150 tokens/s (alone 250)",
        ),
        (
            run("shared", 1010, (0.3, 0.2, 0.3)),
            "sharing changed nothing: 1.01x because the GPUs were changing hands for 30% of the"
            " time (alone 0%)",
        ),
        (
            run("shared", 1100, (0.44, 0.2, 0.2)),
            "sharing pays a little: 1.10x, not more because the GPUs were changing hands for 20%"
            " of the time even when shared",
        ),
    ],
)
def test_verdict(shared, text):
    assert judge(run("alone"), shared).text == text


def test_without_a_trace_the_verdict_says_that_the_cause_is_unknown():
    shared = replace(run("shared", 500), gpu_busy={})
    assert "does not show" in judge(run("alone"), shared).text


def test_nothing_to_compare_with():
    verdict = judge(run("alone", 0), run("shared"))
    assert math.isnan(verdict.ratio)
    assert "no comparison" in verdict.text


def test_rates_are_of_the_pipelines_own_time():
    one = pipeline("alone", tokens=500, wall_s=4.0)
    assert (one.rollout_tokens_per_s, one.trainer_steps_per_s) == (125, 2)
    assert pipeline("alone", wall_s=0.0).rollout_tokens_per_s == 0


def test_broken_guarantees_are_named():
    bad = run("shared", lost_groups=2, aborted_tokens_trained=5)
    assert broken_guarantees([run("alone"), bad]) == [
        "p0 (shared): 2 lost groups",
        "p0 (shared): 5 tokens of aborted answers in training",
        "p1 (shared): 2 lost groups",
        "p1 (shared): 5 tokens of aborted answers in training",
    ]


def shown(renderable, width=80):
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(renderable)
    return console.export_text()


def row(text, label):
    return next(line for line in text.splitlines() if label in line)


def cells(text, label):
    return re.split(r"\s+", row(text, label).partition(label)[2].strip())


def test_the_table_compares_modes_side_by_side():
    text = shown(comparison_table(run("alone"), run("shared", 1500, (0.7, 0.2, 0.05))))
    assert cells(text, "rollout tokens/s") == ["100", "150", "100", "150", "200", "300", "1.50x"]
    assert cells(text, "lost groups") == ["0"] * 6
    assert cells(text, "reward, last quarter")[0] == "0.60"
    assert cells(text, "s to bring in, median")[0] == "0.10"
    assert cells(text, "s per switch, p90") == ["0.30"] * 6
    assert cells(text, "switches")[4] == "6"
    assert "sharing pays: 1.50x" in text


@pytest.mark.parametrize(("alone", "shared"), [(run("alone"), None), (None, run("shared"))])
def test_the_table_of_one_mode_compares_nothing(alone, shared):
    text = shown(comparison_table(alone, shared))
    assert len(cells(text, "rollout tokens/s")) == 3
    assert "sharing" not in text


def test_the_gpu_table_lists_every_gpu_and_mode():
    text = shown(gpu_table([run("alone"), run("shared", gpu=(0.7, 0.2, 0.05))]))
    assert cells(text, "GPU 0, alone") == ["60%", "40%", "20%", "0%", "40%"]
    assert cells(text, "GPU 1, shared") == ["95%", "70%", "20%", "5%", "5%"]


PROVENANCE = Provenance(
    "nemo-rl-rlix demo", "2026-01-01T00:00:00+00:00", {"torch": "2"}, {"cores": 2}
)


def find(records, metric, **params):
    (found,) = [
        r
        for r in records
        if r.metric == metric and all(r.params.get(k) == v for k, v in params.items())
    ]
    return found


def test_records_hold_every_figure_once():
    shared = run("shared", 1500, (0.7, 0.2, 0.05))
    records = run_records(run("alone"), shared, PROVENANCE)
    assert len({record.key for record in records}) == len(records)
    assert {record.metric for record in records} >= {
        *("lost_groups", "duplicated_groups", "reward_start", "reward_end"),
        *("rollout_tokens_per_s", "trainer_steps_per_s", "switch_s", "preempted", "redispatched"),
        *("tokens_kept", "aborted_tokens_trained", "gpu_busy_share"),
        "shared_over_halves_tokens_ratio",
    }
    rate = find(records, "rollout_tokens_per_s", pipeline="p1", mode="shared")
    assert (rate.value, rate.reference, rate.unit) == (150, 100, "tokens/s")
    assert rate.params == {
        "pipeline": "p1",
        "mode": "shared",
        "seed": 3,
        "policy": "resume",
        "steps": 8,
        "kill_shard": False,
    }
    assert rate.command == "nemo-rl-rlix demo"
    switch = find(records, "switch_s", pipeline="p0", mode="alone")
    assert (switch.value, switch.spread, switch.n) == (0.2, (0.1, 0.3), 3)
    busy = find(records, "gpu_busy_share", gpu=1, mode="shared", activity="all")
    assert busy.value == pytest.approx(0.95)
    ratio = find(records, "shared_over_halves_tokens_ratio")
    assert (ratio.value, ratio.reference) == (1.5, 1.2)


def test_a_figure_that_does_not_exist_has_no_record():
    report = run("shared", switch_in_seconds=(), switch_out_seconds=(), reward_end=math.nan)
    metrics = {record.metric for record in run_records(None, report, PROVENANCE)}
    assert not metrics & {"switch_s", "reward_end", "shared_over_halves_tokens_ratio"}
    assert "switches" in metrics
