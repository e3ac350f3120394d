"""The demo's frame: what it refuses before it starts and what it leaves behind."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.reference import demo
from nemo_rl_rlix.reference.options import DemoOptions


def test_an_interrupt_while_ray_starts_leaves_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(**options: object) -> None:
        assert list(tmp_path.iterdir())
        raise KeyboardInterrupt

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo.ray, "init", interrupted)
    monkeypatch.setattr(demo.ray, "shutdown", lambda: None)
    with pytest.raises(KeyboardInterrupt), demo.private_ray():
        raise AssertionError("it has not started")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_is_terminated_cleans_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(demo.ray, "init", lambda **options: None)
    monkeypatch.setattr(demo.ray, "shutdown", lambda: None)
    with pytest.raises(SystemExit) as ended, demo.private_ray():
        assert list(tmp_path.iterdir())
        signal.raise_signal(signal.SIGTERM)
    assert ended.value.code == 143
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_file_that_cannot_be_used_is_refused_before_ray_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def started(**options: object) -> None:
        raise AssertionError("Ray was started")

    monkeypatch.setattr(demo.ray, "init", started)
    data = tmp_path / "problems.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "' + "2" * 60 + '"}')
    with pytest.raises(SettingError, match="^--data="):
        demo.run_demo(DemoOptions.checked(out=tmp_path / "out", data=data))
    assert not (tmp_path / "out").exists()
