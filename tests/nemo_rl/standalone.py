"""Does NeMo RL behave the same with this package installed and without, variable unset?

Runs NeMo RL's own unit tests twice, in two copies of an environment of which one lacks
this package and its ``.pth``, and compares the outcome of every test.

    NEMO_RL_HOME=/path python tests/nemo_rl/standalone.py [--record FILE] [-k EXPR] [FILE ...]

The checkout and the environment are left as they are. Exit code 1: an outcome differs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "nemo_rl_rlix"
SITE = Path(__file__).resolve().parent / "site"

FILES = (
    "algorithms/test_async_utils.py",
    "algorithms/test_grpo.py",
    "distributed/test_worker_groups.py",
    "distributed/test_worker_groups_utils.py",
    "distributed/test_virtual_cluster.py",
    "experience/test_rollouts.py",
    "experience/test_rollout_generation_failures.py",
    "models/generation/test_vllm_shard_selection.py",
    "models/generation/test_vllm_utils.py",
    "models/generation/test_fleet_health.py",
)
"""Async utils, collector and buffer, GRPO, worker groups, clusters, rollouts and routing.

Relative to ``tests/unit``; what a version does not have is left out.
"""

Outcomes = dict[str, str]


def copy_environment(source: Path, target: Path, *, with_package: bool) -> Path:
    """A virtual environment of links to another one; returns its interpreter.

    Args:
        source: The environment, with this package installed.
        target: Folder to make it in.
        with_package: Whether this package is there too.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = target / "lib" / version / "site-packages"
    packages.mkdir(parents=True)
    for item in (source / "lib" / version / "site-packages").iterdir():
        if with_package or PACKAGE not in item.name:
            (packages / item.name).symlink_to(item)
    (target / "bin").mkdir()
    shutil.copy(source / "pyvenv.cfg", target / "pyvenv.cfg")
    python = target / "bin" / "python"
    python.symlink_to((source / "bin" / "python").resolve())
    return python


def copy_checkout(home: Path, target: Path) -> Path:
    """A checkout of links with tests of its own, since those write beside themselves."""
    target.mkdir()
    for item in home.iterdir():
        if item.name not in ("tests", ".git"):
            (target / item.name).symlink_to(item)
    ignored = shutil.ignore_patterns("__pycache__", "unit_results*", "test_assets")
    shutil.copytree(home / "tests", target / "tests", ignore=ignored)
    return target


