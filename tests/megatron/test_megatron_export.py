"""The cache holds the full model, bit for bit, however the trainer is cut up."""

from pathlib import Path

import export_programs as programs
import pytest
from fakes.ranks import preload, run_ranks, values
from training_programs import Parallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLDS = {
    "one rank": (1, Parallel(), "dense"),
    "tp2": (2, Parallel(tp=2), "dense"),
    "pp2": (2, Parallel(pp=2), "dense"),
    "pp2 tied": (2, Parallel(pp=2), "tied"),
    "cp2": (2, Parallel(cp=2), "dense"),
    "ep2": (2, Parallel(ep=2), "experts"),
    "tp2pp2": (4, Parallel(tp=2, pp=2), "dense"),
    "ep2pp2": (4, Parallel(ep=2, pp=2), "experts"),
    "tp2ep2": (4, Parallel(tp=2, ep=2), "experts"),
    "tp2pp2dp2": (8, Parallel(tp=2, pp=2), "dense"),
}


@pytest.fixture(autouse=True, scope="module")
def _server() -> None:
    preload("torch.distributed", "preloaded", "training_programs", "export_programs")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.mark.parametrize("name", WORLDS)
def test_cache_equals_the_full_model_over_three_versions(name: str, models: Path) -> None:
    world, parallel, kind = WORLDS[name]
    found = values(
        run_ranks(
            programs.cache_follows_the_weights, world, parallel, kind, str(models), timeout_s=110
        )
    )
    for rank, result in enumerate(found):
        assert result["wrong"] == [[]] * 6, rank
        assert result["owners"] == [[0], [0], [0]]
        assert result["planned_once"]
        assert result["tensors"] > 20
        assert f"rank {rank}" in result["refused"] and "actor_train" in result["refused"]


def test_owner_that_fails_holds_up_nobody(models: Path) -> None:
    found = values(
        run_ranks(
            programs.failures_hold_up_nobody,
            2,
            Parallel(tp=2),
            "dense",
            str(models),
            timeout_s=110,
        )
    )
    kinds = [outcome[0] for outcome in found]
    assert kinds == [["HostMemoryError", "CacheBuildError", "CacheBuildError"], ["", "", ""]]
    for _, wrong, busy in found:
        assert wrong == []
        assert "training step is open" in busy
