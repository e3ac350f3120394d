"""What of Megatron cannot be time-shared. Pure: looks at plain values only."""

from __future__ import annotations

from collections.abc import Mapping

from nemo_rl_rlix.errors import SettingError

_OFF = (None, False, "none", "")

_REFUSED: Mapping[str, tuple[str, str]] = {
    "tp_comm_overlap": (
        "the user buffers of Transformer Engine stay on the device and keep the groups that "
        "they were made with",
        "Set it to false",
    ),
    "nccl_ub": (
        "buffers that are registered with NCCL are lost with their communicator",
        "Set it to false",
    ),
    "cuda_graph_impl": (
        "captured collectives refer to communicators that are destroyed between steps",
        "Set it to none",
    ),
    "enable_cuda_graph": (
        "captured collectives refer to communicators that are destroyed between steps",
        "Set it to false",
    ),
    "external_cuda_graph": (
        "captured collectives refer to communicators that are destroyed between steps",
        "Set it to false",
    ),
    "use_megatron_fsdp": (
        "its parameters live in buffers that have not been tried with the offload",
        "Use the distributed optimizer",
    ),
}


def refuse_unsupported(*configs: Mapping[str, object]) -> None:
    """Refuse a trainer whose memory or communicators cannot be given up and taken back.

    Args:
        configs: Names and values of the model's and the data parallelism's settings.

    Raises:
        SettingError: Names the first setting, the reason and what to do.
    """
    for config in configs:
        for name, (reason, remedy) in _REFUSED.items():
            value = config.get(name)
            if value not in _OFF:
                raise SettingError(f"policy.megatron_cfg.{name}", value, reason, remedy)
