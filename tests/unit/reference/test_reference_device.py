from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import stat
import time
from pathlib import Path

import pytest

from nemo_rl_rlix.errors import GrantRequiredError, SettingError
from nemo_rl_rlix.reference import device as device_module
from nemo_rl_rlix.reference import ledger as ledger_module
from nemo_rl_rlix.reference.device import (
    DeviceOutOfMemoryError,
    GrantConflictError,
    LogicalGpu,
    LogicalGpuSpec,
    create_logical_gpus,
    private_directory,
    tensor_bytes,
)
from nemo_rl_rlix.reference.guards import ShardGuards
from nemo_rl_rlix.reference.ledger import process_start_time

spawn = multiprocessing.get_context("fork")


@pytest.fixture
def gpu(tmp_path: Path) -> LogicalGpu:
    return LogicalGpu(create_logical_gpus(tmp_path / "gpus", 1, 1000)[0])


def test_over_commit_raises_and_names_every_resident(gpu: LogicalGpu) -> None:
    gpu.charge("a-shard-0", "weights", 600)
    with pytest.raises(DeviceOutOfMemoryError) as caught:
        gpu.charge("b-trainer", "weights", 500)
    assert (caught.value.asked, caught.value.free) == (500, 400)
    assert caught.value.used == {"a-shard-0": 600}
    assert "a-shard-0 600" in str(caught.value)
    assert gpu.residents() == {"a-shard-0": 600}, "a refused charge changes nothing"
    gpu.charge("a-shard-0", "weights", 0)
    gpu.charge("b-trainer", "weights", 1000)


def test_a_charge_replaces_the_label_and_can_shrink_on_a_full_gpu(gpu: LogicalGpu) -> None:
    gpu.charge("a", "weights", 1000)
    gpu.charge("a", "weights", 900)
    gpu.charge("a", "kv", 100)
    assert gpu.held_bytes("a") == 1000


def _hold(spec: LogicalGpuSpec, ready: multiprocessing.synchronize.Event) -> None:
    LogicalGpu(spec).charge("doomed", "weights", 1000)
    ready.set()
    time.sleep(60)


