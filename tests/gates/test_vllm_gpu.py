"""What a vLLM shard on a GPU must reach. Needs one GPU that nothing else uses, and vLLM.

pytest tests/gates/test_vllm_gpu.py                        # measures first, about 9 min
RLIX_GPU_RECORDS=benchmarks/results/gpu_vllm.json pytest tests/gates/test_vllm_gpu.py
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_rlix.observe.records import Record, load_records
from nemo_rl_rlix.vllm import compat

ROOT = Path(__file__).resolve().parents[2]
RECORDS_ENV = "RLIX_GPU_RECORDS"
LIMIT_S = 590


def _why_not() -> str:
    if os.environ.get(RECORDS_ENV):
        return ""
    if compat.version() == "none":
        return "vLLM is not installed in this environment"
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
    path = tmp_path_factory.mktemp("gpu") / "gpu_vllm.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_vllm.py"), "--out", str(path)]
    known = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(part for part in known if part)}
    with contextlib.suppress(subprocess.TimeoutExpired):  # what was measured by then is judged
        subprocess.run(command, check=False, timeout=LIMIT_S, cwd=ROOT, env=environment)
    return load_records(path) if path.exists() else []


def find(records: list[Record], metric: str, **params: Any) -> list[Record]:
    return [
        record
        for record in records
        if record.metric == metric
        and all(record.params.get(name) == value for name, value in params.items())
    ]


AT_LEAST = [("sync_shm_ratio", {"model": "7b"})]
AT_MOST = [
    ("switch_s", {"model": "7b", "level": 2}),
    ("sleep_residue_gib", {"model": "7b", "graphs": False}),
    ("sleep_residue_gib", {"model": "7b", "graphs": True}),
    ("abort_drain_sleep_s", {"in_flight": 256}),
    ("noisy_neighbour_dead_engines", {"cycles": 100}),
    ("noisy_neighbour_unknown_states", {"cycles": 100}),
]
REPORTED = [
    ("sync_ipc_ratio", {"model": "7b"}),
    ("sync_shm_ratio", {"model": "0.5b"}),
    ("sync_ipc_ratio", {"model": "0.5b"}),
    ("expand_s", {"model": "7b"}),
    ("active_refresh_s", {"model": "7b"}),
    ("active_refresh_tokens_lost", {"model": "7b"}),
    ("sleep_s", {"model": "7b", "level": 1}),
    ("wake_s", {"model": "7b", "level": 1}),
]


@pytest.mark.parametrize(("metric", "params"), AT_LEAST, ids=str)
def test_figures_that_must_not_be_lower(
    records: list[Record], metric: str, params: dict[str, Any]
) -> None:
    found = find(records, metric, **params)
    assert found, f"{metric} {params} was not measured"
    for record in found:
        assert record.reference is not None
        assert record.value >= record.reference, record


@pytest.mark.parametrize(("metric", "params"), AT_MOST, ids=str)
def test_figures_that_must_not_be_higher(
    records: list[Record], metric: str, params: dict[str, Any]
) -> None:
    found = find(records, metric, **params)
    assert found, f"{metric} {params} was not measured"
    for record in found:
        assert record.reference is not None
        assert record.value <= record.reference, record


@pytest.mark.parametrize(("metric", "params"), REPORTED, ids=str)
def test_figures_that_are_reported(
    records: list[Record], metric: str, params: dict[str, Any]
) -> None:
    assert find(records, metric, **params)


@pytest.mark.parametrize("arch", ["llama", "qwen2", "qwen3", "qwen3_moe"])
@pytest.mark.parametrize("tied", [False, True])
def test_level_2_and_a_sync_give_the_tokens_of_a_fresh_engine(
    records: list[Record], arch: str, tied: bool
) -> None:
    found = find(records, "level_2_equal_tokens", arch=arch, tied=tied)
    assert found and found[0].value == 1
