import gzip
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.observe.perfetto import assign_lanes, perfetto_json, to_perfetto
from nemo_rl_rlix.observe.trace import EventKind, TraceEvent


def span(track, name, start, end, **args):
    return TraceEvent(EventKind.SPAN, track, name, start, end, args, "proc")


EVENTS = [
    span("gpu/0/p0", "generate", 100.0, 101.0, tokens=5),
    span("gpu/0/p1", "generate", 101.0, 102.0),
    span("gpu/10/p1", "train", 100.5, 101.5),
    span("gpu/2/p1", "train", 100.5, 101.5),
    span("pipeline/p0/trainer", "step", 100.0, 103.0),
    TraceEvent(EventKind.INSTANT, "control", "grant", 100.25, 100.25, {"gpu": 1}),
    TraceEvent(EventKind.COUNTER, "pipeline/p0/buffer", "groups", 100.5, 100.5, {"value": 3}),
]


@pytest.mark.parametrize(
    ("spans", "lanes"),
    [
        ([], []),
        ([(0, 1), (1, 2), (2, 3)], [0, 0, 0]),  # one after the other
        ([(0, 4), (1, 2), (2, 3)], [0, 0, 0]),  # nested
        ([(0, 2), (1, 3)], [0, 1]),  # overlapping
        ([(0, 2), (1, 3), (2, 4), (3, 5)], [0, 1, 0, 1]),
        ([(0, 2), (1, 3), (1.5, 4)], [0, 1, 2]),
        ([(1, 3), (0, 2)], [1, 0]),  # in any order
        ([(0, 2), (0, 2)], [0, 0]),  # twice the same
    ],
)
def test_lanes(spans, lanes):
    assert assign_lanes(spans) == lanes


@given(
    st.lists(
        st.tuples(st.integers(0, 30), st.integers(0, 10)).map(lambda t: (t[0], t[0] + t[1])),
        max_size=25,
    )
)
def test_two_spans_of_a_lane_nest_or_do_not_overlap(spans):
    lanes = assign_lanes(spans)
    for i, (a, b) in enumerate(spans):
        for j, (c, d) in enumerate(spans):
            if i < j and lanes[i] == lanes[j] and a < d and c < b:
                assert (a <= c and d <= b) or (c <= a and b <= d)


def names(trace, kind):
    return {
        (row["pid"], row["tid"]): row["args"]["name"]
        for row in trace["traceEvents"]
        if row["ph"] == "M" and row["name"] == kind
    }


def test_groups_and_tracks_are_named_and_in_order():
    trace = perfetto_json(EVENTS)
    groups = {pid: name for (pid, _), name in names(trace, "process_name").items()}
    assert [groups[pid] for pid in sorted(groups)] == ["GPUs", "pipeline p0", "control plane"]
    tracks = names(trace, "thread_name")
    assert [tracks[key] for key in sorted(tracks)] == [
        "GPU 0",
        "GPU 2",
        "GPU 10",
        "trainer",
        "control",
    ]
    orders = {
        row["tid"]: row["args"]["sort_index"]
        for row in trace["traceEvents"]
        if row["name"] == "thread_sort_index"
    }
    assert sorted(orders.values()) == [orders[tid] for tid in sorted(orders)]


def test_pipelines_share_the_track_of_a_gpu_and_are_told_apart_by_name():
    trace = perfetto_json(EVENTS)
    tracks = names(trace, "thread_name")
    rows = [
        row
        for row in trace["traceEvents"]
        if row["ph"] == "X" and tracks[row["pid"], row["tid"]] == "GPU 0"
    ]
    assert [(r["name"], r["ts"], r["dur"]) for r in rows] == [
        ("p0 generate", 0.0, 1e6),
        ("p1 generate", 1e6, 1e6),
    ]
    assert rows[0]["args"] == {"tokens": 5, "process": "proc"}


def test_overlapping_spans_of_a_track_get_lanes_that_are_named():
    trace = perfetto_json(
        [span("pipeline/p0/requests", "a", 0, 2), span("pipeline/p0/requests", "b", 1, 3)]
    )
    assert sorted(names(trace, "thread_name").values()) == ["requests", "requests (2)"]
    tids = {row["name"]: row["tid"] for row in trace["traceEvents"] if row["ph"] == "X"}
    assert tids["a"] != tids["b"]


def test_lanes_of_one_track_do_not_collide_with_the_next_track():
    trace = perfetto_json(
        [span("gpu/0/p0", "x", 0, 2), span("gpu/0/p1", "x", 1, 3), span("gpu/1/p0", "x", 0, 1)]
    )
    assert len(names(trace, "thread_name")) == 3


def test_instants_and_counters():
    rows = perfetto_json(EVENTS)["traceEvents"]
    (instant,) = [row for row in rows if row["ph"] == "i"]
    assert (instant["name"], instant["s"], instant["ts"]) == ("grant", "t", 250000.0)
    (counter,) = [row for row in rows if row["ph"] == "C"]
    assert counter["name"] == "buffer: groups"
    assert counter["args"] == {"groups": 3}


@pytest.mark.parametrize("name", ["t.json", "t.json.gz"])
def test_the_file_holds_the_trace(tmp_path, name):
    to_perfetto(EVENTS, tmp_path / name)
    data = (tmp_path / name).read_bytes()
    assert (data[:2] == b"\x1f\x8b") == name.endswith(".gz")
    text = gzip.decompress(data) if name.endswith(".gz") else data
    assert json.loads(text) == perfetto_json(EVENTS)


def test_a_run_without_events_is_a_trace_too():
    assert perfetto_json([])["traceEvents"] == []
