import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.observe.busy import (
    Activity,
    GpuSpan,
    gpu_spans,
    gpu_use,
    share_by_activity,
    tokens_per_bin,
)
from nemo_rl_rlix.observe.trace import EventKind, TraceEvent

G, T, S = Activity.GENERATE, Activity.TRAIN, Activity.SWITCH


def span(activity, start, end, pipeline="p0", density=1.0, gpu=0, tokens=0.0):
    return GpuSpan(gpu, pipeline, activity, start, end, density, tokens)


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], {}),
        ([span(G, 0, 4)], {("p0", G): 4}),
        ([span(G, -5, 2), span(G, 8, 20)], {("p0", G): 4}),  # cut to the window
        ([span(G, 20, 30)], {}),
        ([span(G, 0, 4), span(G, 2, 6)], {("p0", G): 6}),  # a union, not a sum
        ([span(G, 0, 4), span(G, 1, 2)], {("p0", G): 4}),
        ([span(G, 0, 4), span(T, 4, 6)], {("p0", G): 4, ("p0", T): 2}),
        ([span(G, 0, 4), span(G, 0, 4, "p1")], {("p0", G): 2, ("p1", G): 2}),  # not twice busy
        ([span(G, 0, 4, density=0.5)], {("p0", G): 2}),
        (
            [span(G, 0, 4, density=0.25), span(S, 0, 4, "p1", density=0.5)],
            {("p0", G): 1, ("p1", S): 2},
        ),
        # one pipeline's overlapping spans count once, at the higher density
        ([span(G, 0, 4, density=0.25), span(G, 0, 4, density=0.5)], {("p0", G): 2}),
        ([span(G, 3, 3)], {}),
    ],
)
def test_seconds_of_a_gpu(spans, seconds):
    use = gpu_use(spans, 0.0, 10.0, gpus=[0])[0]
    assert use.seconds == pytest.approx(seconds)
    assert use.busy_share == pytest.approx(sum(seconds.values()) / 10)


def test_gpus_are_apart_and_an_unused_one_is_listed():
    use = gpu_use([span(G, 0, 5, gpu=1)], 0.0, 10.0, gpus=[0, 1, 2])
    assert list(use) == [0, 1, 2]
    assert [one.busy_share for one in use.values()] == [0.0, 0.5, 0.0]


def test_a_window_of_no_length_has_no_share():
    assert gpu_use([span(G, 0, 5)], 3.0, 3.0)[0].busy_share == 0.0


@given(
    st.lists(
        st.builds(
            lambda a, start, length, p, d: span(a, start, start + length, p, d),
            st.sampled_from([G, T, S]),
            st.floats(-5, 15),
            st.floats(0, 10),
            st.sampled_from(["p0", "p1"]),
            st.floats(0, 1),
        ),
        max_size=12,
    )
)
def test_no_gpu_is_ever_more_than_busy_and_shares_sum_to_one(spans):
    use = gpu_use(spans, 0.0, 10.0, gpus=[0])[0]
    assert -1e-9 <= use.busy_share <= 1 + 1e-9
    assert sum(use.shares().values()) == pytest.approx(1.0)


def event(track, name, start, end, kind=EventKind.SPAN, **args):
    return TraceEvent(kind, track, name, start, end, args)


def test_only_known_spans_on_gpu_tracks_count():
    spans = gpu_spans(
        [
            event("gpu/1/p0", "generate", 0, 2, busy_s=1.0, tokens=30),
            event("gpu/1/p0", "gossip", 0, 2),
            event("gpu/1/p0", "train", 0, 0, kind=EventKind.INSTANT),
            event("gpu/x/p0", "train", 0, 2),
            event("pipeline/p0/trainer", "train", 0, 2),
            event("gpu/0", "sleep", 2, 3),
        ]
    )
    assert spans == [
        span(G, 0, 2, density=0.5, gpu=1, tokens=30.0),
        span(S, 2, 3, pipeline="", gpu=0),
    ]


def test_share_by_activity():
    shares = share_by_activity(
        [event("gpu/0/p0", "generate", 0, 5), event("gpu/0/p1", "wake", 5, 6)], 0, 10, gpus=[0, 1]
    )
    assert shares[0] == pytest.approx({G: 0.5, T: 0.0, S: 0.1, Activity.IDLE: 0.4})
    assert shares[1] == pytest.approx({G: 0.0, T: 0.0, S: 0.0, Activity.IDLE: 1.0})


def test_tokens_are_spread_over_their_span():
    spans = [span(G, 0.5, 2.5, tokens=20), span(G, 0.5, 2.5, "p1", tokens=7), span(G, 9, 99)]
    assert tokens_per_bin(spans, "p0", 0.0, 1.0, 4) == pytest.approx([5, 10, 5, 0])


@given(st.lists(st.tuples(st.floats(0, 9), st.floats(0.01, 3), st.integers(0, 50)), max_size=8))
def test_no_token_is_lost_in_bins(parts):
    spans = [span(G, a, min(10, a + d), tokens=n) for a, d, n in parts]
    total = sum(tokens_per_bin(spans, "p0", 0.0, 0.25, 40))
    assert total == pytest.approx(sum(n for _, _, n in parts), rel=1e-6, abs=1e-6)
