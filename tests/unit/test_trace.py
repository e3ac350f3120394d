import json
import stat
import subprocess
import sys
import threading

import pytest

from nemo_rl_rlix.observe import trace
from nemo_rl_rlix.observe.trace import (
    EventKind,
    NullTracer,
    TraceWriter,
    open_tracer,
    read_events,
)


def test_what_is_written_is_read_in_order_of_start(tmp_path):
    writer = TraceWriter(tmp_path / "run", "p0/shard 1")
    writer.complete("gpu/0/p0", "train", 20.0, 21.5, step=3)
    writer.complete("gpu/0/p0", "wake", 10.0, 11.0)
    writer.counter("pipeline/p0/buffer", "groups", 7)
    writer.close()
    assert "/" not in writer.path.name.replace(str(tmp_path), "")
    wake, train, counter = read_events(tmp_path / "run")
    assert (wake.name, train.name) == ("wake", "train")
    assert (train.track, train.start_s, train.end_s) == ("gpu/0/p0", 20.0, 21.5)
    assert train.args == {"step": 3}
    assert train.process == "p0/shard 1"
    assert (counter.kind, counter.args) == (EventKind.COUNTER, {"value": 7})


def test_only_the_owner_can_read_a_trace(tmp_path):
    writer = TraceWriter(tmp_path, "a")
    writer.close()
    assert stat.S_IMODE(writer.path.stat().st_mode) == 0o600


def test_a_span_is_written_when_its_body_raises(tmp_path):
    writer = TraceWriter(tmp_path, "a")
    with pytest.raises(KeyError):
        with writer.span("control", "resize", pipeline="p0"):
            raise KeyError("x")
    writer.close()
    (event,) = read_events(tmp_path)
    assert event.name == "resize"
    assert event.end_s >= event.start_s > 0


def test_events_reach_the_file_in_time_without_flush(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(trace.time, "monotonic", lambda: now[0])
    writer = TraceWriter(tmp_path, "a")
    writer.instant("control", "first")
    assert read_events(tmp_path) == []
    now[0] += trace.FLUSH_INTERVAL_S
    writer.instant("control", "second")
    assert [event.name for event in read_events(tmp_path)] == ["first", "second"]
    writer.close()


def test_closing_twice_is_harmless_and_later_events_are_dropped(tmp_path):
    writer = TraceWriter(tmp_path, "a")
    writer.instant("control", "kept")
    writer.close()
    writer.close()
    writer.instant("control", "dropped")
    writer.flush()
    assert [event.name for event in read_events(tmp_path)] == ["kept"]


def test_the_half_written_last_line_of_a_killed_process_is_left_out(tmp_path, caplog):
    writer = TraceWriter(tmp_path, "a")
    writer.instant("control", "whole")
    writer.close()
    text = writer.path.read_bytes()
    writer.path.write_bytes(text + text[: len(text) // 2])
    assert [event.name for event in read_events(tmp_path)] == ["whole"]
    assert not caplog.records


@pytest.mark.parametrize("bad", [b"garbage", b"3", b"\xff", b"[" * 100_000])
def test_a_bad_line_in_the_middle_is_left_out_with_a_warning(tmp_path, caplog, bad):
    writer = TraceWriter(tmp_path, "a")
    writer.instant("control", "whole")
    writer.close()
    text = writer.path.read_bytes()
    writer.path.write_bytes(bad + b"\n" + text)
    assert [event.name for event in read_events(tmp_path)] == ["whole"]
    assert f"{writer.path.name}:1" in caplog.text


def test_the_end_of_the_process_writes_what_is_buffered(tmp_path):
    code = (
        "import sys; from nemo_rl_rlix.observe.trace import TraceWriter;"
        "w = TraceWriter(sys.argv[1], 'child'); w.instant('control', 'x');"
        "w.accumulate('gpu/0/p0', 'generate', 1.0, 1.1, tokens=3)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, timeout=60)
    assert {event.name for event in read_events(tmp_path)} == {"x", "generate"}


def test_threads_do_not_mix_lines(tmp_path):
    writer = TraceWriter(tmp_path, "a")

    def work(number):
        for index in range(200):
            writer.complete("t", f"{number}", index, index + 1, text="x" * 50)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    writer.close()
    lines = writer.path.read_text().splitlines()
    assert len([json.loads(line) for line in lines]) == 800


def test_a_disk_that_is_full_ends_the_trace_and_not_the_run(tmp_path, monkeypatch, caplog):
    writer = TraceWriter(tmp_path, "a")
    writer.instant("control", "x")

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trace.os, "write", full)
    writer.flush()
    writer.instant("control", "y")
    writer.close()
    assert "No space left" in caplog.text


def test_short_spans_in_a_row_become_one_with_their_totals(tmp_path):
    writer = TraceWriter(tmp_path, "a")
    for step in range(10):
        writer.accumulate("gpu/0/p0", "generate", step * 0.02, step * 0.02 + 0.01, tokens=4)
    writer.close()
    (event,) = read_events(tmp_path)
    assert (event.start_s, event.end_s) == (0.0, pytest.approx(0.19))
    assert event.args["tokens"] == 40
    assert event.args["busy_s"] == pytest.approx(0.10)


@pytest.mark.parametrize(
    ("second", "spans"),
    [
        (("gpu/0/p0", "generate", 0.11, 0.2), 1),  # right behind
        (("gpu/0/p0", "generate", 0.2, 0.3), 2),  # after a pause
        (("gpu/0/p0", "prefill", 0.11, 0.2), 2),  # something else
        (("gpu/1/p0", "generate", 0.11, 0.2), 2),  # somewhere else
        (("gpu/0/p0", "generate", 0.11, 0.9), 2),  # would become too long
    ],
)
def test_what_does_not_belong_together_is_not_joined(tmp_path, second, spans):
    writer = TraceWriter(tmp_path, "a")
    writer.accumulate("gpu/0/p0", "generate", 0.0, 0.1, tokens=1)
    writer.accumulate(*second, tokens=1)
    writer.close()
    events = read_events(tmp_path)
    assert len(events) == spans
    assert sum(event.args["tokens"] for event in events) == 2


def test_without_a_directory_nothing_is_written(tmp_path):
    tracer = open_tracer(None, "a")
    assert isinstance(tracer, NullTracer)
    with tracer.span("t", "x"):
        tracer.complete("t", "x", 0, 1)
        tracer.accumulate("t", "x", 0, 1, tokens=1)
        tracer.instant("t", "x")
        tracer.counter("t", "x", 1)
    tracer.flush()
    tracer.close()
    assert isinstance(open_tracer(tmp_path, "a"), TraceWriter)
