"""Trace events as a file that https://ui.perfetto.dev opens (Chrome's trace-event JSON)."""

from __future__ import annotations

import gzip
import json
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nemo_rl_rlix.observe.trace import EventKind, TraceEvent

TrackKey = tuple[int, int, str, str]
"""(group order, track order, group name, track name); sorts as it is shown."""


def assign_lanes(spans: Sequence[tuple[float, float]]) -> list[int]:
    """Give every span a lane on which it nests or does not overlap.

    The viewer draws one line per lane and takes spans on it for a call stack, so
    two that overlap without one holding the other must not share one.

    Args:
        spans: (start, end) in any order.

    Returns:
        The lane of each span, from 0, in the order of ``spans``.
    """
    lanes: list[list[float]] = []
    result = [0] * len(spans)
    for index in sorted(range(len(spans)), key=lambda i: (spans[i][0], -spans[i][1])):
        start, end = spans[index]
        for open_ends in lanes:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
        free = (n for n, ends in enumerate(lanes) if not ends or ends[-1] >= end)
        lane = next(free, len(lanes))
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append(end)
        result[index] = lane
    return result


def perfetto_json(events: Sequence[TraceEvent]) -> dict[str, Any]:
    """Build the trace: a group for the GPUs, one per pipeline, one for the control plane.

    Everything that any pipeline does on a GPU is on that GPU's track, with the
    pipeline in front of the name. Times are microseconds from the first event.
    """
    origin = min((event.start_s for event in events), default=0.0)
    tracks: dict[TrackKey, list[TraceEvent]] = defaultdict(list)
    for event in events:
        tracks[_track_key(event.track)].append(event)
    rows: list[dict[str, Any]] = []
    groups: dict[tuple[int, str], int] = {}
    next_tid = 1000
    for key in sorted(tracks):
        group_order, _, group, track = key
        if (group_order, group) not in groups:
            groups[group_order, group] = pid = len(groups) + 1
            rows.append(_meta("process_name", pid, 0, name=group))
            rows.append(_meta("process_sort_index", pid, 0, sort_index=pid))
        pid = groups[group_order, group]
        members = tracks[key]
        spans = [event for event in members if event.kind is EventKind.SPAN]
        lanes = assign_lanes([(event.start_s, event.end_s) for event in spans])
        instants = [event for event in members if event.kind is EventKind.INSTANT]
        if spans or instants:
            for lane in range(max(lanes, default=0) + 1):
                name = track if lane == 0 else f"{track} ({lane + 1})"
                rows.append(_meta("thread_name", pid, next_tid + lane, name=name))
                rows.append(
                    _meta("thread_sort_index", pid, next_tid + lane, sort_index=next_tid + lane)
                )
        for event, lane in zip(spans, lanes, strict=True):
            rows.append(
                {
                    "ph": "X",
                    "pid": pid,
                    "tid": next_tid + lane,
                    "name": _span_name(event),
                    "cat": event.track,
                    "ts": _us(event.start_s - origin),
                    "dur": _us(event.duration_s),
                    "args": {**event.args, "process": event.process},
                }
            )
        for event in instants:
            rows.append(
                {
                    "ph": "i",
                    "s": "t",
                    "pid": pid,
                    "tid": next_tid,
                    "name": event.name,
                    "cat": event.track,
                    "ts": _us(event.start_s - origin),
                    "args": {**event.args, "process": event.process},
                }
            )
        for event in members:
            if event.kind is EventKind.COUNTER:
                rows.append(
                    {
                        "ph": "C",
                        "pid": pid,
                        "name": f"{track}: {event.name}",
                        "ts": _us(event.start_s - origin),
                        "args": {event.name: event.args["value"]},
                    }
                )
        next_tid += max(lanes, default=0) + 1
    return {"traceEvents": rows, "displayTimeUnit": "ms"}


def to_perfetto(events: Sequence[TraceEvent], path: str | os.PathLike[str]) -> None:
    """Write the trace to ``path``, compressed if the name ends with ``.gz``."""
    data = json.dumps(perfetto_json(events), separators=(",", ":")).encode()
    target = Path(path)
    # Without a time stamp equal traces give equal files.
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)


def _track_key(track: str) -> TrackKey:
    parts = track.split("/")
    if parts[0] == "gpu" and len(parts) > 1 and parts[1].isdigit():
        return (0, int(parts[1]), "GPUs", f"GPU {parts[1]}")
    if parts[0] == "pipeline" and len(parts) > 1:
        return (1, 0, f"pipeline {parts[1]}", "/".join(parts[2:]) or "events")
    return (2, 0, "control plane", track)


def _span_name(event: TraceEvent) -> str:
    parts = event.track.split("/")
    return f"{parts[2]} {event.name}" if parts[0] == "gpu" and len(parts) > 2 else event.name


def _meta(kind: str, pid: int, tid: int, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
