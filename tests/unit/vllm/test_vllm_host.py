"""Build locks, process ends, and symbols of another vLLM."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from types import SimpleNamespace

import pytest

from nemo_rl_rlix.errors import DeadlineExceededError, UnsupportedVersionError
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.build_lock import build_lock
from nemo_rl_rlix.vllm.compat import Symbol
from nemo_rl_rlix.vllm.processes import end_processes, end_trees, start_time, with_descendants


def _locked_elsewhere(directory: str, devices: list[str]) -> bool:
    """Whether another process finds the cards taken."""
    code = (
        "import sys; from nemo_rl_rlix.vllm.build_lock import build_lock\n"
        "from nemo_rl_rlix.errors import DeadlineExceededError\n"
        "try:\n"
        "  with build_lock(sys.argv[2:], timeout_s=0.1, directory=sys.argv[1]): sys.exit(0)\n"
        "except DeadlineExceededError: sys.exit(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, directory, *devices], check=False)
    assert done.returncode in (0, 3)
    return done.returncode == 3


@pytest.mark.parametrize(
    ("mine", "theirs", "taken"),
    [
        (["a"], ["a"], True),
        (["a"], ["b"], False),
        (["a", "b"], ["b", "c"], True),
        (["a"], [], True),
        ([], ["a"], True),
    ],
    ids=str,
)
def test_one_build_at_a_time_on_each_card(
    tmp_path: Path, mine: list[str], theirs: list[str], taken: bool
) -> None:
    with build_lock(mine, timeout_s=1, directory=str(tmp_path)):
        assert _locked_elsewhere(str(tmp_path), theirs) == taken


def test_a_build_waits_for_the_one_before_it(tmp_path: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with build_lock(["a"], timeout_s=10, directory=str(tmp_path)):
            order.append("second")

    thread = threading.Thread(target=second)
    with build_lock(["a"], timeout_s=1, directory=str(tmp_path)):
        thread.start()
        with pytest.raises(DeadlineExceededError):
            with build_lock(["a"], timeout_s=0.1, directory=str(tmp_path)):
                pass
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]


def _parent_of_sleeper(ready: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(ready).write_text(str(child.pid))
    time.sleep(60)


def test_a_process_is_ended_with_what_it_started(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    context = multiprocessing.get_context("spawn")
    parent = context.Process(target=_parent_of_sleeper, args=(str(ready),))
    parent.start()
    assert parent.pid is not None
    while not (ready.exists() and ready.read_text()):
        time.sleep(0.02)
    child = int(ready.read_text())
    processes = with_descendants([parent.pid])
    assert {parent.pid, child} <= set(processes)
    assert os.getpid() not in processes
    assert end_trees({parent.pid: processes[parent.pid]}, 10) == set()
    assert start_time(parent.pid) is None and start_time(child) is None
    parent.join(5)


def test_a_reused_pid_is_not_ended() -> None:
    mine = start_time(os.getpid())
    assert mine is not None
    assert end_processes({os.getpid(): mine - 1}, 0.1) == set()


@pytest.fixture
def moved_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("some_engine")

    class Engine:
        def abort(self, request_id: str) -> None: ...

        def pause(self, mode: str, clear_cache: bool) -> None: ...

    module.Engine = Engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "some_engine", module)


def test_a_moved_symbol_is_refused_by_name_and_version(moved_vllm: None) -> None:
    good = Symbol("some_engine", "Engine.pause", ("mode", "clear_cache"))
    compat.require([good])
    with pytest.raises(UnsupportedVersionError) as caught:
        compat.require(
            [
                good,
                Symbol("some_engine", "Engine.abort", ("internal",)),
                Symbol("some_engine", "Engine.wake"),
                Symbol("no_such_engine", "Engine"),
            ]
        )
    message = str(caught.value)
    assert "does not take internal" in message
    assert "Engine.wake" in message and "no_such_engine" in message
    assert caught.value.product == "vLLM"


def test_a_table_that_is_elsewhere_is_no_empty_table() -> None:
    with pytest.raises(UnsupportedVersionError, match="output_processor"):
        compat.open_requests(SimpleNamespace(output_processor=SimpleNamespace()))
    states = SimpleNamespace(request_states={"r-0001": None})
    assert compat.open_requests(SimpleNamespace(output_processor=states)) == ["r-0001"]
