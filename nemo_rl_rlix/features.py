"""Engine features that do not go together with sleeping, refused before anything starts.

Each rule stands for a public report of an engine that crashed, kept its memory or
served wrong weights after a sleep.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_rl_rlix.errors import SettingError

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Variables that configure torch's allocator; the second is the older name."""

_KWARGS = "policy.generation.vllm_kwargs"


@dataclass(frozen=True)
class EngineFeatures:
    """What a pipeline asks of its inference engines.

    Attributes:
        sleep_level: 1 keeps the weights in host memory, 2 discards them.
        enable_sleep_mode: Whether the engine allocates memory that it can unmap.
        lora: Whether the engine serves LoRA adapters. Adapters that the trainer
            merges into the full weights at export are not meant.
        partial_weight_sync: Whether a sync brings only some of the tensors.
        kv_offloading_gib: Host memory for offloaded KV blocks, GiB; 0 for none.
        kv_connector: Name of a KV connector, ``None`` for none.
        fp8: Whether weights or KV cache are quantised to fp8.
        weight_update_lifecycle: Whether the engine's worker marks the start and the
            end of an update, so that quantised weights and scales are made anew.
    """

    sleep_level: int = 2
    enable_sleep_mode: bool = True
    lora: bool = False
    partial_weight_sync: bool = False
    kv_offloading_gib: float = 0.0
    kv_connector: str | None = None
    fp8: bool = False
    weight_update_lifecycle: bool = False


def validate_features(features: EngineFeatures) -> tuple[str, ...]:
    """Refuse features that cannot be combined with time sharing.

    Args:
        features: What the recipe asks for.

    Returns:
        Notes for the log: accepted, but worth knowing.

    Raises:
        SettingError: Names the setting and what to write instead.
    """
    if features.sleep_level not in (1, 2):
        raise SettingError(
            "rlix.sleep_level", features.sleep_level, "no such level", "Write 1 or 2"
        )
    if not features.enable_sleep_mode:
        raise SettingError(
            f"{_KWARGS}.enable_sleep_mode",
            False,
            "a shard that cannot sleep cannot give its GPU away",
            "Set it to true, or leave it out",
        )
    _refuse_incomplete_weights(features)
    _refuse_kv_offloading(features)
    if features.fp8 and not features.weight_update_lifecycle:
        raise SettingError(
            "policy.generation.vllm_cfg.precision",
            "fp8",
            "this engine does not announce weight updates, so its quantised weights and"
            " scales would be those of the previous version",
            "Use bfloat16, or an engine whose worker has a weight-update lifecycle",
        )
    return _notes(features)


def validate_allocator(environment: Mapping[str, str], *, where: str = "") -> None:
    """Refuse an allocator whose memory a sleep does not give back.

    With expandable segments the engine's memory pool is not used, and a sleep
    "succeeds" without freeing anything (pytorch/pytorch#147851).

    Args:
        environment: Variables of the process that holds the memory.
        where: Dotted place the variables come from, e.g.
            ``policy.megatron_cfg.env_vars``; empty for the process environment.

    Raises:
        SettingError: Names the variable.
    """
    for variable in ALLOCATOR_VARIABLES:
        value = environment.get(variable, "")
        if "expandable_segments:true" in "".join(value.split()).lower():
            raise SettingError(
                f"{where}.{variable}" if where else variable,
                value,
                "expandable segments keep device memory that a sleeping process must give back",
                f"Unset {variable}, or write expandable_segments:False",
            )


def _refuse_incomplete_weights(features: EngineFeatures) -> None:
    """Level 2 discards every weight, so that only a complete sync brings a shard back."""
    if features.sleep_level < 2:
        return
    if features.lora:
        raise SettingError(
            "rlix.sleep_level",
            features.sleep_level,
            f"level 2 discards LoRA adapters with the weights ({_KWARGS}.enable_lora=true)"
            " and a sync does not bring them back",
            "Set rlix.sleep_level=1, or merge the adapters into the weights at export",
        )
    if features.partial_weight_sync:
        raise SettingError(
            "rlix.sleep_level",
            features.sleep_level,
            "level 2 discards every weight and this run syncs only some of them",
            "Set rlix.sleep_level=1, or sync the full set of weights",
        )


def _refuse_kv_offloading(features: EngineFeatures) -> None:
    reason = "KV blocks outside the engine outlive a sleep and a change of weights"
    if features.kv_offloading_gib:
        raise SettingError(
            f"{_KWARGS}.kv_offloading_size",
            features.kv_offloading_gib,
            reason,
            "Leave it out; a preempted request resumes from its tokens",
        )
    if features.kv_connector is not None:
        raise SettingError(
            f"{_KWARGS}.kv_transfer_config",
            features.kv_connector,
            reason,
            "Leave the connector out; a preempted request resumes from its tokens",
        )


def _notes(features: EngineFeatures) -> tuple[str, ...]:
    notes = []
    if features.sleep_level == 1:
        notes.append(
            "rlix.sleep_level=1: each sleeping shard keeps its weights in host memory, beside"
            " the weight cache, and its first sleep is much slower than the later ones"
        )
    if features.fp8:
        notes.append(
            "policy.generation.vllm_cfg.precision=fp8: weights are quantised again at the end"
            " of every sync, which the time of a switch includes"
        )
    return tuple(notes)
