"""The ranks of a policy as one trainer, over fake worker handles."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from nemo_rl_rlix.errors import DeadlineExceededError, RLixError
from nemo_rl_rlix.nemo_rl import leaders, trainer
from nemo_rl_rlix.nemo_rl.trainer import DeferredTrainer, WorkerGroupTrainer
from nemo_rl_rlix.nemo_rl.worker_actor import worker_actor
from nemo_rl_rlix.settings import RLixSettings


class Worker:
    """A handle whose calls are written down and answered at once."""

    def __init__(self, **answers: Any) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.answers = answers
        self.lives_for = 0

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any) -> Any:
            self.calls.append((name, args))
            return self, name

        return SimpleNamespace(remote=remote)

    def __ray_call__(self) -> None: ...


@pytest.fixture(autouse=True)
def ray_get(monkeypatch: pytest.MonkeyPatch) -> None:
    def get(refs: Any, timeout: float) -> Any:
        assert timeout > 0
        results = []
        for worker, name in refs:
            answer = worker.answers.get(name)
            if isinstance(answer, BaseException):
                raise answer
            results.append(answer)
        return results

    monkeypatch.setattr(trainer.ray, "get", get)


def make(*workers: Worker) -> WorkerGroupTrainer:
    settings = RLixSettings(sleep_level=1)
    return WorkerGroupTrainer(SimpleNamespace(workers=list(workers)), "p", settings)


def test_every_rank_takes_part_and_the_owner_answers() -> None:
    workers = [Worker(), Worker(build_cpu_weight_cache="handle")]
    made = make(*workers)
    assert made.build_cpu_weight_cache(3, slot=1, timeout_s=5) == "handle"
    made.onload(timeout_s=5)
    made.offload(timeout_s=7)
    for worker in workers:
        (name, (pipeline, block)), *rest = worker.calls
        assert (name, pipeline, block["sleep_level"]) == ("rlix_configure", "p", 1)
        assert rest == [
            ("build_cpu_weight_cache", (3, 1, 5)),
            ("rlix_onload", (5,)),
            ("rlix_offload", (7,)),
        ]


@pytest.mark.parametrize("owners", [0, 2])
def test_the_cache_has_one_owner(owners: int) -> None:
    workers = [Worker(build_cpu_weight_cache="handle" if i < owners else None) for i in range(3)]
    with pytest.raises(RLixError, match=f"{owners} of 3 training ranks"):
        make(*workers).build_cpu_weight_cache(1, slot=0, timeout_s=1)


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (GetTimeoutError("late"), DeadlineExceededError),
        (RayActorError(), RLixError),
        (RayTaskError("offload", "", ValueError("tensor stayed")), RLixError),
        (RayTaskError("offload", "", RLixError("tensor stayed")), RLixError),
    ],
)
def test_errors_of_the_ranks_are_typed(raised: Exception, expected: type[Exception]) -> None:
    made = make(Worker())
    made._workers[0].answers["rlix_offload"] = raised
    with pytest.raises(expected):
        made.offload(timeout_s=1)


def test_a_trainer_that_is_not_built_holds_nothing() -> None:
    deferred = DeferredTrainer()
    assert deferred.offload(timeout_s=1).held_bytes == 0
    deferred.end(timeout_s=1)
    with pytest.raises(RLixError, match="not been built"):
        deferred.onload(timeout_s=1)


def test_leaders_are_found_where_they_were_announced() -> None:
    with pytest.raises(RLixError, match="not been announced"):
        leaders.find(7)
    leaders._remember(object(), {7: "handle"})
    try:
        assert leaders.find(7) == "handle"
    finally:
        leaders._leaders.clear()


def test_an_actor_class_survives_what_nemo_rl_does_with_its_options() -> None:
    @worker_actor(concurrency_groups={"control": 2}, max_restarts=0)
    class Worker:
        pass

    actor_class: Any = Worker
    # NeMo RL's worker builder passes them on like this.
    options = {**actor_class._default_options, "num_gpus": 0.05, "name": "worker"}
    assert options["num_cpus"] == 0
    assert actor_class.options(**options)
    assert actor_class.__ray_metadata__.concurrency_groups["control"] == 2
