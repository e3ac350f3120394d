"""The wrapper around setup: what it refuses, what it shows NeMo RL, how it ends."""

from __future__ import annotations

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl import start
from nemo_rl_rlix.nemo_rl.bridge import SharePlan
from nemo_rl_rlix.settings import ControlPlaneKind, RLixSettings
from nemo_rl_rlix.topology import validate_topology

RECIPE: dict[str, Any] = {
    "grpo": {"async_grpo": {"enabled": True}},
    "policy": {
        "megatron_cfg": {"enabled": True},
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": False},
            "vllm_cfg": {"async_engine": True, "precision": "bfloat16"},
        },
    },
    "cluster": {"gpus_per_node": 2},
}
TOPOLOGY = validate_topology(
    train_device_mapping=[0], infer_device_mapping=[0, 1], infer_tp=1, num_gpus=2, gpus_per_node=2
)


class Config:
    """A configuration as NeMo RL passes it."""

    def __init__(self, recipe: dict[str, Any] = RECIPE) -> None:
        self.__dict__.update(copy.deepcopy(recipe))

    def model_dump(self) -> dict[str, Any]:
        return copy.deepcopy(self.__dict__)


class FakeSession:
    def __init__(self) -> None:
        self.acts: list[str] = []

    def fail(self, error: BaseException) -> None:
        self.acts.append(f"fail {error}")

    def close(self) -> None:
        self.acts.append("close")

    def built(self) -> None:
        self.acts.append("built")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> FakeSession:
    made = FakeSession()
    plan = SharePlan(
        topology=TOPOLOGY,
        lasting={"grpo.async_grpo.in_flight_weight_updates": True},
        during_setup={"cluster.gpus_per_node": 3},
    )
    monkeypatch.setattr(start, "open_session", lambda *args: (made, plan))
    monkeypatch.setattr(start, "first_step", lambda recipe: 0)
    module: Any = SimpleNamespace(TimeSharingSynchronizer=lambda run: ("synchronizer", run))
    monkeypatch.setitem(sys.modules, "nemo_rl_rlix.nemo_rl.synchronizer", module)
    return made


def test_setup_is_shown_other_sizes_and_they_are_put_back(session: FakeSession) -> None:
    seen: list[Any] = []

    def setup(config: Any, *args: Any) -> Any:
        seen.append((config.cluster["gpus_per_node"], args))
        assert not hasattr(generation, "weight_synchronizer")
        return "policy", generation

    generation = SimpleNamespace()
    config = Config()
    result = start.time_share_setup(setup)(config, "tokenizer", "data", None)
    assert result == ("policy", generation)
    assert seen == [(3, ("tokenizer", "data", None, None))]
    assert config.model_dump()["cluster"]["gpus_per_node"] == 2
    assert config.model_dump()["grpo"]["async_grpo"]["in_flight_weight_updates"] is True
    assert generation.weight_synchronizer == ("synchronizer", session)
    assert session.acts == ["built"]


def test_a_setup_that_fails_gives_everything_back(session: FakeSession) -> None:
    def setup(*args: Any) -> Any:
        raise RuntimeError("no room")

    config = Config()
    with pytest.raises(RuntimeError, match="no room"):
        start.time_share_setup(setup)(config, "tokenizer", "data", None)
    assert session.acts == ["fail no room", "close"]
    assert config.model_dump()["cluster"]["gpus_per_node"] == 2


def test_nothing_is_opened_for_a_refused_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "open_session", lambda *args: pytest.fail("opened"))
    shared = start.time_share_setup(lambda *args: pytest.fail("built"))
    recipe = copy.deepcopy(RECIPE)
    recipe["grpo"]["async_grpo"]["enabled"] = False
    with pytest.raises(SettingError, match="async_grpo.enabled"):
        shared(Config(recipe), "tokenizer", "data", None)
    with pytest.raises(SettingError, match="policy_factory"):
        shared(Config(), "tokenizer", "data", None, policy_factory=object)


def test_what_is_registered() -> None:
    settings = RLixSettings(allow_shrink_to_zero=True, priority_weight=2.0)
    spec = start.pipeline_spec("p", TOPOLOGY, settings)
    assert spec.device_mappings == {"actor_train": (0,), "actor_infer": (0, 1)}
    assert spec.tp_sizes == {"actor_train": 1, "actor_infer": 1}
    assert spec.allow_shrink_to_zero and spec.priority_weight == 2.0


def test_nodes_must_be_alike() -> None:
    assert start._gpus_per_node(["a", "b", "a", "b"]) == 2
    with pytest.raises(Exception, match="must be alike"):
        start._gpus_per_node(["a", "a", "b"])


def test_a_scheduler_that_is_not_there_is_refused() -> None:
    settings = RLixSettings(control_plane=ControlPlaneKind.RLIX)
    with pytest.raises(SettingError, match="rlix.control_plane"):
        start._connect(start.pipeline_spec("p", TOPOLOGY, settings), settings)
