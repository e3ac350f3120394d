"""The script by which ``make venv`` finds a Python, on a PATH of stand-ins."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "find_python.sh"
REAL = f'exec "{sys.executable}" "$@"'
BROKEN = "echo 'this name leads nowhere' >&2; exit 127"
OLD = f"""[ "$1" = -c ] && exec "{sys.executable}" -c "
import sys; sys.version_info = (3, 9)
$2"
"""
WITHOUT_VENV = f"""[ "$1" = -c ] && exec "{sys.executable}" -c "
import sys; sys.modules['ensurepip'] = None
$2"
"""


def find(tmp_path: Path, stand_ins: dict[str, str], *args: str) -> subprocess.CompletedProcess[str]:
    for tool in ("sh", "head"):
        (tmp_path / tool).symlink_to(shutil.which(tool) or tool)
    for name, body in stand_ins.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    return subprocess.run(
        ["sh", str(SCRIPT), *args],
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


FOUND = {
    "python3 first": ({"python3": REAL, "python3.13": REAL}, (), "python3"),
    "python3 too old": ({"python3": OLD, "python3.12": REAL}, (), "python3.12"),
    "a name that does not run": ({"python3.13": BROKEN, "python3.11": REAL}, (), "python3.11"),
    "no venv": ({"python3": WITHOUT_VENV, "python3.11": REAL}, (), "python3.11"),
    "the one that was named": ({"python3": REAL, "mine": REAL}, ("mine",), "mine"),
    "an empty name": ({"python3": REAL}, ("",), "python3"),
}


@pytest.mark.parametrize(("stand_ins", "args", "name"), FOUND.values(), ids=FOUND)
def test_the_first_python_that_fits_is_taken(tmp_path, stand_ins, args, name):
    found = find(tmp_path, stand_ins, *args)
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{name}\n", "")


def test_if_none_fits_every_candidate_says_why(tmp_path):
    found = find(tmp_path, {"python3": OLD, "python3.13": BROKEN, "python3.12": WITHOUT_VENV})
    assert (found.returncode, found.stdout) == (1, "")
    for line in (
        "python3: is Python 3.9",
        "python3.13: this name leads nowhere",
        "python3.12: cannot create environments: the venv package",
        "python3.11: not found",
        "make venv PYTHON=",
    ):
        assert line in found.stderr


def test_a_named_python_that_does_not_fit_is_not_replaced(tmp_path):
    assert find(tmp_path, {"python3": REAL, "mine": OLD}, "mine").returncode == 1
