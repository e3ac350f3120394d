import matplotlib.image
import pytest

from nemo_rl_rlix.observe.busy import Activity, GpuSpan
from nemo_rl_rlix.observe.palette import HUES, paper_colour
from nemo_rl_rlix.observe.timeline import (
    Panel,
    RunWindow,
    cut,
    draw_timeline,
    join_close,
    plot_timeline,
)
from nemo_rl_rlix.observe.trace import EventKind, TraceEvent

G, T = Activity.GENERATE, Activity.TRAIN


def gpu_span(start, end, activity=G, pipeline="p0", tokens=0.0):
    return GpuSpan(0, pipeline, activity, start, end, 1.0, tokens)


def event(track, name, start, end, **args):
    return TraceEvent(EventKind.SPAN, track, name, start, end, args)


def run(gpu, pipeline, start, seconds):
    events = [event(f"gpu/{gpu}/{pipeline}", "generate", start, start + seconds / 2, tokens=100)]
    events.append(
        event(f"gpu/{gpu}/{pipeline}", "sleep", start + seconds / 2, start + seconds / 1.8)
    )
    events.append(event(f"gpu/{gpu}/{pipeline}", "train", start + seconds / 1.5, start + seconds))
    return RunWindow(events, start, start + seconds)


PANELS = [
    Panel("Alone", (run(0, "p0", 1000, 20), run(1, "p1", 2000, 16)), "10 tokens/s"),
    Panel("Shared", (run(0, "p1", 3000, 12),), "17 tokens/s"),
]


def test_cut_moves_the_clock_and_keeps_tokens_in_proportion():
    spans = [gpu_span(90, 110, tokens=40), gpu_span(0, 50), gpu_span(119, 121, tokens=2)]
    assert cut(spans, 100, 120) == [gpu_span(0, 10, tokens=20), gpu_span(19, 20, tokens=1)]


@pytest.mark.parametrize(
    ("spans", "joined"),
    [
        ([gpu_span(0, 1), gpu_span(1.05, 2)], [(0, 2)]),
        ([gpu_span(0, 1), gpu_span(1.5, 2)], [(0, 1), (1.5, 2)]),
        ([gpu_span(0, 1), gpu_span(1.05, 2, T)], [(0, 1), (1.05, 2)]),
        ([gpu_span(0, 1), gpu_span(1.05, 2, pipeline="p1")], [(0, 1), (1.05, 2)]),
        ([gpu_span(0, 3), gpu_span(1, 2)], [(0, 3)]),
    ],
)
def test_spans_are_joined_where_no_eye_could_tell(spans, joined):
    assert [(s.start_s, s.end_s) for s in join_close(spans, 0.1)] == joined


def texts(figure):
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [text.get_text() for text in axes.texts]
        found += [axes.get_title("left"), axes.get_title("right")]
        found += [label.get_text() for label in axes.get_yticklabels()]
    found += [text.get_text() for legend in figure.legends for text in legend.get_texts()]
    return found


def test_the_picture_says_what_it_shows():
    found = texts(draw_timeline(PANELS, title="Sharing pays", subtitle="two pipelines"))
    for wanted in (
        *("Sharing pays", "two pipelines", "Alone", "Shared", "17 tokens/s", "GPU 0", "GPU 1"),
        *("p0 generates", "p0 trains", "p1 generates", "p1 trains", "idle"),
        "done after 12 s",
    ):
        assert wanted in found
    assert any("changes hands" in text for text in found)
    assert any("% busy" in text for text in found)


def test_panels_share_one_scale():
    figure = draw_timeline(PANELS, title="t")
    assert {axes.get_xlim() for axes in figure.axes} == {(0.0, 20.0)}
    rates = figure.axes[1::2]
    assert len({axes.get_ylim() for axes in rates}) == 1


def test_the_png_holds_the_colours_of_every_activity(tmp_path):
    path = tmp_path / "timeline.png"
    plot_timeline(PANELS, path, title="Sharing pays", subtitle="two pipelines")
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    pixels = matplotlib.image.imread(path)
    height, width = pixels.shape[:2]
    assert width > 1200 and height > 500
    found = {tuple(round(c * 255) for c in px[:3]) for row in pixels[::6] for px in row[::3]}
    for index in (0, 1):
        for activity in (G, T, Activity.SWITCH, Activity.IDLE):
            colour = paper_colour(index, activity)
            assert tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5)) in found


@pytest.mark.parametrize("panels", [[], [Panel("empty", (RunWindow([], 0, 5),))]])
def test_a_run_without_events_still_gives_a_picture(tmp_path, panels):
    plot_timeline(panels, tmp_path / "t.png", title="nothing")
    assert (tmp_path / "t.png").stat().st_size > 1000


def luminance(colour):
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("hue", HUES)
def test_generating_and_training_differ_without_colour_vision(hue):
    light, dark = luminance(hue.generate), luminance(hue.train)
    assert (light + 0.05) / (dark + 0.05) > 2.5
