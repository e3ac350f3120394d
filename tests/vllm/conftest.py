"""Tests of a real AsyncLLM on the CPU; skipped where there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_bench import DIMENSIONS, Checkpoint

from nemo_rl_rlix.vllm import compat

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
MISSING = "vLLM is not installed in this environment: make test-vllm-cpu makes one that has it"

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "2",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # By its metadata: the name alone would also find the folder of these tests.
    if compat.version() == "none":
        for item in items:
            if HERE in item.path.parents:
                item.add_marker(pytest.mark.skip(reason=MISSING))


@pytest.fixture(scope="session", autouse=True)
def vllm_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        # Engine processes import the package and the extension of these tests.
        known = [str(ROOT), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        patch.setenv("PYTHONPATH", os.pathsep.join(part for part in known if part))
        yield


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Checkpoint]:
    import torch
    import transformers

    made = {}
    for version in (1, 2):
        torch.manual_seed(version)
        config = transformers.Qwen2Config(**DIMENSIONS, tie_word_embeddings=False)
        model = transformers.Qwen2ForCausalLM(config).float()
        folder = tmp_path_factory.mktemp(f"version{version}")
        model.save_pretrained(folder)
        weights = [(name, tensor.contiguous()) for name, tensor in model.state_dict().items()]
        made[version] = Checkpoint(version, folder, weights)
    return made
