"""The script that compares NeMo RL's own tests with this package installed and without."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import standalone


@pytest.mark.parametrize("with_package", [True, False])
def test_the_copied_environment_has_the_package_or_has_it_not(
    tmp_path: Path, with_package: bool
) -> None:
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs a virtual environment, as make test-nemo-rl has one")
    python = standalone.copy_environment(
        Path(sys.prefix), tmp_path / "venv", with_package=with_package
    )
    code = "import pytest\nimport nemo_rl_rlix"
    result = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=False, cwd="/", env={}
    )
    assert (result.returncode == 0) is with_package, result.stderr
    if not with_package:
        assert "No module named 'nemo_rl_rlix'" in result.stderr


def test_outcomes_are_read_from_a_report(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase classname="tests.unit.a.TestX" name="one"/>'
        '<testcase classname="tests.unit.a" name="two"><failure message="x"/></testcase>'
        '<testcase classname="tests.unit.a" name="three"><skipped/></testcase>'
        '<testcase classname="tests.unit.a" name="four"><error/></testcase>'
        "</testsuite></testsuites>"
    )
    assert standalone.read_report(report) == {
        "TestX::one": "passed",
        "a::two": "failed",
        "a::three": "skipped",
        "a::four": "error",
    }
    assert standalone.read_report(tmp_path / "none.xml") == {"(whole file)": "crashed"}


def test_numbers_of_other_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "baseline" / "numbers.json"
    standalone.record(path, ["a"], {"a::x": "passed"}, {"a::x": "failed"})
    standalone.record(path, ["b"], {"b::x": "passed"}, {"b::x": "passed"})
    numbers = json.loads(path.read_text())
    assert numbers["a"] == {
        "without": {"passed": 1},
        "with": {"failed": 1},
        "different": ["a::x"],
    }
    assert numbers["b"]["different"] == []


def test_the_checkout_is_not_written_to(tmp_path: Path) -> None:
    home = tmp_path / "home"
    (home / "nemo_rl").mkdir(parents=True)
    (home / "tests" / "unit" / "test_assets").mkdir(parents=True)
    (home / "tests" / "unit" / "conftest.py").write_text("")
    copy = standalone.copy_checkout(home, tmp_path / "copy")
    (copy / "tests" / "unit" / "unit_results.json").write_text("{}")
    assert (copy / "nemo_rl").is_symlink()
    assert not (copy / "tests" / "unit" / "test_assets").exists()
    assert [item.name for item in (home / "tests" / "unit").iterdir() if item.is_file()] == [
        "conftest.py"
    ]
