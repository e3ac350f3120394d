"""A picture of a run: who used which GPU for what, and what came out of it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from nemo_rl_rlix.observe.busy import Activity, GpuSpan, gpu_spans, gpu_use, tokens_per_bin
from nemo_rl_rlix.observe.palette import paper_colour
from nemo_rl_rlix.observe.trace import TraceEvent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TOKEN_BINS = 90
LEFT, AXES_WIDTH = 0.06, 0.79
DRAWN = (Activity.GENERATE, Activity.TRAIN, Activity.SWITCH)


@dataclass(frozen=True)
class RunWindow:
    """The measured part of one run.

    Attributes:
        events: Events of the run; those outside the window are cut off.
        start_s: Unix seconds; drawn at 0.
        end_s: Unix seconds.
    """

    events: Sequence[TraceEvent]
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Panel:
    """One part of the picture.

    Attributes:
        title: What it shows.
        runs: Runs that are drawn together, each from its own start; several when
            pipelines that use different GPUs ran one after the other.
        note: Key figure, at the right of the title.
    """

    title: str
    runs: tuple[RunWindow, ...]
    note: str = ""


@dataclass(frozen=True)
class _Drawn:
    """A panel as numbers: spans from 0, and how long each GPU was in use."""

    panel: Panel
    spans: list[GpuSpan]
    length_s: dict[int, float]
    share: dict[int, dict[Activity, float]]

    @property
    def end_s(self) -> float:
        return max(self.length_s.values(), default=0.0)


def cut(spans: Iterable[GpuSpan], start_s: float, end_s: float) -> list[GpuSpan]:
    """Keep what lies inside the window, tokens in proportion, on a clock that starts at it."""
    inside = []
    for span in spans:
        low, high = max(span.start_s, start_s), min(span.end_s, end_s)
        if high <= low:
            continue
        part = (high - low) / (span.end_s - span.start_s)
        inside.append(
            replace(span, start_s=low - start_s, end_s=high - start_s, tokens=span.tokens * part)
        )
    return inside


def join_close(spans: Iterable[GpuSpan], gap_s: float) -> list[GpuSpan]:
    """Join spans of one GPU, pipeline and activity that are closer than can be seen."""
    joined: list[GpuSpan] = []
    last: dict[tuple[int, str, Activity], int] = {}
    for span in sorted(spans, key=lambda one: one.start_s):
        key = (span.gpu, span.pipeline, span.activity)
        index = last.get(key)
        if index is not None and span.start_s - joined[index].end_s <= gap_s:
            joined[index] = replace(joined[index], end_s=max(joined[index].end_s, span.end_s))
        else:
            last[key] = len(joined)
            joined.append(span)
    return joined


def plot_timeline(
    panels: Sequence[Panel],
    path: str | os.PathLike[str],
    *,
    title: str,
    subtitle: str = "",
) -> None:
    """Draw the panels under one another on one time scale, as a PNG.

    Args:
        panels: E.g. each pipeline alone on its half, then both sharing.
        path: File to write.
        title: The message of the picture.
        subtitle: What was run, in one line.
    """
    figure = draw_timeline(panels, title=title, subtitle=subtitle)
    figure.savefig(path, format="png", dpi=130)


def draw_timeline(panels: Sequence[Panel], *, title: str, subtitle: str = "") -> Figure:
    """Build the figure of :func:`plot_timeline` without writing it."""
    # The figure is built without pyplot: no global state, no display, any thread.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    drawn = [_prepare(panel) for panel in panels]
    pipelines = sorted({span.pipeline for one in drawn for span in one.spans})
    end_s = max((one.end_s for one in drawn), default=0.0) or 1.0
    bin_s = end_s / TOKEN_BINS
    heights: list[float] = []
    for one in drawn:
        heights += [max(1, len(one.length_s)) * 0.62, 0.85]
    top_in, bottom_in, gap_in = 1.72, 0.52, 0.62
    height = sum(heights) + gap_in * max(0, len(drawn) - 1) + top_in + bottom_in
    figure = Figure(figsize=(13.5, height))
    FigureCanvasAgg(figure)
    figure.text(LEFT, 1 - 0.42 / height, title, size=17, weight="bold", va="center")
    figure.text(LEFT, 1 - 0.75 / height, subtitle, size=10.5, color="#444444", va="center")
    y = height - top_in
    rate_axes: list[Axes] = []
    top_rate = 0.0
    for index, one in enumerate(drawn):
        gpu_h, rate_h = heights[2 * index], heights[2 * index + 1]
        y -= gpu_h
        axes = figure.add_axes((LEFT, y / height, AXES_WIDTH, gpu_h / height))
        _draw_gpus(axes, one, pipelines, end_s)
        y -= rate_h + 0.08
        rates = figure.add_axes((LEFT, y / height, AXES_WIDTH, rate_h / height))
        top_rate = max(top_rate, _draw_rates(rates, one, pipelines, bin_s))
        rate_axes.append(rates)
        rates.set_xlim(0, end_s)
        rates.tick_params(axis="x", labelbottom=index == len(drawn) - 1)
        y -= gap_in - 0.08
    for rates in rate_axes:
        rates.set_ylim(0, top_rate * 1.1 or 1.0)
    if rate_axes:
        rate_axes[-1].set_xlabel("seconds since the start of the run", size=10)
    _draw_legend(figure, pipelines, height)
    return figure


def _prepare(panel: Panel) -> _Drawn:
    spans: list[GpuSpan] = []
    length_s: dict[int, float] = {}
    share: dict[int, dict[Activity, float]] = {}
    for run in panel.runs:
        mine = cut(gpu_spans(run.events), run.start_s, run.end_s)
        spans += mine
        for gpu, use in gpu_use(mine, 0.0, run.end_s - run.start_s).items():
            length_s[gpu] = max(length_s.get(gpu, 0.0), use.window_s)
            share[gpu] = use.shares()
    return _Drawn(panel, spans, dict(sorted(length_s.items())), share)


def _draw_gpus(axes: Axes, one: _Drawn, pipelines: list[str], end_s: float) -> None:
    for row, (gpu, length_s) in enumerate(one.length_s.items()):
        axes.broken_barh([(0, length_s)], (row - 0.38, 0.76), color=paper_colour(0, Activity.IDLE))
        spans = join_close([s for s in one.spans if s.gpu == gpu], end_s / 2500)
        for activity in DRAWN:
            for index, pipeline in enumerate(pipelines):
                bars = [
                    (s.start_s, s.end_s - s.start_s)
                    for s in spans
                    if s.pipeline == pipeline and s.activity is activity
                ]
                axes.broken_barh(
                    bars, (row - 0.38, 0.76), facecolor=paper_colour(index, activity), linewidth=0
                )
        share = one.share[gpu]
        axes.annotate(
            f"{1 - share[Activity.IDLE]:.0%} busy",
            (1.008, row + 0.12),
            xycoords=("axes fraction", "data"),
            size=11,
            weight="bold",
            va="bottom",
            annotation_clip=False,
        )
        axes.annotate(
            f"gen {share[Activity.GENERATE]:.0%}  train {share[Activity.TRAIN]:.0%}"
            f"  switch {share[Activity.SWITCH]:.0%}",
            (1.008, row + 0.16),
            xycoords=("axes fraction", "data"),
            size=7.8,
            color="#555555",
            va="top",
            annotation_clip=False,
        )
    axes.set_xlim(0, end_s)
    axes.set_ylim(len(one.length_s) - 0.45, -0.55)
    axes.set_yticks(range(len(one.length_s)), [f"GPU {gpu}" for gpu in one.length_s], size=11)
    axes.tick_params(axis="both", length=0, labelbottom=False)
    axes.spines[:].set_visible(False)
    axes.set_title(one.panel.title, loc="left", size=12.5, weight="bold", pad=5)
    axes.set_title(one.panel.note, loc="right", size=11, pad=5)
    axes.axvline(one.end_s, color="#222222", linewidth=1.4)
    if one.end_s < 0.9 * end_s:
        axes.text(
            one.end_s + end_s * 0.007,
            (len(one.length_s) - 1) / 2,
            f"done after {one.end_s:.0f} s",
            size=12,
            va="center",
        )


def _draw_rates(axes: Axes, one: _Drawn, pipelines: list[str], bin_s: float) -> float:
    """Draw tokens/s of each pipeline; return the highest."""
    bins = int(one.end_s / bin_s + 0.5)
    top = 0.0
    for index, pipeline in enumerate(pipelines):
        tokens = tokens_per_bin(one.spans, pipeline, 0.0, bin_s, bins)
        rates = _smooth([count / bin_s for count in tokens])
        if not any(rates):
            continue
        times = [(i + 0.5) * bin_s for i in range(bins)]
        axes.plot(times, rates, color=paper_colour(index, Activity.TRAIN), linewidth=1.4)
        axes.annotate(
            pipeline,
            (1.008, 0.62 - 0.27 * index),
            xycoords="axes fraction",
            size=10.5,
            weight="bold",
            color=paper_colour(index, Activity.TRAIN),
            annotation_clip=False,
        )
        top = max(top, *rates)
    axes.set_ylabel("sampled\ntokens/s", size=8.5)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#E4E4E4", linewidth=0.6)
    axes.set_axisbelow(True)
    return top


def _smooth(values: list[float]) -> list[float]:
    """Mean over three neighbours, so that single engine steps do not show as noise."""
    return [
        sum(values[max(0, i - 1) : i + 2]) / len(values[max(0, i - 1) : i + 2])
        for i in range(len(values))
    ]


def _draw_legend(figure: Figure, pipelines: list[str], height: float) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(color=paper_colour(index, activity), label=f"{pipeline} {word}")
        for index, pipeline in enumerate(pipelines)
        for activity, word in ((Activity.GENERATE, "generates"), (Activity.TRAIN, "trains"))
    ]
    entries.append(
        Patch(color=paper_colour(0, Activity.SWITCH), label="changes hands (sleep, wake, sync)")
    )
    entries.append(Patch(color=paper_colour(0, Activity.IDLE), label="idle"))
    figure.legend(
        handles=entries,
        loc="upper left",
        bbox_to_anchor=(LEFT - 0.005, 1 - 0.88 / height),
        ncols=len(entries),
        frameon=False,
        fontsize=10.5,
        handlelength=1.3,
        columnspacing=1.6,
    )
