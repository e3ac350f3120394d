"""Turns the demo's result into what a person takes away: tables, picture, trace, records."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from nemo_rl_rlix.observe.perfetto import to_perfetto
from nemo_rl_rlix.observe.records import (
    collect_versions,
    command_line,
    describe_hardware,
    utc_now,
    write_records,
)
from nemo_rl_rlix.observe.timeline import Panel, RunWindow, plot_timeline
from nemo_rl_rlix.observe.trace import read_events
from nemo_rl_rlix.reference.report import DemoResult, RunMode, RunReport, broken_guarantees, judge
from nemo_rl_rlix.reference.report_records import Provenance, run_records
from nemo_rl_rlix.reference.tables import comparison_table, gpu_table

if TYPE_CHECKING:
    from rich.console import Console

    from nemo_rl_rlix.reference.options import DemoOptions

TRACE_FILE = "trace.json.gz"
PICTURE_FILE = "timeline.png"
PANEL_TITLES: dict[RunMode, str] = {
    "alone": "Alone: each pipeline keeps its half",
    "shared": "Shared: GPUs go to whoever needs them",
}


@dataclass(frozen=True)
class Artifacts:
    """Files that were written; ``records`` is ``None`` if they were not asked for."""

    trace: Path
    picture: Path
    records: Path | None


def write_artifacts(result: DemoResult, options: DemoOptions) -> Artifacts:
    """Write the trace, the picture and, if asked for, the records."""
    options.out.mkdir(parents=True, exist_ok=True)
    windows: dict[RunMode, list[RunWindow]] = {}
    events = []
    read = {trace.directory: read_events(trace.directory) for trace in result.traces}
    for trace in result.traces:
        mine = read[trace.directory]
        windows.setdefault(trace.mode, []).append(RunWindow(mine, trace.start_s, trace.end_s))
    for mine in read.values():
        events += mine
    trace_path = options.out / TRACE_FILE
    to_perfetto(events, trace_path)
    picture = options.out / PICTURE_FILE
    notes = {report.mode: _note(report) for report in result.reports}
    plot_timeline(
        [
            Panel(PANEL_TITLES[mode], tuple(runs), notes.get(mode, ""))
            for mode, runs in windows.items()
        ],
        picture,
        title=_headline(result),
        subtitle=f"Two GRPO pipelines, p0 and p1, on two logical GPUs: {options.steps} training"
        f" steps each, seed {options.seed}. Same work and time scale in both parts.",
    )
    if options.json_path is not None:
        provenance = Provenance(
            command_line(sys.argv), utc_now(), collect_versions(), describe_hardware()
        )
        write_records(options.json_path, run_records(result.alone, result.shared, provenance))
    return Artifacts(trace_path, picture, options.json_path)


def present(result: DemoResult, artifacts: Artifacts, console: Console) -> list[str]:
    """Show the tables and say where the files are.

    Returns:
        What must not happen and did, one line each; empty for a sound run.
    """
    console.print()
    console.print(comparison_table(result.alone, result.shared))
    console.print(gpu_table(result.reports))
    console.print(f"Picture  {artifacts.picture}", soft_wrap=True, highlight=False)
    console.print(
        f"Trace    {artifacts.trace}  (open it at https://ui.perfetto.dev)",
        soft_wrap=True,
        highlight=False,
    )
    if artifacts.records is not None:
        console.print(f"Records  {artifacts.records}", soft_wrap=True, highlight=False)
    return broken_guarantees(result.reports)


def _note(report: RunReport) -> str:
    done = ", ".join(f"{one.pipeline} done after {one.wall_s:.0f} s" for one in report.pipelines)
    return f"{report.tokens_per_s:,.0f} rollout tokens/s; {done}"


def _headline(result: DemoResult) -> str:
    if result.alone is None or result.shared is None:
        return "Who used which GPU, and for what"
    ratio = judge(result.alone, result.shared).ratio
    if math.isnan(ratio):
        return "Sharing and not sharing: nothing to compare"
    return f"Sharing the GPUs gives {ratio:.2f}x the rollout tokens per second"
