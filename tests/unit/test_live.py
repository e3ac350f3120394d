import io
import time

import pytest
from rich.console import Console

from nemo_rl_rlix.observe.busy import Activity
from nemo_rl_rlix.reference.live import (
    GpuChange,
    LiveState,
    LiveView,
    history_cells,
    plain_line,
    render,
)

G, T, S, IDLE = Activity.GENERATE, Activity.TRAIN, Activity.SWITCH, Activity.IDLE


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def state(clock):
    live = LiveState(["p0", "p1"], [0, 1], steps=40, clock=clock)
    live.start_run("sharing")
    clock.now += 5
    live.update_gpu(0, "p0", G)
    live.update_gpu(1, "p1", T)
    live.update_pipeline(
        "p0", step=10, reward=0.345, tokens_per_s=1234.5, preempted=7, redispatched=6, switches=3
    )
    live.update_pipeline("p0", tokens_kept=4321)
    clock.now += 3
    return live


@pytest.mark.parametrize(
    ("changes", "cells"),
    [
        ([(0, "p0", G)], [G, G, G, G]),
        ([(2, "p0", G)], [None, None, G, G]),
        ([(0, "p0", G), (1.4, "p0", T), (3, "p1", G)], [G, T, T, G]),  # what lasted longest
        ([(0, "p0", G), (1.4, "p0", S), (1.65, "p0", T)], [G, S, T, T]),  # a switch shows
        ([(0, "p0", G), (1.4, "p0", S), (1.5, "p0", G)], [G, G, G, G]),  # too short to show
        ([(0, "p0", G), (4, "p0", T)], [G, G, G, G]),
    ],
)
def test_history_cells(changes, cells):
    found = history_cells([GpuChange(*change) for change in changes], 4.0, cells=4, cell_s=1.0)
    assert [cell and cell.activity for cell in found] == cells


def test_an_unchanged_gpu_is_not_a_change(state, clock):
    before = state.snapshot().gpus[0]
    clock.now += 1
    state.update_gpu(0, "p0", G)
    assert state.snapshot().gpus[0] == before
    state.update_gpu(0, "p1", G)
    assert state.snapshot().gpus[0][-1] == GpuChange(clock.now, "p1", G)


def test_only_the_history_that_is_shown_is_kept(state, clock):
    for index in range(1000):
        clock.now += 1
        state.update_gpu(0, f"p{index % 2}", G)
    changes = state.snapshot().gpus[0]
    assert len(changes) == 61
    assert None not in history_cells(changes, clock.now)


def test_a_snapshot_does_not_change_later(state):
    before = state.snapshot()
    state.update_pipeline("p0", step=11)
    state.update_gpu(0, "", IDLE)
    assert before.pipelines["p0"].step == 10
    assert before.gpus[0][-1].pipeline == "p0"


def test_a_new_run_starts_anew(state):
    state.start_run("again")
    snapshot = state.snapshot()
    assert snapshot.phase == "again"
    assert snapshot.pipelines["p0"].step == 0
    assert snapshot.pipelines["p0"].steps == 40
    assert len(snapshot.gpus[1]) == 1


def test_a_figure_that_does_not_exist_is_a_mistake(state):
    with pytest.raises(TypeError):
        state.update_pipeline("p0", colour=1)


def test_a_frame_shows_who_does_what(state):
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    console.print(render(state.snapshot()))
    text = console.export_text()
    for wanted in (
        *("sharing", "8 s", "p0", "10/40", "0.34", "1,234", "4,321", "p0 generates", "p1 trains"),
        *("preempted 7", "re-dispatched 6", "switches 3"),
    ):
        assert wanted in text
    gpu0 = next(line for line in text.splitlines() if "GPU 0" in line)
    gpu1 = next(line for line in text.splitlines() if "GPU 1" in line)
    assert "▄▄▄" in gpu0 and "█" not in gpu0
    assert "███" in gpu1 and "▄" not in gpu1


def test_a_gpu_that_nobody_holds(state):
    state.update_gpu(0, "", IDLE)
    assert "GPU 0 all asleep" in plain_line(state.snapshot())


def test_the_line_for_a_log(state):
    assert plain_line(state.snapshot()) == (
        "[   8 s] sharing | p0 step 10/40 reward 0.34 1234 tokens/s"
        " | p1 step 0/40 reward - 0 tokens/s | GPU 0 p0 generates, GPU 1 p1 trains"
        " | switches 3, preempted 7, re-dispatched 6, tokens kept 4,321"
    )


def test_a_terminal_gets_frames(state):
    console = Console(width=100, record=True, file=io.StringIO(), force_terminal=True)
    with LiveView(state, console):
        state.set_phase("second phase")
    text = console.export_text()
    assert "second phase" in text
    assert "GPU 0" in text


@pytest.mark.parametrize(("terminal", "plain"), [(False, False), (True, True)])
def test_elsewhere_there_are_lines(state, terminal, plain):
    stream = io.StringIO()
    console = Console(width=60, file=stream, force_terminal=terminal, color_system=None)
    with LiveView(state, console, plain=plain, interval_s=0.02):
        deadline = time.monotonic() + 5
        while stream.getvalue().count("\n") < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
    lines = stream.getvalue().splitlines()
    assert len(lines) >= 3
    assert all(line == plain_line(state.snapshot()) for line in lines)


def test_the_view_ends_with_an_error_of_its_body(state):
    console = Console(file=io.StringIO())
    with pytest.raises(ValueError, match="boom"):
        with LiveView(state, console):
            raise ValueError("boom")
