from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.features import (
    ALLOCATOR_VARIABLES,
    EngineFeatures,
    validate_allocator,
    validate_features,
)

GOOD = EngineFeatures()

REFUSED = {
    "LoRA at level 2": ({"lora": True}, "rlix.sleep_level", "LoRA"),
    "partial sync at level 2": ({"partial_weight_sync": True}, "rlix.sleep_level", "only some"),
    "no sleep mode": (
        {"enable_sleep_mode": False},
        "policy.generation.vllm_kwargs.enable_sleep_mode",
        "cannot sleep",
    ),
    "KV offloading": (
        {"kv_offloading_gib": 4.0},
        "policy.generation.vllm_kwargs.kv_offloading_size",
        "outlive a sleep",
    ),
    "KV connector": (
        {"kv_connector": "OffloadingConnector"},
        "policy.generation.vllm_kwargs.kv_transfer_config",
        "outlive a sleep",
    ),
    "fp8 without updates": (
        {"fp8": True},
        "policy.generation.vllm_cfg.precision",
        "previous version",
    ),
    "level 0": ({"sleep_level": 0}, "rlix.sleep_level", "no such level"),
    "level 3": ({"sleep_level": 3}, "rlix.sleep_level", "no such level"),
}


@pytest.mark.parametrize(("change", "setting", "reason"), REFUSED.values(), ids=REFUSED)
def test_refused_features_name_setting_reason_and_remedy(change, setting, reason):
    with pytest.raises(SettingError) as caught:
        validate_features(replace(GOOD, **change))
    assert caught.value.setting == setting
    assert reason in caught.value.reason
    assert len(caught.value.remedy) > 10 or setting == "rlix.sleep_level"
    assert repr(caught.value.value) in str(caught.value)


def test_the_default_is_accepted_without_a_note():
    assert validate_features(GOOD) == ()


@pytest.mark.parametrize("change", [{"lora": True}, {"partial_weight_sync": True}])
def test_level_1_keeps_the_weights_so_that_less_need_be_synced(change):
    notes = validate_features(replace(GOOD, sleep_level=1, **change))
    assert [note for note in notes if "host memory" in note]


def test_fp8_with_an_update_lifecycle_is_accepted_with_a_note():
    notes = validate_features(replace(GOOD, fp8=True, weight_update_lifecycle=True))
    assert [note for note in notes if "fp8" in note]


@pytest.mark.parametrize("variable", ALLOCATOR_VARIABLES)
@pytest.mark.parametrize(
    "value",
    [
        "expandable_segments:True",
        "max_split_size_mb:512,expandable_segments:True",
        "expandable_segments: true , max_split_size_mb:512",
        "expandable_segments:False,expandable_segments:True",
    ],
)
def test_expandable_segments_are_refused_by_the_variable_s_name(variable, value):
    with pytest.raises(SettingError, match=variable) as caught:
        validate_allocator({variable: value, "PATH": "/bin"})
    assert caught.value.setting == variable
    assert caught.value.value == value
    assert f"Unset {variable}" in caught.value.remedy


def test_the_place_of_the_variable_is_named():
    with pytest.raises(SettingError) as caught:
        validate_allocator(
            {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
            where="policy.megatron_cfg.env_vars",
        )
    assert caught.value.setting == "policy.megatron_cfg.env_vars.PYTORCH_CUDA_ALLOC_CONF"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"PYTORCH_CUDA_ALLOC_CONF": ""},
        {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"},
        {"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"},
        {"OTHER": "expandable_segments:True"},
    ],
)
def test_other_allocator_settings_are_accepted(environment):
    validate_allocator(environment)
