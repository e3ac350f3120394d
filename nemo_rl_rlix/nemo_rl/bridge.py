"""From an unchanged recipe to a shared run: which GPUs, and what NeMo RL is told. Pure.

NeMo RL counts training and inference GPUs apart: it subtracts the inference GPUs from
those of the cluster and trains on the rest. Here both are on the same cards, so that
its setup is shown a cluster that has the two sums, and gets views of the real one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl.recipe import lookup
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.topology import (
    INFER_MAPPING,
    INFER_PP,
    INFER_TP,
    TRAIN_CP,
    TRAIN_EP,
    TRAIN_ETP,
    TRAIN_MAPPING,
    TRAIN_PP,
    TRAIN_TP,
    Parallelism,
    Topology,
    validate_topology,
)

NODES = "cluster.num_nodes"
GPUS = "cluster.gpus_per_node"
INFER_NODES = "policy.generation.colocated.resources.num_nodes"
INFER_GPUS = "policy.generation.colocated.resources.gpus_per_node"
IN_FLIGHT = "grpo.async_grpo.in_flight_weight_updates"
RECOMPUTE = "grpo.async_grpo.recompute_kv_cache_after_weight_updates"

PORT_SLICES = 16
LEAST_PORTS = 16
"""Ports of a slice below which a range is not divided."""


@dataclass(frozen=True)
class SharePlan:
    """How a recipe is run time-shared.

    Attributes:
        topology: Its GPUs, validated.
        lasting: Dotted setting -> value that holds for the whole run.
        during_setup: Dotted setting -> value that NeMo RL's setup is shown.
        notices: What the user is told about both.
        demand_estimate: Trajectories that are wanted at the start.
        validation_samples: Trajectories of one validation.
        clear_cache_on_refresh: Whether an update in place drops running KV caches.
    """

    topology: Topology
    lasting: dict[str, Any] = field(default_factory=dict)
    during_setup: dict[str, Any] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    demand_estimate: int = 1
    validation_samples: int = 1
    clear_cache_on_refresh: bool = False


def plan_share(
    recipe: Mapping[str, Any], settings: RLixSettings, *, num_gpus: int, gpus_per_node: int
) -> SharePlan:
    """Plan the run of a recipe that :func:`~.recipe.check_recipe` accepts.

    Args:
        recipe: The whole recipe as plain data.
        settings: Its ``rlix:`` block.
        num_gpus: GPUs of the Ray cluster.
        gpus_per_node: GPUs of each of its nodes.

    Raises:
        SettingError: Names the setting that cannot be, and what to write.
    """
    _refuse_what_takes_gpus_aside(recipe)
    train, infer = derive_mappings(recipe, settings)
    topology = validate_topology(
        train_device_mapping=train,
        infer_device_mapping=infer,
        infer_tp=int(lookup(recipe, INFER_TP, 1)),
        infer_pp=int(lookup(recipe, INFER_PP, 1)),
        num_gpus=num_gpus,
        gpus_per_node=gpus_per_node,
        parallelism=_parallelism(recipe),
        allow_shrink_to_zero=settings.allow_shrink_to_zero,
    )
    lasting: dict[str, Any] = {}
    notices = [
        f"trains on GPUs {list(topology.train_gpus)}, generates on"
        f" {list(topology.inference.device_mapping)}"
        f" ({topology.inference.num_shards} shards of {topology.inference.gpus_per_shard})",
        "engines run in sleep mode",
    ]
    if not lookup(recipe, IN_FLIGHT, False):
        lasting[IN_FLIGHT] = True
        notices.append(f"{IN_FLIGHT} is now true: else every update would wait for all rollouts")
    per_step = int(lookup(recipe, "grpo.num_prompts_per_step", 1)) * int(
        lookup(recipe, "grpo.num_generations_per_prompt", 1)
    )
    age = int(lookup(recipe, "grpo.async_grpo.max_trajectory_age_steps", 1))
    return SharePlan(
        topology=topology,
        lasting=lasting,
        during_setup=shown_cluster(recipe, len(topology.train_gpus), len(infer)),
        notices=tuple(notices),
        demand_estimate=per_step * (1 + age),
        validation_samples=max(
            1,
            int(lookup(recipe, "grpo.max_val_samples", None) or 1)
            * int(lookup(recipe, "grpo.val_num_generations_per_prompt", 1)),
        ),
        clear_cache_on_refresh=bool(lookup(recipe, RECOMPUTE, False)),
    )


def derive_mappings(
    recipe: Mapping[str, Any], settings: RLixSettings
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Logical GPU ids of trainer and inference.

    The trainer keeps the number of GPUs that the recipe gives it. Inference gets every
    GPU of the recipe, since it may use those of the trainer while this one does not.

    Args:
        recipe: The recipe as plain data.
        settings: Its ``rlix:`` block; a mapping given there is taken as it is.

    Returns:
        ``(train, infer)``, ascending.

    Raises:
        SettingError: The recipe leaves none for one of them.
    """
    nodes, per_node = int(lookup(recipe, NODES, 1)), int(lookup(recipe, GPUS, 1))
    infer_nodes = lookup(recipe, INFER_NODES, None)
    infer_per_node = lookup(recipe, INFER_GPUS, None)
    if nodes == 1:
        num_infer, setting, value = int(infer_per_node or 0), INFER_GPUS, infer_per_node
    else:
        num_infer, setting, value = int(infer_nodes or 0) * per_node, INFER_NODES, infer_nodes
    total = nodes * per_node
    explicit = settings.train_device_mapping, settings.infer_device_mapping
    if None in explicit and not 0 < num_infer < total:
        raise SettingError(
            setting,
            value,
            f"of the {total} GPUs of {NODES} x {GPUS} it leaves none for inference or none for"
            " training",
            f"Give a number in between, or {TRAIN_MAPPING} and {INFER_MAPPING}",
        )
    num_train = total - num_infer
    shard = int(lookup(recipe, INFER_TP, 1)) * int(lookup(recipe, INFER_PP, 1))
    usable = total - total % shard if shard > 0 else total
    train = settings.train_device_mapping or tuple(range(num_train))
    infer = settings.infer_device_mapping or tuple(range(max(usable, num_infer)))
    return tuple(sorted(train)), tuple(sorted(infer))


