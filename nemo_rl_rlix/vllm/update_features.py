"""Which engines can be updated at all: features refused by name. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_rl_rlix.errors import SettingError

_KWARGS = "policy.generation.vllm_kwargs"


@dataclass(frozen=True)
class UpdateFacts:
    """What an engine's worker has found about its model.

    Attributes:
        quantization: Quantisation of the weights, empty for none.
        kv_cache_dtype: Data type of the KV cache.
        draft_method: Method of speculative decoding, empty for none.
        draft_has_weights: Whether a draft model lies beside the main one.
        draft_from_disk: Whether the draft model's weights came from disk, once.
        lifecycle: Whether the worker has NeMo RL's weight-update lifecycle.
    """

    quantization: str = ""
    kv_cache_dtype: str = "auto"
    draft_method: str = ""
    draft_has_weights: bool = False
    draft_from_disk: bool = False
    lifecycle: bool = False


def refuse_unsupported(facts: UpdateFacts, sleep_level: int) -> None:
    """Refuse a model that a sync would leave half updated.

    Args:
        facts: What the worker found.
        sleep_level: 2 discards every weight.

    Raises:
        SettingError: Names the setting and what to write instead.
    """
    if facts.quantization and not facts.lifecycle:
        raise SettingError(
            "policy.generation.vllm_cfg.precision",
            facts.quantization,
            "quantised weights and their scales have to be made anew after an update,"
            " and this engine has no weight-update lifecycle",
            "Use bfloat16, or the worker extension of a NeMo RL that has one",
        )
    if "fp8" in facts.kv_cache_dtype and not facts.lifecycle:
        raise SettingError(
            "policy.generation.vllm_cfg.kv_cache_dtype",
            facts.kv_cache_dtype,
            "scales of the KV cache follow the weights, and this engine has no"
            " weight-update lifecycle",
            "Write auto",
        )
    if facts.draft_has_weights and not facts.lifecycle:
        raise SettingError(
            f"{_KWARGS}.speculative_config.method",
            facts.draft_method,
            "the draft model would keep the weights of the start",
            "Leave speculative_config out, or use a NeMo RL with a weight-update lifecycle",
        )
    if facts.draft_from_disk and sleep_level > 1:
        raise SettingError(
            f"{_KWARGS}.speculative_config.method",
            facts.draft_method,
            "the draft model was read from disk once; level 2 discards it and no sync"
            " brings it back",
            "Set rlix.sleep_level=1, or train the draft layers with the policy",
        )