def environment(home: Path) -> dict[str, str]:
    """Variables of a run: time sharing off, nothing fetched."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key not in ("RLIX_CONTROL_PLANE", "PYTHONPATH", "VIRTUAL_ENV")
    }
    return {
        **kept,
        "PYTHONPATH": f"{home}:{SITE}",
        "HF_HUB_OFFLINE": "1",
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "RAY_worker_niceness": "0",
        "RAY_raylet_start_wait_time_s": "180",
        # Recent versions of Ray let nobody in without; older ones do not look at it.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
    }


@contextlib.contextmanager
def private_ray(python: Path, variables: dict[str, str]) -> Iterator[str]:
    """A Ray cluster that nobody else uses; yields its address.

    NeMo RL's tests attach to any cluster that they find, unless they are told which.
    """
    code = (
        "import ray, sys\n"
        "context = ray.init(address='local', num_cpus=16, num_gpus=2, include_dashboard=False,"
        " _temp_dir=sys.argv[1])\n"
        "print('ADDRESS', context.address_info['gcs_address'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    # Short, for Unix sockets allow 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nrr-", dir="/tmp", ignore_cleanup_errors=True) as tmp:
        head = subprocess.Popen(
            [str(python), "-c", code, tmp],
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert head.stdin is not None and head.stdout is not None
        try:
            for line in head.stdout:
                if line.startswith("ADDRESS"):
                    yield line.split()[1]
                    break
            else:
                raise RuntimeError("Ray did not start")
        finally:
            head.stdin.close()
            head.wait(60)


def run_tests(
    python: Path, home: Path, files: list[str], folder: Path, arguments: list[str], timeout_s: int
) -> Outcomes:
    """Run test files of a checkout, each in a process of its own; node id -> outcome."""
    outcomes: Outcomes = {}
    variables = environment(home)
    checkout = copy_checkout(home, folder / "checkout")
    with private_ray(python, variables) as address:
        for number, file in enumerate(files):
            report = folder / f"report-{number}.xml"
            started = time.monotonic()
            subprocess.run(
                [
                    *(str(python), "-m", "pytest", f"tests/unit/{file}", "-q", "-W", "ignore"),
                    *("-p", "no:cacheprovider", f"--timeout={timeout_s}", "-o", "addopts="),
                    *(f"--junitxml={report}", *arguments),
                ],
                cwd=checkout,
                env={**variables, "RAY_ADDRESS": address},
                stdout=(folder / f"log-{number}.txt").open("w"),
                stderr=subprocess.STDOUT,
                check=False,
            )
            found = read_report(report)
            outcomes.update({f"{file}::{name}": outcome for name, outcome in found.items()})
            counts = dict(Counter(found.values()))
            log = (folder / f"log-{number}.txt").read_text(encoding="utf-8", errors="replace")
            if not counts.get("passed"):
                print("\n".join(log.splitlines()[-40:]))
            print(f"  {file}: {counts} in {time.monotonic() - started:.0f} s", flush=True)
    return outcomes


def read_report(report: Path) -> Outcomes:
    """Test -> ``passed``, ``skipped``, or ``failed`` and ``error`` with the kind of error."""
    if not report.exists():
        return {"(whole file)": "crashed"}
    outcomes = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        outcome = "passed"
        for child in case:
            if child.tag == "skipped":
                outcome = "skipped"
            elif child.tag in ("failure", "error"):
                outcome = "failed" if child.tag == "failure" else "error"
        outcomes[name] = outcome
    return outcomes


def record(path: Path, files: list[str], without: Outcomes, with_: Outcomes) -> None:
    """Write the numbers of each file that was run; those of other files stay."""
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for file in files:
        ours = [test for test in sorted({*without, *with_}) if test.startswith(f"{file}::")]
        known[file] = {
            "without": dict(sorted(Counter(without.get(test, "absent") for test in ours).items())),
            "with": dict(sorted(Counter(with_.get(test, "absent") for test in ours).items())),
            "different": [test for test in ours if without.get(test) != with_.get(test)],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", help="relative to tests/unit; default: all listed")
    parser.add_argument("--record", type=Path, help="put the numbers into that JSON file")
    parser.add_argument("-k", dest="expression", default="", help="as pytest's")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one test")
    options = parser.parse_args()
    home = Path(os.environ.get("NEMO_RL_HOME", "")).resolve()
    if not (home / "nemo_rl" / "algorithms" / "grpo.py").is_file():
        print("Skipped: NEMO_RL_HOME names no checkout of NeMo RL.")
        return 0
    files = [f for f in options.files or FILES if (home / "tests" / "unit" / f).is_file()]
    arguments = ["-k", options.expression] if options.expression else []
    runs: dict[str, Outcomes] = {}
    for name, with_package in (("without", False), ("with", True)):
        print(f"{name} the package installed:", flush=True)
        with tempfile.TemporaryDirectory(prefix="standalone-") as tmp:
            folder = Path(tmp)
            python = copy_environment(Path(sys.prefix), folder / "venv", with_package=with_package)
            installed = subprocess.run(
                [str(python), "-c", f"import {PACKAGE}"], capture_output=True, check=False, cwd="/"
            )
            if (installed.returncode == 0) is not with_package:
                print(f"The environment {name} the package is not what it ought to be.")
                return 2
            runs[name] = run_tests(python, home, files, folder, arguments, options.timeout)
    without, with_ = runs["without"], runs["with"]
    different = sorted(test for test in {*without, *with_} if without.get(test) != with_.get(test))
    for test in different:
        print(f"DIFFERENT {test}: {without.get(test)} without, {with_.get(test)} with")
    totals = {name: dict(Counter(outcomes.values())) for name, outcomes in runs.items()}
    print(f"without {totals['without']}, with {totals['with']}, {len(different)} different")
    if options.record is not None:
        record(options.record, files, without, with_)
    return 1 if different or not with_ else 0


if __name__ == "__main__":
    raise SystemExit(main())
