"""What a Megatron trainer on a GPU must reach. Needs one GPU that nothing else uses.

pytest tests/gates/test_megatron_gpu.py                        # measures first, about 4 min
RLIX_MEGATRON_RECORDS=benchmarks/results/gpu_megatron.json pytest tests/gates/test_megatron_gpu.py
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_rl_rlix.observe.records import Record, load_records

ROOT = Path(__file__).resolve().parents[2]
RECORDS_ENV = "RLIX_MEGATRON_RECORDS"
LIMIT_S = 480


def _why_not() -> str:
    if os.environ.get(RECORDS_ENV):
        return ""
    if importlib.util.find_spec("megatron") is None:
        return "Megatron-Core is not installed in this environment"
    import torch

    return "" if torch.cuda.is_available() else "there is no GPU"


pytestmark = [
    pytest.mark.skipif(bool(_why_not()), reason=_why_not() or "-"),
    pytest.mark.timeout(LIMIT_S + 30),
]


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Record]:
    given = os.environ.get(RECORDS_ENV)
    if given:
        return load_records(given)
    path = tmp_path_factory.mktemp("gpu") / "gpu_megatron.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_megatron.py"), "--out", str(path)]
    with contextlib.suppress(subprocess.TimeoutExpired):  # what was measured by then is judged
        subprocess.run(command, check=False, timeout=LIMIT_S, cwd=ROOT)
    return load_records(path) if path.exists() else []


def find(records: list[Record], metric: str) -> list[Record]:
    found = [record for record in records if record.metric == metric]
    assert found, f"{metric} was not measured"
    return found


def test_device_memory_is_flat_over_twenty_cycles(records: list[Record]) -> None:
    for record in find(records, "nccl_cycle_slope_mib"):
        assert record.value <= 64, record
    for record in find(records, "nccl_freed_mib"):
        assert record.value >= 200, f"nothing to speak of was freed: {record}"


def test_destroy_holds_the_training_gpus_for_at_most_a_second(records: list[Record]) -> None:
    assert min(record.value for record in find(records, "nccl_critical_path_s")) <= 1.0


@pytest.mark.parametrize("metric", ["offload_ratio", "onload_ratio", "cache_build_ratio"])
def test_bytes_move_at_the_rate_of_pinned_copies(records: list[Record], metric: str) -> None:
    for record in find(records, metric):
        assert record.value >= 0.85, record


def test_nothing_of_the_trainer_stays_on_the_device(records: list[Record]) -> None:
    for record in find(records, "offload_residue_mib"):
        assert record.value <= 256, record


def test_losses_differ_no_more_than_those_of_two_equal_runs(records: list[Record]) -> None:
    for record in find(records, "offload_loss_difference"):
        assert record.value <= (record.reference or 0.0), record
