"""Losses of a shared run equal those of one that never gave anything up."""

import pytest
import training_programs as programs
from fakes.ranks import preload, run_ranks, values
from training_programs import Parallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

WORLDS = {
    "tp2": (2, Parallel(tp=2)),
    "pp2": (2, Parallel(pp=2)),
    "ep2": (2, Parallel(ep=2)),
    "dp2": (2, Parallel()),
    "tp2pp2": (4, Parallel(tp=2, pp=2)),
    "tp2pp2dp2": (8, Parallel(tp=2, pp=2)),
}


@pytest.fixture(autouse=True, scope="module")
def _server() -> None:
    preload("torch.distributed", "preloaded", "training_programs", "export_programs")


@pytest.mark.parametrize("name", WORLDS)
def test_losses_equal_a_run_that_never_gave_anything_up(name: str) -> None:
    world, parallel = WORLDS[name]
    steps = 4  # three generations
    plain = values(run_ranks(programs.losses, world, parallel, steps, False, timeout_s=110))
    shared = values(run_ranks(programs.losses, world, parallel, steps, True, timeout_s=110))
    for alone, time_shared in zip(plain, shared, strict=True):
        assert time_shared["losses"] == alone["losses"]
        assert len(set(alone["losses"])) == steps  # it does learn something
        assert time_shared["moved"] > 0
        assert len(time_shared["groups"]) > 10  # what initialize_model_parallel makes
        assert len(set(time_shared["books"])) == 1, "threads, files or groups pile up"


@pytest.mark.parametrize(
    ("world", "parallel"),
    [
        (2, Parallel(cp=2)),
        (4, Parallel(tp=2, ep=2)),
        (6, Parallel(pp=3)),
        (8, Parallel(tp=2, pp=2, cp=2)),
        (8, Parallel(cp=2, pp=2, ep=4)),
    ],
    ids=["cp2", "tp2ep2", "pp3dp2", "tp2pp2cp2", "cp2pp2ep4"],
)
def test_every_group_of_megatron_survives_three_generations(world: int, parallel: Parallel) -> None:
    found = values(run_ranks(programs.parallel_state_survives, world, parallel, 3, timeout_s=110))
    for rank, result in enumerate(found):
        assert result["same"] == [True] * 3, rank
        assert result["groups"] > 20
        assert result["expected"]["_DATA_PARALLEL_GROUP_WITH_CP"] >= 0
