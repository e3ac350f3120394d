"""The hook, the .pth line and `run`, on a fake NeMo RL in interpreters of their own."""

from __future__ import annotations

import json
import timeit
import tomllib
from pathlib import Path

import pytest
from fake_package import write_fake
from nemo_support import HERE, ROOT, RunPython

PTH = ROOT / "nemo_rl_rlix" / "nemo_rl" / "autoload.pth"
SMALL = HERE / "fake_site"
ON: dict[str, str | None] = {"RLIX_CONTROL_PLANE": "rlix"}
START = f"exec(open({str(PTH)!r}).read())\n"


@pytest.mark.parametrize("value", [None, "", "off", "RLIX"])
def test_the_pth_line_does_nothing_unless_the_variable_says_rlix(
    run_python: RunPython, tmp_path: Path, value: str | None
) -> None:
    write_fake(tmp_path, "v0.7.0")
    code = START + (
        "import sys; before = list(sys.meta_path)\n"
        "import nemo_rl.algorithms.grpo as grpo\n"
        "assert not [m for m in sys.modules if m.startswith('nemo_rl_rlix')], sys.modules\n"
        "assert sys.meta_path == before\n"
        "assert grpo.setup.__code__.co_filename == grpo.__file__\n"
    )
    result = run_python(code, path=[ROOT, tmp_path], env={"RLIX_CONTROL_PLANE": value})
    assert result.returncode == 0, result.stderr


def test_the_pth_line_costs_less_than_a_millisecond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLIX_CONTROL_PLANE", raising=False)
    line = PTH.read_text(encoding="utf-8")
    # site executes a line only if it starts like this.
    assert line.startswith("import ") and line.count("\n") == 1
    assert min(timeit.repeat(lambda: exec(line), number=1, repeat=20)) < 1e-3


def test_the_wheel_puts_the_line_into_the_folder_that_python_reads_at_start() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    included = project["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert included == {str(PTH.relative_to(ROOT)): "nemo_rl_rlix_autoload.pth"}


def test_with_the_variable_the_hook_is_light(run_python: RunPython) -> None:
    code = START + (
        "import sys\n"
        "ours = sorted(m for m in sys.modules if m.startswith('nemo_rl_rlix'))\n"
        "assert ours == ['nemo_rl_rlix', 'nemo_rl_rlix.nemo_rl', 'nemo_rl_rlix.nemo_rl.autoload']\n"
        "assert not {'torch', 'ray', 'nemo_rl', 'pydantic'} & set(sys.modules)\n"
        "assert type(sys.meta_path[0]).__name__ == 'ImportHook'\n"
    )
    result = run_python(code, path=[ROOT], env=ON)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("version", "label", "applied"),
    [
        ("main", "main at 7ea279abf", ["setup"]),
        ("v0.7.0", "v0.7.0", ["setup", "refit"]),
    ],
)
@pytest.mark.parametrize("first", ["nemo_rl.algorithms.grpo", "nemo_rl.algorithms.async_utils"])
def test_registration_follows_the_import_once(
    run_python: RunPython, tmp_path: Path, version: str, label: str, applied: list[str], first: str
) -> None:
    write_fake(tmp_path, version)
    code = (
        START
        + START
        + f"import {first}\n"
        + """
import importlib, json
import nemo_rl.algorithms.grpo as grpo, nemo_rl.algorithms.async_utils
from nemo_rl_rlix.nemo_rl import registration
before = grpo.setup
assert registration.register() is registration.current()
assert grpo.setup is before
assert before.__wrapped__.__code__.co_filename == grpo.__file__
assert type(grpo.__loader__).__name__ == type(grpo.__spec__.loader).__name__ == "SourceFileLoader"
now = registration.current()
print(json.dumps([str(now.version), [d.seam.id for d in now.applied], now.pending]))
"""
    )
    result = run_python(code, path=[SMALL, ROOT, tmp_path], env=ON)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [label, applied, []]


def test_unregister_puts_everything_back(run_python: RunPython, tmp_path: Path) -> None:
    write_fake(tmp_path, "v0.7.0")
    code = (
        START
        + """
import os
path = os.environ["PYTHONPATH"]
import nemo_rl.algorithms.grpo as grpo
from nemo_rl_rlix.nemo_rl import registration
assert grpo.setup.__wrapped__ and grpo.refit_policy_generation.__wrapped__
assert os.environ["PYTHONPATH"] != path
registration.unregister()
registration.unregister()
assert not hasattr(grpo.setup, "__wrapped__")
assert not hasattr(grpo.refit_policy_generation, "__wrapped__")
assert os.environ["PYTHONPATH"] == path
assert registration.current() is None
registration.register()
assert grpo.setup.__wrapped__
"""
    )
    result = run_python(code, path=[SMALL, ROOT, tmp_path], env=ON)
    assert result.returncode == 0, result.stderr


