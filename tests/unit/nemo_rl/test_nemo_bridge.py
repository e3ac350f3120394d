"""From recipes to GPU ids and to the cluster that NeMo RL's setup is shown."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl.bridge import (
    GPUS,
    IN_FLIGHT,
    INFER_GPUS,
    INFER_NODES,
    NODES,
    derive_mappings,
    plan_share,
    port_slice,
    shown_cluster,
)
from nemo_rl_rlix.settings import RLixSettings


def recipe(
    nodes: int = 1,
    gpus: int = 2,
    infer_gpus: int | None = 1,
    infer_nodes: int | None = None,
    tp: int = 1,
    **more: Any,
) -> dict[str, Any]:
    return {
        "cluster": {"num_nodes": nodes, "gpus_per_node": gpus},
        "policy": {
            "megatron_cfg": {"tensor_model_parallel_size": 1},
            "generation": {
                "vllm_cfg": {"tensor_parallel_size": tp, "pipeline_parallel_size": 1},
                "colocated": {"resources": {"gpus_per_node": infer_gpus, "num_nodes": infer_nodes}},
            },
        },
        "grpo": {
            "num_prompts_per_step": 4,
            "num_generations_per_prompt": 2,
            "async_grpo": {"max_trajectory_age_steps": 2},
            "max_val_samples": 6,
        },
        **more,
    }


@pytest.mark.parametrize(
    ("given_recipe", "train", "infer"),
    [
        (recipe(), (0,), (0, 1)),
        (recipe(gpus=8, infer_gpus=4), (0, 1, 2, 3), tuple(range(8))),
        (recipe(gpus=8, infer_gpus=6, tp=2), (0, 1), tuple(range(8))),
        # Three GPUs are no two shards of two: one is left to the trainer alone.
        (recipe(gpus=5, infer_gpus=4, tp=2), (0,), (0, 1, 2, 3)),
        (
            recipe(nodes=2, gpus=8, infer_gpus=8, infer_nodes=1),
            tuple(range(8)),
            tuple(range(16)),
        ),
    ],
)
def test_inference_gets_every_gpu_of_the_recipe(
    given_recipe: dict[str, Any], train: tuple[int, ...], infer: tuple[int, ...]
) -> None:
    assert derive_mappings(given_recipe, RLixSettings()) == (train, infer)


def test_mappings_of_the_block_are_taken_as_they_are() -> None:
    settings = RLixSettings(train_device_mapping=(3,), infer_device_mapping=(3, 1, 2))
    assert derive_mappings(recipe(infer_gpus=None), settings) == ((3,), (1, 2, 3))


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        (recipe(infer_gpus=None), INFER_GPUS),
        (recipe(infer_gpus=2), INFER_GPUS),
        (recipe(nodes=2, gpus=4, infer_gpus=4, infer_nodes=2), INFER_NODES),
    ],
)
def test_a_recipe_that_leaves_nothing_is_refused(wrong: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError) as caught:
        derive_mappings(wrong, RLixSettings())
    assert caught.value.setting == setting


def nemo_sizes(recipe: dict[str, Any], shown: dict[str, Any]) -> tuple[int, int]:
    """``(train, infer)`` GPUs by NeMo RL's arithmetic."""
    resources = recipe["policy"]["generation"]["colocated"]["resources"]
    nodes = shown.get(NODES, recipe["cluster"]["num_nodes"])
    per_node = shown.get(GPUS, recipe["cluster"]["gpus_per_node"])
    infer_per_node = shown.get(INFER_GPUS, resources["gpus_per_node"])
    infer_nodes = shown.get(INFER_NODES, resources["num_nodes"])
    if nodes == 1:
        assert infer_nodes in (None, 1)
        return per_node - infer_per_node, infer_per_node
    assert infer_per_node == per_node and infer_nodes > 0
    return (nodes - infer_nodes) * per_node, infer_nodes * per_node


@given(
    nodes=st.integers(1, 4),
    per_node=st.integers(1, 8),
    train=st.integers(1, 4),
    infer=st.integers(1, 4),
)
def test_nemo_rl_comes_to_the_numbers_that_are_meant(
    nodes: int, per_node: int, train: int, infer: int
) -> None:
    factor = 1 if nodes == 1 else per_node
    given_recipe = recipe(nodes=nodes, gpus=per_node, infer_nodes=1)
    shown = shown_cluster(given_recipe, train * factor, infer * factor)
    assert nemo_sizes(given_recipe, shown) == (train * factor, infer * factor)


def test_half_a_node_of_several_is_refused() -> None:
    with pytest.raises(SettingError, match="whole nodes of 8"):
        shown_cluster(recipe(nodes=2, gpus=8), 4, 16)


def test_a_plan_says_what_it_changes() -> None:
    plan = plan_share(recipe(), RLixSettings(), num_gpus=2, gpus_per_node=2)
    assert plan.lasting == {IN_FLIGHT: True}
    assert plan.during_setup == {GPUS: 3, INFER_GPUS: 2}
    assert any(IN_FLIGHT in notice for notice in plan.notices)
    assert any("sleep mode" in notice for notice in plan.notices)
    # Eight a step, for this step and the two that may be ahead.
    assert plan.demand_estimate == 24
    assert plan.validation_samples == 6
    assert plan.topology.free_shards == (1,)


def test_in_flight_updates_are_left_alone_when_set() -> None:
    given_recipe = recipe()
    given_recipe["grpo"]["async_grpo"]["in_flight_weight_updates"] = True
    plan = plan_share(given_recipe, RLixSettings(), num_gpus=2, gpus_per_node=2)
    assert plan.lasting == {}


def test_a_cluster_that_is_too_small_is_refused() -> None:
    with pytest.raises(SettingError, match="the cluster has 4 GPUs"):
        plan_share(recipe(gpus=8, infer_gpus=4), RLixSettings(), num_gpus=4, gpus_per_node=4)


@pytest.mark.parametrize(
    ("more", "setting"),
    [
        ({"data": {"train": [{"env_name": "reward_model"}]}}, "data.*.env_name"),
        ({"data": {"default": {"env_name": "reward_model"}}}, "data.*.env_name"),
        (
            {
                "on_policy_distillation": {
                    "enabled": True,
                    "non_colocated_teachers": {"enabled": True},
                }
            },
            "on_policy_distillation.non_colocated_teachers.enabled",
        ),
    ],
)
def test_roles_that_take_gpus_aside_are_refused(more: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError) as caught:
        plan_share(recipe(**more), RLixSettings(), num_gpus=2, gpus_per_node=2)
    assert caught.value.setting == setting


def test_segments_are_refused() -> None:
    given_recipe = recipe()
    given_recipe["cluster"]["segment_size"] = 2
    with pytest.raises(SettingError, match="segment_size"):
        plan_share(given_recipe, RLixSettings(), num_gpus=2, gpus_per_node=2)


@given(name=st.text(min_size=1), low=st.integers(1024, 40000), width=st.integers(1, 5000))
def test_a_port_slice_lies_in_its_range(name: str, low: int, width: int) -> None:
    first, end = port_slice(name, low, low + width)
    assert low <= first < end <= low + width
    assert end - first >= min(width, 16)


def test_pipelines_look_for_ports_in_different_places() -> None:
    slices = {port_slice(f"pipeline_{i}", 25000, 28000) for i in range(64)}
    assert len(slices) == 16
    assert port_slice("a", 25000, 28000) == port_slice("a", 25000, 28000)
