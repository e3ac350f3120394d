"""What a recipe must be for its run to be time-shared, as a function over plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.features import EngineFeatures, validate_allocator, validate_features
from nemo_rl_rlix.settings import RLixSettings

UNSET = object()

REQUIRED: tuple[tuple[str, object, object, str], ...] = (
    (
        "grpo.async_grpo.enabled",
        True,
        False,
        "generation of a synchronous run stands still while it trains, so there is nothing to share",
    ),
    ("policy.generation.backend", "vllm", None, "only vLLM engines can be put to sleep one by one"),
    (
        "policy.generation.vllm_cfg.async_engine",
        True,
        False,
        "requests are aborted and dispatched again one by one",
    ),
    (
        "policy.generation.vllm_cfg.expose_http_server",
        False,
        False,
        "requests over HTTP reach an engine past the gate that a sleeping shard has closed",
    ),
    (
        "policy.generation.colocated.enabled",
        False,
        False,
        "the scheduler decides which GPUs training and inference have in common",
    ),
    ("policy.megatron_cfg.enabled", True, False, "only Megatron trainers can leave their GPUs"),
    ("data_plane.enabled", False, False, "trajectories reach the trainer by the replay buffer"),
    (
        "policy.generation.refit_transport",
        None,
        None,
        "weights reach each shard when it is woken, by a transport of this package",
    ),
    (
        "env.should_use_nemo_gym",
        False,
        False,
        "its requests reach the engines over HTTP, past the router that dispatches them again",
    ),
)
"""``(setting, needed, value when left out, why)``."""


def lookup(recipe: Mapping[str, Any], setting: str, default: Any = UNSET) -> Any:
    """The value of a dotted setting, ``default`` where a part of the way is missing."""
    value: Any = recipe
    for part in setting.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return default
        value = value[part]
    return value


def check_recipe(recipe: Mapping[str, Any], environment: Mapping[str, str]) -> RLixSettings:
    """Refuse a recipe that cannot be time-shared, before any GPU is used.

    Args:
        recipe: The whole recipe as plain data, ``rlix:`` block included.
        environment: Variables of the driver; its workers inherit them.

    Returns:
        The ``rlix:`` block.

    Raises:
        SettingError: Names the first setting that cannot be, and what to write.
    """
    for setting, needed, left_out, why in REQUIRED:
        value = lookup(recipe, setting, left_out)
        # NeMo RL takes switches by truth: null is off.
        if (bool(value) if isinstance(needed, bool) else value) != needed:
            raise SettingError(
                setting,
                value,
                f"time sharing needs {needed!r}: {why}",
                "Change it, or unset RLIX_CONTROL_PLANE",
            )
    settings = RLixSettings.from_recipe(lookup(recipe, "rlix", None))
    generation: Mapping[str, Any] = recipe["policy"]["generation"]
    validate_features(engine_features(generation, settings))
    validate_allocator(environment)
    for where in ("policy.megatron_cfg.env_vars", "policy.generation.vllm_cfg.env_vars"):
        variables = lookup(recipe, where, None) or {}
        validate_allocator({str(k): str(v) for k, v in variables.items()}, where=where)
    return settings


def engine_features(generation: Mapping[str, Any], settings: RLixSettings) -> EngineFeatures:
    """What ``policy.generation`` asks of the engines."""
    kwargs: Mapping[str, Any] = generation.get("vllm_kwargs") or {}
    cfg: Mapping[str, Any] = generation.get("vllm_cfg") or {}
    transfer = kwargs.get("kv_transfer_config")
    connector = transfer.get("kv_connector") if isinstance(transfer, Mapping) else transfer
    fp8 = "fp8" in str(cfg.get("precision", "")) or str(cfg.get("kv_cache_dtype", "")).startswith(
        "fp8"
    )
    return EngineFeatures(
        sleep_level=settings.sleep_level,
        enable_sleep_mode=bool(kwargs.get("enable_sleep_mode", True)),
        lora=bool(kwargs.get("enable_lora", False)),
        kv_offloading_gib=float(kwargs.get("kv_offloading_size") or 0.0),
        kv_connector=None if connector is None else str(connector),
        fp8=fp8,
    )
