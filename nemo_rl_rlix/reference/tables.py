"""The tables that the demo ends with. Pure functions over the reports."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich import box
from rich.table import Table

from nemo_rl_rlix.observe.busy import Activity
from nemo_rl_rlix.reference.report import PipelineReport, RunReport, judge, percentile


def comparison_table(alone: RunReport | None, shared: RunReport | None) -> Table:
    """The demo's table: a column per pipeline and mode, a row per figure."""
    reports = [one for one in (alone, shared) if one is not None]
    names = sorted({one.pipeline for report in reports for one in report.pipelines})
    table = _table(_table_title(reports))
    for name in [*names, "all"]:
        for report in reports:
            table.add_column(f"{name}\n{report.mode}", justify="right")
    both = alone is not None and shared is not None
    if both:
        table.add_column("shared /\nalone", justify="right")

    def row(
        label: str,
        one: Callable[[PipelineReport], str],
        every: Callable[[RunReport], str] = lambda report: "",
        ratio: str = "",
    ) -> None:
        cells = [
            next((one(p) for p in report.pipelines if p.pipeline == name), "")
            for name in names
            for report in reports
        ]
        cells += [every(report) for report in reports]
        table.add_row(label, *cells, *([ratio] if both else []))

    def count(label: str, value: Callable[[PipelineReport], int]) -> None:
        row(label, lambda p: f"{value(p):,}", lambda r: f"{sum(map(value, r.pipelines)):,}")

    def seconds(
        label: str, share: float, value: Callable[[PipelineReport], tuple[float, ...]]
    ) -> None:
        row(
            label,
            lambda p: _seconds(value(p), share),
            lambda r: _seconds([s for one in r.pipelines for s in value(one)], share),
        )

    row("reward, first quarter", lambda p: f"{p.reward_start:.2f}")
    row("reward, last quarter", lambda p: f"{p.reward_end:.2f}")
    row("training steps", lambda p: f"{p.steps}")
    row("seconds", lambda p: f"{p.wall_s:.1f}")
    row(
        "rollout tokens/s",
        lambda p: f"{p.rollout_tokens_per_s:,.0f}",
        lambda r: f"{r.tokens_per_s:,.0f}",
        _times(alone, shared, lambda r: r.tokens_per_s),
    )
    row(
        "trainer steps/s",
        lambda p: f"{p.trainer_steps_per_s:.3f}",
        lambda r: f"{_steps_per_s(r):.3f}",
        _times(alone, shared, _steps_per_s),
    )
    table.add_section()
    count("switches", lambda p: len(p.switch_seconds))
    seconds("s to bring in, median", 0.5, lambda p: p.switch_in_seconds)
    seconds("s to take, median", 0.5, lambda p: p.switch_out_seconds)
    seconds("s per switch, p90", 0.9, lambda p: p.switch_seconds)
    count("preempted requests", lambda p: p.preempted)
    count("re-dispatched", lambda p: p.redispatched)
    count("tokens kept", lambda p: p.tokens_kept)
    count("tokens dropped", lambda p: p.tokens_dropped)
    table.add_section()
    count("lost groups", lambda p: p.lost_groups)
    count("duplicated groups", lambda p: p.duplicated_groups)
    count("aborted tokens trained", lambda p: p.aborted_tokens_trained)
    if alone is not None and shared is not None:
        table.caption = judge(alone, shared).text
        table.caption_style = "bold"
    return table


def gpu_table(reports: Sequence[RunReport]) -> Table:
    """Where the time of each logical GPU went, by mode."""
    table = _table("Time of each logical GPU")
    activities = (Activity.GENERATE, Activity.TRAIN, Activity.SWITCH, Activity.IDLE)
    for heading in ("busy", *activities):
        table.add_column(str(heading), justify="right")
    for report in reports:
        for gpu, shares in sorted(report.gpu_busy.items()):
            cells = [f"{shares.get(activity, 0.0):.0%}" for activity in activities]
            busy = f"{1 - shares.get(Activity.IDLE, 0.0):.0%}"
            table.add_row(f"GPU {gpu}, {report.mode}", busy, *cells)
    return table


def _table_title(reports: Sequence[RunReport]) -> str:
    if not reports:
        return "No run"
    first = reports[0]
    killed = ", a shard was killed" if any(one.shard_killed for one in reports) else ""
    return f"Seed {first.seed}, preempted requests {first.policy}{killed}"


def _steps_per_s(report: RunReport) -> float:
    return sum(one.trainer_steps_per_s for one in report.pipelines)


def _times(
    alone: RunReport | None, shared: RunReport | None, value: Callable[[RunReport], float]
) -> str:
    if alone is None or shared is None or value(alone) <= 0:
        return ""
    return f"{value(shared) / value(alone):.2f}x"


def _seconds(values: Sequence[float], share: float) -> str:
    return f"{percentile(values, share):.2f}" if values else "-"


def _table(title: str) -> Table:
    """A table that fits 80 columns with two pipelines; its first column is for labels."""
    table = Table(
        title=title,
        title_style="bold",
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    table.add_column("", no_wrap=True)
    return table
