from __future__ import annotations

import sys
from types import ModuleType

import pytest
from typer.testing import CliRunner

from nemo_rl_rlix import __version__, cli
from nemo_rl_rlix.errors import SettingError


def test_version():
    result = CliRunner().invoke(cli.app, ["version"])
    assert (result.exit_code, result.output.strip()) == (0, __version__)


def test_help_lists_every_command_without_importing_its_module(monkeypatch):
    for lazy in cli.LAZY_COMMANDS:
        monkeypatch.setitem(sys.modules, lazy.module, None)  # importing it now raises
    result = CliRunner().invoke(cli.app, ["--help"])
    assert result.exit_code == 0
    for name in ("version", *(lazy.name for lazy in cli.LAZY_COMMANDS)):
        assert name in result.output


@pytest.fixture
def demo(monkeypatch) -> list[dict[str, object]]:
    """A stand-in for the demo's module; the list gets the arguments of each call."""
    calls: list[dict[str, object]] = []

    def run(steps: int = 3, policy: str = "resume", kill_shard: bool = False) -> None:
        """Stand-in help."""
        if steps < 1:
            raise SettingError("--steps", steps, "no step to run", "Write 1 or more")
        calls.append({"steps": steps, "policy": policy, "kill_shard": kill_shard})

    (lazy,) = [lazy for lazy in cli.LAZY_COMMANDS if lazy.name == "demo"]
    module = ModuleType(lazy.module)
    setattr(module, lazy.function, run)
    monkeypatch.setitem(sys.modules, lazy.module, module)
    return calls


def test_a_lazy_command_parses_the_rest_of_the_command_line(demo):
    args = ["demo", "--kill-shard", "--policy=restart", "--steps", "7"]
    assert CliRunner().invoke(cli.app, args).exit_code == 0
    assert demo == [{"steps": 7, "policy": "restart", "kill_shard": True}]


def test_a_lazy_command_shows_its_own_help(demo):
    result = CliRunner().invoke(cli.app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "Stand-in help." in result.output
    assert "--kill-shard" in result.output
    assert demo == []


def test_an_unknown_option_is_refused_by_the_lazy_command(demo):
    assert CliRunner().invoke(cli.app, ["demo", "--stepz", "7"]).exit_code == 2
    assert demo == []


def test_a_bad_setting_ends_with_its_message_and_no_traceback(demo, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [cli.PROGRAM, "demo", "--steps", "0"])
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == cli.EXIT_BAD_SETTING
    assert capsys.readouterr().err == "nemo-rl-rlix: --steps=0: no step to run. Write 1 or more\n"