def shown_cluster(recipe: Mapping[str, Any], num_train: int, num_infer: int) -> dict[str, Any]:
    """Cluster settings with which NeMo RL comes to these two numbers.

    Raises:
        SettingError: On several nodes it counts in whole nodes.
    """
    nodes, per_node = int(lookup(recipe, NODES, 1)), int(lookup(recipe, GPUS, 1))
    if nodes == 1:
        return {GPUS: num_train + num_infer, INFER_GPUS: num_infer}
    for setting, count in ((TRAIN_MAPPING, num_train), (INFER_MAPPING, num_infer)):
        if count % per_node:
            raise SettingError(
                setting,
                count,
                f"with {NODES}={nodes} NeMo RL trains and infers on whole nodes of {per_node} GPUs",
                f"Give a multiple of {per_node} GPUs",
            )
    return {
        NODES: (num_train + num_infer) // per_node,
        INFER_NODES: num_infer // per_node,
        INFER_GPUS: per_node,
    }


def port_slice(pipeline_id: str, low: int, high: int) -> tuple[int, int]:
    """The part of a port range in which a pipeline looks for free ones.

    Two pipelines that look at the same moment would else find the same port.

    Args:
        pipeline_id: The pipeline.
        low: First port of the range.
        high: The port after its last.
    """
    width = (high - low) // PORT_SLICES
    if width < LEAST_PORTS:
        return low, high
    index = hashlib.sha256(pipeline_id.encode()).digest()[0] % PORT_SLICES
    return low + index * width, low + (index + 1) * width


def _parallelism(recipe: Mapping[str, Any]) -> Parallelism:
    def size(setting: str) -> int:
        return int(lookup(recipe, setting, 1) or 1)

    etp = lookup(recipe, TRAIN_ETP, None)
    return Parallelism(
        tp=size(TRAIN_TP),
        pp=size(TRAIN_PP),
        cp=size(TRAIN_CP),
        ep=size(TRAIN_EP),
        etp=None if etp is None else int(etp),
    )


def _refuse_what_takes_gpus_aside(recipe: Mapping[str, Any]) -> None:
    """Roles that take GPUs of the cluster without asking the scheduler."""
    remedy = "Remove it, or unset RLIX_CONTROL_PLANE"
    segment = lookup(recipe, "cluster.segment_size", None)
    if segment is not None:
        raise SettingError(
            "cluster.segment_size",
            segment,
            "placement groups are shared by pipelines and not laid out for one of them",
            remedy,
        )
    teachers = "on_policy_distillation.non_colocated_teachers.enabled"
    if lookup(recipe, "on_policy_distillation.enabled", False) and lookup(recipe, teachers, False):
        raise SettingError(teachers, True, "teachers would hold GPUs for themselves", remedy)
    if "reward_model" in _values_of(lookup(recipe, "data", {}), "env_name"):
        raise SettingError(
            "data.*.env_name",
            "reward_model",
            "the reward model would hold GPUs for itself",
            remedy,
        )


def _values_of(data: Any, key: str) -> Iterator[Any]:
    """Every value of ``key`` at any depth."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            if name == key:
                yield value
            yield from _values_of(value, key)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from _values_of(value, key)
