"""The demo's figures as records, see :mod:`nemo_rl_rlix.observe.records`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_rlix.observe.busy import Activity
from nemo_rl_rlix.observe.records import Record, Scalar
from nemo_rl_rlix.reference.report import PAYS, PipelineReport, RunReport, judge, percentile


@dataclass(frozen=True)
class Provenance:
    """What every record of a run has in common."""

    command: str
    date: str
    versions: Mapping[str, str]
    hardware: Mapping[str, Scalar]


@dataclass(frozen=True)
class _Figure:
    metric: str
    value: float
    unit: str
    reference: float | None = None
    spread: tuple[float, float] | None = None
    n: int = 1


def run_records(
    alone: RunReport | None, shared: RunReport | None, provenance: Provenance
) -> list[Record]:
    """All figures of the table. A figure that does not exist (``nan``) has no record.

    ``params`` hold ``pipeline`` (``all`` for what concerns every one), ``mode``, ``seed``,
    ``policy``, ``steps``, ``kill_shard`` and ``data`` (if given); ``gpu_busy_share`` also ``gpu`` and ``activity``.
    The ``reference`` of a rate in the shared run is the same pipeline's alone.
    """
    records: list[Record] = []

    def add(figure: _Figure, params: dict[str, Scalar]) -> None:
        if not math.isfinite(figure.value):
            return
        records.append(
            Record(
                metric=figure.metric,
                value=figure.value,
                unit=figure.unit,
                reference=figure.reference,
                spread=figure.spread,
                n=figure.n,
                params=params,
                versions=dict(provenance.versions),
                hardware=dict(provenance.hardware),
                command=provenance.command,
                date=provenance.date,
            )
        )

    for report in (one for one in (alone, shared) if one is not None):
        for pipeline in report.pipelines:
            rival = _same_pipeline(alone, pipeline.pipeline) if report is shared else None
            for figure in _pipeline_figures(pipeline, rival):
                add(figure, {"pipeline": pipeline.pipeline, **_params(report)})
        for gpu, shares in sorted(report.gpu_busy.items()):
            busy = {"all": 1 - shares.get(Activity.IDLE, 0.0)}
            for activity in (Activity.GENERATE, Activity.TRAIN, Activity.SWITCH):
                busy[str(activity)] = shares.get(activity, 0.0)
            for name, share in busy.items():
                where: dict[str, Scalar] = {"pipeline": "all", "gpu": gpu, "activity": name}
                add(_Figure("gpu_busy_share", share, "share"), {**where, **_params(report)})
    if alone is not None and shared is not None:
        ratio = judge(alone, shared).ratio
        figure = _Figure("shared_over_halves_tokens_ratio", ratio, "ratio", reference=PAYS)
        add(figure, {"pipeline": "all", **_params(shared)})
    return records


def _params(report: RunReport) -> dict[str, Scalar]:
    # Another task's figures are others, not newer ones.
    task: dict[str, Scalar] = {"data": report.data} if report.data else {}
    return {
        **task,
        "mode": report.mode,
        "seed": report.seed,
        "policy": report.policy,
        "steps": max((one.steps for one in report.pipelines), default=0),
        "kill_shard": report.shard_killed,
    }


def _pipeline_figures(one: PipelineReport, alone: PipelineReport | None) -> list[_Figure]:
    quarter = max(1, one.steps // 4)
    start = one.reward_start if math.isfinite(one.reward_start) else None
    figures = [
        _Figure("reward_start", one.reward_start, "mean reward", n=quarter),
        _Figure("reward_end", one.reward_end, "mean reward", reference=start, n=quarter),
        _Figure(
            "rollout_tokens_per_s",
            one.rollout_tokens_per_s,
            "tokens/s",
            reference=alone.rollout_tokens_per_s if alone else None,
        ),
        _Figure(
            "trainer_steps_per_s",
            one.trainer_steps_per_s,
            "steps/s",
            reference=alone.trainer_steps_per_s if alone else None,
        ),
    ]
    counts = {
        "switches": len(one.switch_seconds),
        "preempted": one.preempted,
        "redispatched": one.redispatched,
        "tokens_kept": one.tokens_kept,
        "tokens_dropped": one.tokens_dropped,
    }
    figures += [
        _Figure(
            name,
            percentile(seconds, 0.5),
            "s",
            spread=(min(seconds), max(seconds)) if seconds else None,
            n=max(1, len(seconds)),
        )
        for name, seconds in (
            ("switch_s", one.switch_seconds),
            ("switch_in_s", one.switch_in_seconds),
            ("switch_out_s", one.switch_out_seconds),
        )
    ]
    figures += [_Figure(name, count, "count") for name, count in counts.items()]
    zero = {
        "lost_groups": one.lost_groups,
        "duplicated_groups": one.duplicated_groups,
        "aborted_tokens_trained": one.aborted_tokens_trained,
    }
    return figures + [_Figure(name, count, "count", reference=0) for name, count in zero.items()]


def _same_pipeline(report: RunReport | None, name: str) -> PipelineReport | None:
    if report is None:
        return None
    return next((one for one in report.pipelines if one.pipeline == name), None)
