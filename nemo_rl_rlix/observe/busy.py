"""How long each logical GPU was busy, and with what. Pure functions over trace events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_rlix.observe.trace import EventKind, TraceEvent


class Activity(StrEnum):
    """What a GPU's time goes to."""

    GENERATE = "generate"
    TRAIN = "train"
    SWITCH = "switch"
    IDLE = "idle"


ACTIVITY_OF_SPAN: Mapping[str, Activity] = {
    "generate": Activity.GENERATE,
    "train": Activity.TRAIN,
    "drain": Activity.SWITCH,
    "sleep": Activity.SWITCH,
    "wake": Activity.SWITCH,
    "sync": Activity.SWITCH,
    "finalize": Activity.SWITCH,
    "probe": Activity.SWITCH,
    "refresh": Activity.SWITCH,
    "build_cache": Activity.SWITCH,
    "offload": Activity.SWITCH,
    "onload": Activity.SWITCH,
    "build": Activity.SWITCH,
    "kill": Activity.SWITCH,
}
"""Span name on a ``gpu/`` track -> what it counts as; other spans do not count."""


@dataclass(frozen=True, slots=True)
class GpuSpan:
    """One pipeline's use of one logical GPU.

    Attributes:
        gpu: Logical GPU id.
        pipeline: Name of the pipeline, empty if the track names none.
        activity: What it did.
        start_s: Unix seconds.
        end_s: Unix seconds.
        density: Share of the span in which the GPU worked, 0 to 1.
        tokens: Tokens sampled in it.
    """

    gpu: int
    pipeline: str
    activity: Activity
    start_s: float
    end_s: float
    density: float = 1.0
    tokens: float = 0.0


@dataclass(frozen=True)
class GpuUse:
    """Where the time of one logical GPU went.

    Attributes:
        window_s: Length of the window in seconds.
        seconds: (pipeline, activity) -> seconds. Their sum is at most ``window_s``.
    """

    window_s: float
    seconds: Mapping[tuple[str, Activity], float]

    @property
    def busy_share(self) -> float:
        """Share of the window in which anything was done."""
        return sum(self.seconds.values()) / self.window_s if self.window_s > 0 else 0.0

    def shares(self) -> dict[Activity, float]:
        """Share of the window by activity, idle included; they sum to 1."""
        totals = dict.fromkeys(Activity, 0.0)
        for (_, activity), seconds in self.seconds.items():
            totals[activity] += seconds / self.window_s if self.window_s > 0 else 0.0
        totals[Activity.IDLE] = max(0.0, 1.0 - sum(totals.values()))
        return totals


def gpu_spans(events: Iterable[TraceEvent]) -> list[GpuSpan]:
    """Select the spans that say what a GPU does, in the order of ``events``."""
    spans = []
    for event in events:
        parts = event.track.split("/")
        activity = ACTIVITY_OF_SPAN.get(event.name)
        if (
            event.kind is not EventKind.SPAN
            or activity is None
            or parts[0] != "gpu"
            or len(parts) < 2
            or not parts[1].isdigit()
        ):
            continue
        length = event.duration_s
        busy_s = float(event.args.get("busy_s", length))
        spans.append(
            GpuSpan(
                gpu=int(parts[1]),
                pipeline=parts[2] if len(parts) > 2 else "",
                activity=activity,
                start_s=event.start_s,
                end_s=event.end_s,
                density=min(1.0, busy_s / length) if length > 0 else 1.0,
                tokens=float(event.args.get("tokens", 0)),
            )
        )
    return spans


def gpu_use(
    spans: Sequence[GpuSpan], start_s: float, end_s: float, gpus: Iterable[int] = ()
) -> dict[int, GpuUse]:
    """Account for the time of each GPU between ``start_s`` and ``end_s``.

    Spans of one pipeline and activity that overlap count once. Where different
    ones overlap and would add up to more than the GPU has, each gets its
    proportion, so that no GPU is ever more than fully busy.

    Args:
        spans: See :func:`gpu_spans`.
        start_s: Unix seconds.
        end_s: Unix seconds.
        gpus: GPUs to list even when nothing happened on them.
    """
    wanted = sorted({*gpus, *(span.gpu for span in spans)})
    return {
        gpu: GpuUse(
            window_s=max(0.0, end_s - start_s),
            seconds=_sweep([span for span in spans if span.gpu == gpu], start_s, end_s),
        )
        for gpu in wanted
    }


def share_by_activity(
    events: Iterable[TraceEvent], start_s: float, end_s: float, gpus: Iterable[int] = ()
) -> dict[int, dict[Activity, float]]:
    """Share of the window that each GPU spent with each activity, idle included."""
    use = gpu_use(gpu_spans(events), start_s, end_s, gpus)
    return {gpu: one.shares() for gpu, one in use.items()}


def tokens_per_bin(
    spans: Iterable[GpuSpan], pipeline: str, start_s: float, bin_s: float, bins: int
) -> list[float]:
    """Tokens that ``pipeline`` sampled in each of ``bins`` bins of ``bin_s`` seconds.

    The tokens of a span are spread evenly over it.
    """
    totals = [0.0] * bins
    for span in spans:
        if span.pipeline != pipeline or not span.tokens:
            continue
        length = max(span.end_s - span.start_s, 1e-9)
        first = max(0, int((span.start_s - start_s) // bin_s))
        last = min(bins - 1, int((span.start_s + length - start_s) // bin_s))
        for index in range(first, last + 1):
            low = max(span.start_s, start_s + index * bin_s)
            high = min(span.start_s + length, start_s + (index + 1) * bin_s)
            totals[index] += span.tokens * max(0.0, high - low) / length
    return totals


def _sweep(
    spans: Sequence[GpuSpan], start_s: float, end_s: float
) -> dict[tuple[str, Activity], float]:
    """Walk over the points in time at which any span begins or ends."""
    edges: list[tuple[float, int, GpuSpan]] = []
    for span in spans:
        low, high = max(span.start_s, start_s), min(span.end_s, end_s)
        if high > low:
            edges.append((low, 1, span))
            edges.append((high, -1, span))
    edges.sort(key=lambda edge: (edge[0], edge[1]))
    seconds: dict[tuple[str, Activity], float] = {}
    active: dict[tuple[str, Activity], list[float]] = {}
    previous = start_s
    for now, change, span in edges:
        density = {key: max(values) for key, values in active.items() if values}
        # More than one whole GPU cannot be in use: each then gets its proportion.
        scale = max(1.0, sum(density.values()))
        for key, value in density.items():
            seconds[key] = seconds.get(key, 0.0) + (now - previous) * value / scale
        values = active.setdefault((span.pipeline, span.activity), [])
        if change > 0:
            values.append(span.density)
        else:
            values.remove(span.density)
        previous = now
    return seconds
