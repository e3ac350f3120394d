import sys
import types
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nemo_rl_rlix.errors import ControlPlaneLostError, SettingError
from nemo_rl_rlix.observe.busy import Activity
from nemo_rl_rlix.observe.records import load_records
from nemo_rl_rlix.observe.trace import TraceWriter
from nemo_rl_rlix.reference.demo_cli import demo
from nemo_rl_rlix.reference.options import DemoMode, DemoOptions
from nemo_rl_rlix.reference.report import DemoResult, PipelineReport, RunReport, TracedRun
from nemo_rl_rlix.settings import PreemptedRequests


def report(mode, tokens, **changes):
    lines = tuple(
        PipelineReport(mode, name, 8, 0.2, 0.6, tokens, 10.0, **changes) for name in ("p0", "p1")
    )
    share = {Activity.GENERATE: 0.6, Activity.TRAIN: 0.2, Activity.SWITCH: 0, Activity.IDLE: 0.2}
    return RunReport(mode, 0, "resume", lines, {0: share, 1: share})


@pytest.fixture
def app():
    app = typer.Typer()
    app.command()(demo)
    return app


@pytest.fixture
def fake_run(monkeypatch):
    """Stands in for the run itself: writes a small trace and returns fixed figures."""
    calls = []

    def run_demo(options):
        calls.append(options)
        traces = []
        for mode, start in (("alone", 100.0), ("shared", 200.0)):
            folder = options.out / mode
            writer = TraceWriter(folder, "p0")
            writer.complete("gpu/0/p0", "generate", start, start + 8, tokens=100)
            writer.complete("gpu/1/p1", "train", start, start + 6)
            writer.close()
            traces.append(TracedRun(mode, folder, start, start + 10))
        result = run_demo.result
        if isinstance(result, Exception):
            raise result
        return DemoResult(*result, traces=tuple(traces))

    run_demo.result = (report("alone", 1000), report("shared", 1400))
    run_demo.calls = calls
    module = types.ModuleType("nemo_rl_rlix.reference.demo")
    module.run_demo = run_demo
    monkeypatch.setitem(sys.modules, "nemo_rl_rlix.reference.demo", module)
    return run_demo


def invoke(app, *args):
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "120"})


def test_help_explains_every_option(app):
    text = invoke(app, "--help").output
    for option in ("--data", "--steps", "--seed", "--policy", "--json", "--kill-shard", "--out"):
        assert option in text
    for option in ("--mode", "--plain"):
        assert option in text
    assert "about three minutes" in text


def test_a_run_ends_with_table_picture_trace_and_records(app, fake_run, tmp_path):
    out, records = tmp_path / "out", tmp_path / "records.json"
    result = invoke(app, "--out", out, "--json", records, "--policy", "restart", "--steps", 8)
    assert result.exit_code == 0, result.output
    assert "sharing pays: 1.40x" in result.output
    assert str(out / "timeline.png") in result.output
    assert str(out / "trace.json.gz") in result.output
    assert (out / "timeline.png").exists() and (out / "trace.json.gz").exists()
    assert {record.metric for record in load_records(records)} >= {"lost_groups", "reward_end"}
    (options,) = fake_run.calls
    assert options.policy is PreemptedRequests.RESTART
    assert (options.steps, options.mode, options.kill_shard) == (8, DemoMode.BOTH, False)


def test_defaults_put_the_run_into_a_dated_folder(app, fake_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert invoke(app).exit_code == 0
    (options,) = fake_run.calls
    assert options.out.parent == Path("runs")
    assert options.out.name.startswith("demo-20")


def test_a_broken_guarantee_fails_the_demo_after_the_table(app, fake_run, tmp_path):
    fake_run.result = (report("alone", 1000), report("shared", 1400, lost_groups=2))
    result = invoke(app, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "p0 (shared): 2 lost groups; this must be 0" in result.output
    assert "rollout tokens/s" in result.output


def test_a_failed_run_says_why(app, fake_run, tmp_path):
    fake_run.result = ControlPlaneLostError("the scheduler is gone")
    result = invoke(app, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "demo: the scheduler is gone" in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--steps", "3"], "4"),
        (["--seed", "-1"], "0"),
        (["--seed", str(2**70)], "2147483647"),
        (["--policy", "forget"], "restart"),
        (["--mode", "half"], "shared"),
        (["--kill-shard", "--mode", "alone"], "--kill-shard=True"),
        (["--data", "no-such-file.jsonl"], "there is no such file"),
    ],
)
def test_an_option_that_cannot_work_is_refused_before_anything_starts(
    app, fake_run, tmp_path, args, message
):
    result = invoke(app, "--out", tmp_path / "out", *args)
    assert result.exit_code == 2
    assert message in result.output
    assert fake_run.calls == []


@pytest.mark.parametrize("make", ["file", "full folder"])
def test_the_folder_of_another_run_is_refused(tmp_path, make):
    out = tmp_path / "out"
    if make == "file":
        out.write_text("x")
    else:
        out.mkdir()
        (out / "a").write_text("x")
    with pytest.raises(SettingError, match="--out"):
        DemoOptions.checked(out=out)


def test_an_empty_folder_is_fine(tmp_path):
    assert DemoOptions.checked(out=tmp_path).out == tmp_path


@pytest.mark.parametrize(
    ("option", "name"),
    [("json_path", "notes.json"), ("json_path", "notes.json/x"), ("out", "notes.json/x")],
)
def test_results_that_could_not_be_written_are_refused_before_the_run(tmp_path, option, name):
    (tmp_path / "notes.json").write_text('{"not": "records"}')
    flag = "--json" if option == "json_path" else "--out"
    with pytest.raises(SettingError, match=f"^{flag}="):
        DemoOptions.checked(**{"out": tmp_path / "out", option: tmp_path / name})


def test_records_of_an_earlier_run_may_be_there(tmp_path):
    (tmp_path / "records.json").write_text("[]")
    DemoOptions.checked(out=tmp_path / "out", json_path=tmp_path / "records.json")


def test_records_need_a_file(tmp_path):
    (tmp_path / "d").mkdir()
    with pytest.raises(SettingError, match="--json"):
        DemoOptions.checked(out=tmp_path / "out", json_path=tmp_path / "d")
