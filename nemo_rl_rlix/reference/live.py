"""What is happening right now, for somebody who watches a terminal."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from nemo_rl_rlix.observe.busy import Activity
from nemo_rl_rlix.observe.palette import terminal_colour

HISTORY_CELLS = 60
CELL_S = 1.0
REFRESH_PER_S = 2.0
PLAIN_INTERVAL_S = 5.0
BLOCKS = {Activity.GENERATE: "▄", Activity.TRAIN: "█", Activity.SWITCH: "x", Activity.IDLE: "·"}
WORDS = {
    Activity.GENERATE: "generates",
    Activity.TRAIN: "trains",
    Activity.SWITCH: "changes hands",
    Activity.IDLE: "waits",
}


@dataclass(frozen=True)
class PipelineView:
    """Latest figures of one pipeline.

    Attributes:
        step: Training steps done.
        steps: Training steps to do.
        reward: Mean reward of the latest step; ``None`` before the first.
        tokens_per_s: Rollout tokens per second, lately.
        preempted: See :class:`~nemo_rl_rlix.reference.report.PipelineReport`, as the next ones.
        redispatched: Likewise.
        tokens_kept: Likewise.
        switches: Likewise.
    """

    step: int = 0
    steps: int = 0
    reward: float | None = None
    tokens_per_s: float = 0.0
    preempted: int = 0
    redispatched: int = 0
    tokens_kept: int = 0
    switches: int = 0


@dataclass(frozen=True)
class GpuChange:
    """Since when a logical GPU has been used like this.

    Attributes:
        since_s: Seconds on the state's clock.
        pipeline: Who holds it; empty for nobody.
        activity: For what.
    """

    since_s: float
    pipeline: str = ""
    activity: Activity = Activity.IDLE


@dataclass(frozen=True)
class LiveSnapshot:
    """A consistent copy of everything that is shown."""

    now_s: float
    started_s: float
    phase: str
    pipelines: dict[str, PipelineView] = field(default_factory=dict)
    gpus: dict[int, tuple[GpuChange, ...]] = field(default_factory=dict)


class LiveState:
    """Collects what the demo polls, from any thread.

    Args:
        pipelines: Names, in the order of the rows and colours.
        gpus: Logical GPU ids.
        steps: Training steps of each pipeline.
        clock: Seconds from any origin.
    """

    def __init__(
        self,
        pipelines: Sequence[str],
        gpus: Sequence[int],
        steps: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._names = tuple(pipelines)
        self._gpu_ids = tuple(gpus)
        self._steps = steps
        self.start_run("starting")

    def start_run(self, phase: str) -> None:
        """Begin a run: every counter and the history start anew."""
        with self._lock:
            self._phase = phase
            self._started_s = self._clock()
            self._pipelines = {name: PipelineView(steps=self._steps) for name in self._names}
            self._gpus = {gpu: deque([GpuChange(self._started_s)]) for gpu in self._gpu_ids}

    def set_phase(self, phase: str) -> None:
        """Say what is going on, without starting anew."""
        with self._lock:
            self._phase = phase

    def update_pipeline(self, name: str, **figures: Any) -> None:
        """Replace the given fields of the pipeline's :class:`PipelineView`."""
        with self._lock:
            self._pipelines[name] = replace(self._pipelines[name], **figures)

    def update_gpu(self, gpu: int, pipeline: str, activity: Activity) -> None:
        """Say who uses a GPU from now on; an unchanged answer costs nothing.

        Args:
            gpu: Logical GPU id.
            pipeline: Who holds it; empty for nobody.
            activity: What it does; ``IDLE`` for a holder that waits for work.
        """
        with self._lock:
            changes = self._gpus[gpu]
            if (changes[-1].pipeline, changes[-1].activity) != (pipeline, activity):
                now_s = self._clock()
                changes.append(GpuChange(now_s, pipeline, activity))
                while changes[1].since_s <= now_s - HISTORY_CELLS * CELL_S:
                    changes.popleft()

    def snapshot(self) -> LiveSnapshot:
        """Copy everything."""
        with self._lock:
            return LiveSnapshot(
                now_s=self._clock(),
                started_s=self._started_s,
                phase=self._phase,
                pipelines=dict(self._pipelines),
                gpus={gpu: tuple(changes) for gpu, changes in self._gpus.items()},
            )


def history_cells(
    changes: Sequence[GpuChange], now_s: float, cells: int = HISTORY_CELLS, cell_s: float = CELL_S
) -> list[GpuChange | None]:
    """What a GPU mostly did in each cell of time up to now, oldest first.

    A change of hands shows from a fifth of a cell on, since it is short and what
    one looks for. Cells before the first change are ``None``.
    """
    origin_s = now_s - cells * cell_s
    held: list[dict[tuple[str, Activity], float]] = [{} for _ in range(cells)]
    for number, change in enumerate(changes):
        start_s = max(change.since_s, origin_s)
        end_s = changes[number + 1].since_s if number + 1 < len(changes) else now_s
        key = (change.pipeline, change.activity)
        first, last = int((start_s - origin_s) / cell_s), int((end_s - origin_s) / cell_s)
        for index in range(first, min(last, cells - 1) + 1):
            low = origin_s + index * cell_s
            overlap = min(low + cell_s, end_s) - max(low, start_s)
            if overlap > 0:
                held[index][key] = held[index].get(key, 0.0) + overlap
    result: list[GpuChange | None] = []
    for index, cell in enumerate(held):
        if not cell:
            result.append(None)
            continue
        switches = [k for k, s in cell.items() if k[1] is Activity.SWITCH and s >= cell_s / 5]
        pipeline, activity = switches[-1] if switches else max(cell, key=lambda key: cell[key])
        result.append(GpuChange(origin_s + index * cell_s, pipeline, activity))
    return result