def test_a_moved_seam_stops_the_program(run_python: RunPython, tmp_path: Path) -> None:
    lm_policy = "nemo_rl/models/policy/lm_policy.py"
    write_fake(tmp_path, "main", {lm_policy: ("prepare_for_training", "prepare_training")})
    code = START + "import nemo_rl.algorithms.grpo\nprint('went on')\n"
    result = run_python(code, path=[SMALL, ROOT, tmp_path], env=ON)
    assert result.returncode != 0
    assert "went on" not in result.stdout
    message = result.stderr
    assert "UnsupportedVersionError" in message
    for part in (
        str(tmp_path),
        "nemo_rl.algorithms.grpo.Policy.prepare_for_training: does not exist",
        "main at 7ea279abf",
        "unset RLIX_CONTROL_PLANE",
    ):
        assert part in message


def test_an_unsupported_version_stops_the_program(run_python: RunPython, tmp_path: Path) -> None:
    write_fake(tmp_path, "main", {"nemo_rl/package_info.py": ("MINOR = 6", "MINOR = 5")})
    code = START + "import nemo_rl.algorithms.grpo\nprint('went on')\n"
    result = run_python(code, path=[SMALL, ROOT, tmp_path], env=ON)
    assert result.returncode != 0
    assert "went on" not in result.stdout
    assert "NeMo RL 0.5.0 cannot be time-shared" in result.stderr
    assert "package_info.py: VERSION" in result.stderr


def test_a_ray_worker_replaces_nothing(run_python: RunPython, tmp_path: Path) -> None:
    write_fake(tmp_path, "main", {"ray.py": ("mode = 0", "mode = WORKER_MODE")})
    code = (
        START
        + """
import os
path = os.environ["PYTHONPATH"]
import nemo_rl.algorithms.grpo as grpo, nemo_rl.algorithms.async_utils
from nemo_rl_rlix.nemo_rl import registration
assert registration.current() is None
assert not hasattr(grpo.setup, "__wrapped__")
assert os.environ["PYTHONPATH"] == path
"""
    )
    result = run_python(code, path=[SMALL, ROOT, tmp_path], env=ON)
    assert result.returncode == 0, result.stderr


def test_the_shim_of_the_release_asks_the_synchronizer_first(
    run_python: RunPython, tmp_path: Path
) -> None:
    write_fake(tmp_path, "v0.7.0")
    code = (
        START
        + """
import nemo_rl.algorithms.grpo as grpo
class Synchronizer:
    def sync_weights(self, *, timer=None, kv_scales=None):
        return {"seconds": 1.0, "timer": timer}
class Plain: ...
class Injected:
    weight_synchronizer = Synchronizer()
class Unset:
    weight_synchronizer = None
assert grpo.refit_policy_generation(None, Injected(), False, timer=3) == {"seconds": 1.0, "timer": 3}
assert grpo.refit_policy_generation(None, Plain(), False) == "broadcast"
assert grpo.refit_policy_generation(None, Unset(), False) == "broadcast"
"""
    )
    result = run_python(code, path=[SMALL, ROOT, tmp_path], env=ON)
    assert result.returncode == 0, result.stderr


SCRIPT = """
import os, sys
from nemo_rl.algorithms.grpo import setup
from nemo_rl_rlix.nemo_rl import registration
if __name__ == "__main__":
    import beside
    print(sys.argv[1:], os.environ["RLIX_CONTROL_PLANE"], bool(setup.__wrapped__), beside.HERE)
"""


@pytest.mark.parametrize("start", ["script", "module"])
def test_run_does_the_same_without_the_pth(
    run_python: RunPython, tmp_path: Path, start: str
) -> None:
    write_fake(tmp_path / "nemo", "main")
    where = tmp_path / "scripts" if start == "script" else tmp_path
    where.mkdir(exist_ok=True)
    (where / "train.py").write_text(SCRIPT, encoding="utf-8")
    (where / "beside.py").write_text("HERE = 'beside'\n", encoding="utf-8")
    command = [str(where / "train.py")] if start == "script" else ["-m", "train"]
    result = run_python(
        ["-m", "nemo_rl_rlix.nemo_rl.run_cli", *command, "--config", "x", "a=b"],
        path=[SMALL, ROOT, tmp_path / "nemo"],
        cwd=tmp_path,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "['--config', 'x', 'a=b'] rlix True beside"


@pytest.mark.parametrize("arguments", [[], ["nowhere.py"], ["-m"]])
def test_run_says_what_is_missing(run_python: RunPython, arguments: list[str]) -> None:
    result = run_python(["-m", "nemo_rl_rlix.nemo_rl.run_cli", *arguments], path=[ROOT])
    assert result.returncode != 0
    assert "Write: run -- " in result.stderr
