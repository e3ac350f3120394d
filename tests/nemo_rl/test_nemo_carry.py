"""The folder that carries the package into other interpreters."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from nemo_support import RunPython

from nemo_rl_rlix import __version__
from nemo_rl_rlix.nemo_rl.carry import carrier, put_on_pythonpath, take_off_pythonpath


@pytest.mark.parametrize("before", ["", "/a", f"/a{os.pathsep}/b"])
def test_it_goes_last_once_and_comes_off(before: str) -> None:
    environment = {"PYTHONPATH": before} if before else {}
    original = dict(environment)
    assert put_on_pythonpath(environment)
    assert environment["PYTHONPATH"].split(os.pathsep)[-1] == str(carrier())
    assert environment["PYTHONPATH"].startswith(before)
    assert not put_on_pythonpath(environment)
    take_off_pythonpath(environment)
    assert environment == original


def test_an_interpreter_without_the_package_finds_it_and_nothing_else(
    run_python: RunPython,
) -> None:
    code = f"""
import importlib.util, sys
assert "site" not in sys.modules
import nemo_rl_rlix
assert nemo_rl_rlix.__version__ == {__version__!r}
import nemo_rl_rlix.errors, nemo_rl_rlix.nemo_rl.autoload
from nemo_rl_rlix.shards import state
assert nemo_rl_rlix.__file__ == {str(carrier().parents[1] / "__init__.py")!r}
assert importlib.util.find_spec("tests") is None
assert importlib.util.find_spec("pydantic") is None
"""
    # -S: no site-packages at all, as in an environment that others made.
    result = run_python(["-S", "-c", code], path=[carrier()])
    assert result.returncode == 0, result.stderr


def test_classes_are_the_same_by_name_in_both(run_python: RunPython, tmp_path: Path) -> None:
    import pickle

    from nemo_rl_rlix.errors import PartialGeneration, ShardPreemptedError

    payload = tmp_path / "error.pickle"
    payload.write_bytes(pickle.dumps(ShardPreemptedError(3, PartialGeneration((1, 2)))))
    code = f"""
import pickle
error = pickle.load(open({str(payload)!r}, "rb"))
assert type(error).__module__ == "nemo_rl_rlix.errors" and error.partial.token_ids == (1, 2)
"""
    result = run_python(["-S", "-c", code], path=[carrier()])
    assert result.returncode == 0, result.stderr