def test_a_dead_process_gives_its_memory_back(gpu: LogicalGpu) -> None:
    ready = spawn.Event()
    child = spawn.Process(target=_hold, args=(gpu.spec, ready))
    child.start()
    assert ready.wait(20)
    with pytest.raises(DeviceOutOfMemoryError):
        gpu.charge("me", "weights", 1)
    os.kill(child.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    # Still a zombie here, as nobody has waited for it: that must do.
    while gpu.residents() and time.monotonic() < deadline:
        time.sleep(0.01)
    gpu.charge("me", "weights", 1000)
    child.join(10)


def test_a_reused_pid_is_not_the_process_that_died(
    gpu: LogicalGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu.charge("me", "weights", 1000)
    started = process_start_time(os.getpid())
    monkeypatch.setattr(ledger_module, "process_start_time", lambda pid: started + 1)
    assert gpu.residents() == {}


def test_one_owner_at_a_time(gpu: LogicalGpu) -> None:
    gpu.grant("p1_actor_infer")
    gpu.grant("p1_actor_infer")
    with pytest.raises(GrantConflictError, match="p1_actor_infer holds it"):
        gpu.grant("p2_actor_infer")
    gpu.revoke("p2_actor_infer")
    assert gpu.holder() == "p1_actor_infer", "nobody takes another's grant away"
    gpu.revoke("p1_actor_infer")
    gpu.revoke("p1_actor_infer")
    gpu.grant("p2_actor_infer")
    assert gpu.holder() == "p2_actor_infer"


def test_the_guard_grants_by_rank(tmp_path: Path) -> None:
    specs = create_logical_gpus(tmp_path, 2, 10)
    guard = ShardGuards("p1", {rank: [spec] for rank, spec in enumerate(specs)})
    guard.grant(1)
    assert [LogicalGpu(spec).holder() for spec in specs] == ["", "p1/shard1"]
    guard.revoke(1)
    guard.revoke(1)
    LogicalGpu(specs[1]).grant("p2")
    guard.revoke(1)
    assert LogicalGpu(specs[1]).holder() == "p2"


def test_compute_without_the_grant_raises_and_is_on_record(gpu: LogicalGpu) -> None:
    gpu.grant("p2")
    with pytest.raises(GrantRequiredError), gpu.compute("p1", "engine step"):
        pytest.fail("entered")
    seen = pickle.loads(pickle.dumps(gpu)).violations()
    assert [(v.owner, v.what, v.holder, v.gpu_id) for v in seen] == [("p1", "engine step", "p2", 0)]


def test_a_grant_that_ends_under_a_computation_is_a_violation(gpu: LogicalGpu) -> None:
    other_process = pickle.loads(pickle.dumps(gpu))
    gpu.grant("p1")
    with gpu.compute("p1", "step"):
        other_process.revoke("p1")
        # Taken and given back: the owner is right again, the use was not.
        other_process.grant("p1")
    assert [v.what for v in gpu.violations()] == ["step beyond the end of its grant"]


def test_busy_seconds_add_up_over_processes_and_owners(gpu: LogicalGpu) -> None:
    second = pickle.loads(pickle.dumps(gpu))
    for who, device in (("p1", gpu), ("p1", second), ("p2", gpu)):
        device.grant(who)
        with device.compute(who, "step"):
            time.sleep(0.02)
        device.revoke(who)
    second.flush()
    busy = gpu.busy_seconds()
    assert busy["p1"] == pytest.approx(0.04, abs=0.03) and busy["p1"] > busy["p2"] >= 0.02
    assert gpu.violations() == []


def test_compute_is_cheap_enough_for_every_step(gpu: LogicalGpu) -> None:
    gpu.grant("p1")
    started = time.perf_counter()
    for _ in range(2000):
        with gpu.compute("p1", "step"):
            pass
    # Typically 1 us; the bound leaves room for a busy machine.
    assert (time.perf_counter() - started) / 2000 < 100e-6


def _charge_many(spec: LogicalGpuSpec, name: str) -> None:
    device = LogicalGpu(spec)
    for size in range(1, 40):
        device.charge(name, f"label{size}", 1)
    time.sleep(60)


def test_concurrent_charges_are_not_lost(gpu: LogicalGpu) -> None:
    children = [spawn.Process(target=_charge_many, args=(gpu.spec, f"r{i}")) for i in range(3)]
    for child in children:
        child.start()
    deadline = time.monotonic() + 20
    want = {f"r{i}": 39 for i in range(3)}
    while gpu.residents() != want and time.monotonic() < deadline:
        time.sleep(0.02)
    assert gpu.residents() == want
    for child in children:
        child.kill()
        child.join(10)


def test_the_directory_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module.tempfile, "gettempdir", lambda: str(tmp_path))
    directory = private_directory("session_1")
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert private_directory("session_1") == directory
    directory.chmod(0o755)
    with pytest.raises(SettingError, match="not private"):
        private_directory("session_1")


def _pin_and_report(spec: LogicalGpuSpec, queue: multiprocessing.Queue) -> None:
    core = LogicalGpu(spec).pin()
    queue.put((core, [os.sched_getaffinity(int(t)) for t in os.listdir("/proc/self/task")]))


def test_pin_ties_every_thread_to_the_core_of_the_gpu(tmp_path: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    for spec in create_logical_gpus(tmp_path, 2, 10):
        queue = spawn.Queue()
        child = spawn.Process(target=_pin_and_report, args=(spec, queue))
        child.start()
        core, affinities = queue.get(timeout=20)
        child.join(10)
        assert core == cores[spec.gpu_id % len(cores)]
        assert all(affinity == {core} for affinity in affinities)


def test_tensor_bytes_counts_ties_and_views_once() -> None:
    torch = pytest.importorskip("torch")
    weight = torch.zeros(10)
    assert tensor_bytes([weight, weight, weight[:5], torch.empty(0)]) == 40
