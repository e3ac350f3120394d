"""How an engine that shares its card is configured. Pure, but for the sizes it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.vllm.accounting import CONTEXT_BYTES, MIB

SETTINGS_KEY = "rlix_shard"
"""Key of a NeMo RL generation config under which :class:`ShardSettings` travel."""

WORKER_CLS = "nemo_rl_rlix.vllm.gpu_worker.ShardGpuWorker"
EXTENSION_CLS = "nemo_rl_rlix.vllm.extension.ShardExtension"

WORKING_BYTES = 2048 * MIB
"""Room for activations, logits and graphs beside weights and KV cache."""

LEAST_KV_BYTES = 64 * MIB
_KWARGS = "policy.generation.vllm_kwargs"


@dataclass(frozen=True)
class ShardSettings:
    """What every worker of a pipeline is told.

    Attributes:
        pipeline_id: Pipeline of the shards.
        sleep_level: Level of a shrink.
        sleeping_budget_bytes: Device memory that a sleeping shard may keep per GPU.
        build_timeout_s: Deadline of a build, the wait for the card's build lock included.
        context_bytes: Assumed size of a CUDA context, where NVML does not tell.
        worker_cls: Worker class of the engine; empty leaves vLLM's choice (on a CPU).
    """

    pipeline_id: str
    sleep_level: int = 2
    sleeping_budget_bytes: int = 1536 * MIB
    build_timeout_s: float = 600.0
    context_bytes: int = CONTEXT_BYTES
    worker_cls: str = WORKER_CLS

    def to_config(self) -> dict[str, Any]:
        """As plain data, for :data:`SETTINGS_KEY`."""
        return asdict(self)

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> ShardSettings:
        """Read them back.

        Raises:
            SettingError: They are not there.
        """
        found = config.get(SETTINGS_KEY)
        if found is None:
            raise SettingError(
                f"policy.generation.{SETTINGS_KEY}",
                None,
                "a worker of a time-shared pipeline does not know its pipeline",
                "Create it through the generation class of this package",
            )
        return cls(**found)


def derive_kv_cache_bytes(
    total_bytes: int, utilization: float, weight_bytes: int, working_bytes: int = WORKING_BYTES
) -> int:
    """Size of the KV cache of each GPU.

    vLLM would measure it, and asserts meanwhile that nobody else frees memory on the
    card; so it is computed from what the recipe allows.

    Args:
        total_bytes: Memory of the card.
        utilization: ``gpu_memory_utilization``.
        weight_bytes: Weights on each GPU.
        working_bytes: Room for everything else.

    Raises:
        SettingError: Nothing is left.
    """
    left = int(total_bytes * utilization) - weight_bytes - working_bytes
    if left < LEAST_KV_BYTES:
        raise SettingError(
            "policy.generation.vllm_cfg.gpu_memory_utilization",
            utilization,
            f"of {total_bytes} bytes, weights take {weight_bytes} and work {working_bytes}:"
            " no room for a KV cache",
            f"Raise it, or set {_KWARGS}.kv_cache_memory_bytes",
        )
    return left


def engine_arguments(
    arguments: Mapping[str, Any],
    settings: ShardSettings,
    *,
    extension_cls: str,
    kv_cache_bytes: int,
) -> dict[str, Any]:
    """Arguments of a time-shared engine from those that it would have otherwise.

    Args:
        arguments: Keyword arguments of ``AsyncEngineArgs``.
        settings: Settings of the shard.
        extension_cls: Worker extension.
        kv_cache_bytes: Size of the KV cache where the recipe does not say.

    Raises:
        SettingError: Sleep mode is off, or a worker class is asked for.
    """
    if not arguments.get("enable_sleep_mode", False) and settings.worker_cls:
        raise SettingError(
            f"{_KWARGS}.enable_sleep_mode",
            arguments.get("enable_sleep_mode"),
            "a shard that cannot sleep cannot give its GPU away",
            "Set it to true, or leave it out",
        )
    given = arguments.get("worker_cls", "auto")
    if given != "auto":
        raise SettingError(
            f"{_KWARGS}.worker_cls",
            given,
            "time sharing needs a worker class of its own",
            "Leave it out, or unset RLIX_CONTROL_PLANE",
        )
    chosen = {**arguments, "worker_extension_cls": extension_cls}
    if settings.worker_cls:
        chosen["worker_cls"] = settings.worker_cls
    else:
        chosen.pop("enable_sleep_mode", None)  # vLLM has none on a CPU
    chosen["kv_cache_memory_bytes"] = arguments.get("kv_cache_memory_bytes") or kv_cache_bytes
    return chosen
