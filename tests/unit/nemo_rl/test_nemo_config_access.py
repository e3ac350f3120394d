"""Settings are changed and put back in models and in dictionaries alike."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from pydantic import BaseModel

from nemo_rl_rlix.nemo_rl.config_access import assign, changed, plain, restore

SETTING = "grpo.async_grpo.in_flight_weight_updates"


class AsyncGrpo(BaseModel, extra="allow"):
    in_flight_weight_updates: bool = False


class Grpo(BaseModel, extra="allow"):
    async_grpo: AsyncGrpo = AsyncGrpo()


class OfModels(BaseModel, extra="allow"):
    """As NeMo RL's main has it."""

    grpo: Grpo = Grpo()
    cluster: dict[str, Any] = {"gpus_per_node": 2}


class OfDicts(BaseModel, extra="allow"):
    """As release 0.7.0 has it."""

    grpo: dict[str, Any] = {"async_grpo": {}}
    cluster: dict[str, Any] = {"gpus_per_node": 2}


@pytest.fixture(params=[OfModels, OfDicts])
def config(request: pytest.FixtureRequest) -> Any:
    return copy.deepcopy(request.param(rlix={"sleep_level": 1}))


def test_unknown_blocks_are_seen(config: Any) -> None:
    assert plain(config)["rlix"] == {"sleep_level": 1}


def test_a_change_is_seen_and_undone(config: Any) -> None:
    original = plain(config)
    before = assign(config, {SETTING: True, "cluster.gpus_per_node": 3})
    after = plain(config)
    assert after["grpo"]["async_grpo"]["in_flight_weight_updates"] is True
    assert after["cluster"]["gpus_per_node"] == 3
    restore(config, before)
    assert plain(config) == original


def test_a_change_is_undone_after_an_error(config: Any) -> None:
    original = plain(config)
    with pytest.raises(RuntimeError), changed(config, {"cluster.gpus_per_node": 3}):
        assert plain(config)["cluster"]["gpus_per_node"] == 3
        raise RuntimeError
    assert plain(config) == original
