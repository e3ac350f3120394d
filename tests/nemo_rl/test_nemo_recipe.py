"""Recipes that cannot be time-shared are refused before anything is built."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl.recipe import UNSET, check_recipe, lookup

RECIPE: dict[str, Any] = {
    "grpo": {"async_grpo": {"enabled": True}},
    "policy": {
        "megatron_cfg": {"enabled": True, "env_vars": {}},
        "generation": {
            "backend": "vllm",
            "colocated": {"enabled": False},
            "vllm_cfg": {"async_engine": True, "precision": "bfloat16"},
            "vllm_kwargs": {},
        },
    },
    "env": {"math": {}},
    "data_plane": None,
}


def changed(setting: str, value: object) -> dict[str, Any]:
    recipe = copy.deepcopy(RECIPE)
    *way, last = setting.split(".")
    place = recipe
    for part in way:
        if not isinstance(place.get(part), dict):
            place[part] = {}
        place = place[part]
    if value is UNSET:
        del place[last]
    else:
        place[last] = value
    return recipe


def test_an_ordinary_recipe_passes() -> None:
    settings = check_recipe(RECIPE, {})
    assert settings.sleep_level == 2


def test_the_rlix_block_is_read() -> None:
    assert check_recipe(changed("rlix", {"sleep_level": 1}), {}).sleep_level == 1


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("grpo.async_grpo.enabled", False),
        ("grpo.async_grpo.enabled", UNSET),
        ("policy.generation.backend", "sglang"),
        ("policy.generation.backend", UNSET),
        ("policy.generation.vllm_cfg.async_engine", False),
        ("policy.generation.vllm_cfg.async_engine", UNSET),
        ("policy.generation.vllm_cfg.expose_http_server", True),
        ("policy.generation.colocated.enabled", True),
        ("policy.megatron_cfg.enabled", False),
        ("data_plane.enabled", True),
        ("policy.generation.refit_transport", "nccl_reshard"),
        ("env.should_use_nemo_gym", True),
    ],
)
def test_what_time_sharing_needs(setting: str, value: object) -> None:
    with pytest.raises(SettingError, match="time sharing needs") as caught:
        check_recipe(changed(setting, value), {})
    assert caught.value.setting == setting
    assert "RLIX_CONTROL_PLANE" in caught.value.remedy


@pytest.mark.parametrize(
    ("setting", "value", "named"),
    [
        ("policy.generation.vllm_kwargs.enable_lora", True, "rlix.sleep_level"),
        (
            "policy.generation.vllm_kwargs.kv_offloading_size",
            4,
            "policy.generation.vllm_kwargs.kv_offloading_size",
        ),
        (
            "policy.generation.vllm_kwargs.kv_transfer_config",
            {"kv_connector": "LMCache"},
            "policy.generation.vllm_kwargs.kv_transfer_config",
        ),
        (
            "policy.generation.vllm_kwargs.enable_sleep_mode",
            False,
            "policy.generation.vllm_kwargs.enable_sleep_mode",
        ),
        (
            "policy.generation.vllm_cfg.precision",
            "fp8",
            "policy.generation.vllm_cfg.precision",
        ),
        (
            "policy.generation.vllm_cfg.kv_cache_dtype",
            "fp8_e4m3",
            "policy.generation.vllm_cfg.precision",
        ),
        (
            "policy.megatron_cfg.env_vars",
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            "policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF",
        ),
        ("rlix", {"slep_level": 1}, "rlix.slep_level"),
    ],
)
def test_features_and_the_block_are_refused_by_name(
    setting: str, value: object, named: str
) -> None:
    with pytest.raises(SettingError) as caught:
        check_recipe(changed(setting, value), {})
    assert caught.value.setting == named


def test_the_allocator_of_the_driver_is_inherited() -> None:
    with pytest.raises(SettingError) as caught:
        check_recipe(RECIPE, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
    assert caught.value.setting == "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize("value", [None, 0, False])
def test_switches_are_taken_by_truth(value: object) -> None:
    check_recipe(changed("env.should_use_nemo_gym", value), {})


def test_lookup_stops_where_the_way_ends() -> None:
    assert lookup({"a": None}, "a.b", 3) == 3
    assert lookup({"a": {"b": None}}, "a.b", 3) is None
    assert lookup({}, "a") is UNSET