def render(snapshot: LiveSnapshot) -> RenderableType:
    """Draw one frame."""
    order = {name: index for index, name in enumerate(snapshot.pipelines)}
    runs = Table(expand=True, box=None, padding=(0, 1))
    for heading in ("", "progress", "step", "reward", "tokens/s", "preempted", "again", "kept"):
        runs.add_column(heading, justify="left" if heading in ("", "progress") else "right")
    runs.columns[1].ratio = 1
    for name, view in snapshot.pipelines.items():
        colour = terminal_colour(order[name], Activity.TRAIN)
        bar = ProgressBar(
            total=max(1, view.steps), completed=view.step, complete_style=colour, width=None
        )
        runs.add_row(
            Text(name, style=f"bold {colour}"),
            bar,
            f"{view.step}/{view.steps}",
            "-" if view.reward is None else f"{view.reward:.2f}",
            f"{view.tokens_per_s:,.0f}",
            f"{view.preempted:,}",
            f"{view.redispatched:,}",
            f"{view.tokens_kept:,}",
        )
    gpus = Table(expand=True, box=None, padding=(0, 1), show_header=False)
    gpus.add_column(no_wrap=True)
    gpus.add_column(no_wrap=True, width=18)
    gpus.add_column(no_wrap=True, ratio=1, overflow="crop")
    for gpu, changes in snapshot.gpus.items():
        gpus.add_row(f"GPU {gpu}", _holder(changes[-1], order), _strip(changes, snapshot, order))
    return Panel(
        Group(runs, Text(), gpus, _legend(snapshot)),
        title=f"[bold]{snapshot.phase}[/]  {snapshot.now_s - snapshot.started_s:.0f} s",
        title_align="left",
    )


def plain_line(snapshot: LiveSnapshot) -> str:
    """One line for a log."""
    parts = [f"[{snapshot.now_s - snapshot.started_s:4.0f} s] {snapshot.phase}"]
    for name, view in snapshot.pipelines.items():
        reward = "-" if view.reward is None else f"{view.reward:.2f}"
        parts.append(
            f"{name} step {view.step}/{view.steps} reward {reward} {view.tokens_per_s:.0f} tokens/s"
        )
    parts.append(
        ", ".join(f"GPU {gpu} {_held_by(changes[-1])}" for gpu, changes in snapshot.gpus.items())
    )
    parts.append(_counters(snapshot))
    return " | ".join(parts)


class LiveView:
    """Shows a :class:`LiveState` while its ``with`` block runs.

    On a terminal two frames a second are drawn over one another; elsewhere, or with
    ``plain``, a line is written every few seconds and at the end.

    Args:
        state: What to show.
        console: Where.
        plain: Lines even on a terminal.
        interval_s: Seconds between lines.
    """

    def __init__(
        self,
        state: LiveState,
        console: Console,
        *,
        plain: bool = False,
        interval_s: float = PLAIN_INTERVAL_S,
    ) -> None:
        self._state = state
        self._console = console
        self._interval_s = interval_s
        self._live: Live | None = None
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._plain = plain or not console.is_terminal

    def __enter__(self) -> LiveView:
        if self._plain:
            self._thread = threading.Thread(target=self._write_lines, name="live", daemon=True)
            self._thread.start()
        else:
            self._live = Live(
                get_renderable=lambda: render(self._state.snapshot()),
                console=self._console,
                refresh_per_second=REFRESH_PER_S,
            )
            self._live.start(refresh=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        self._done.set()
        if self._thread is not None:
            self._thread.join(timeout=5.0)
            self._write_line()

    def _write_lines(self) -> None:
        while not self._done.wait(self._interval_s):
            self._write_line()

    def _write_line(self) -> None:
        self._console.print(
            plain_line(self._state.snapshot()), soft_wrap=True, highlight=False, markup=False
        )


def _held_by(change: GpuChange) -> str:
    return f"{change.pipeline} {WORDS[change.activity]}" if change.pipeline else "all asleep"


def _holder(change: GpuChange, order: dict[str, int]) -> Text:
    text = _held_by(change)
    if not change.pipeline:
        return Text(text, style="dim")
    return Text(text, style=terminal_colour(order.get(change.pipeline, 0), change.activity))


def _strip(changes: Sequence[GpuChange], snapshot: LiveSnapshot, order: dict[str, int]) -> Text:
    strip = Text()
    for cell in history_cells(changes, snapshot.now_s):
        if cell is None:
            strip.append(" ")
        elif cell.activity is Activity.IDLE:
            strip.append(BLOCKS[Activity.IDLE], style="dim")
        else:
            colour = terminal_colour(order.get(cell.pipeline, 0), cell.activity)
            strip.append(BLOCKS[cell.activity], style=colour)
    return strip


def _legend(snapshot: LiveSnapshot) -> Text:
    marks = "   ".join(
        f"{BLOCKS[activity]} {word}"
        for activity, word in (
            (Activity.GENERATE, "generates"),
            (Activity.TRAIN, "trains"),
            (Activity.SWITCH, "changes hands"),
            (Activity.IDLE, "idle"),
        )
    )
    text = f"\n last {HISTORY_CELLS * CELL_S:.0f} s:  {marks}\n {_counters(snapshot)}"
    return Text(text, style="dim")


def _counters(snapshot: LiveSnapshot) -> str:
    views = snapshot.pipelines.values()
    return (
        f"switches {sum(v.switches for v in views)}, "
        f"preempted {sum(v.preempted for v in views)}, "
        f"re-dispatched {sum(v.redispatched for v in views)}, "
        f"tokens kept {sum(v.tokens_kept for v in views):,}"
    )
