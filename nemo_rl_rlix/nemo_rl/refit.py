"""Release 0.7.0 refits without asking a weight synchronizer; main asks it first."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Refit = Callable[..., Any]


def ask_synchronizer_first(original: Refit) -> Refit:
    """Make the refit of release 0.7.0 behave as main's.

    Symptom: an object set as ``policy_generation.weight_synchronizer`` is ignored and the
    weights are broadcast over NCCL to every worker, sleeping ones included.
    Cause: the release ships the package ``weight_sync`` but nothing of GRPO uses it.

    Args:
        original: ``refit_policy_generation``.

    Returns:
        A function of the same signature. It returns the synchronizer's metrics, or what
        the original returns where there is no synchronizer.
    """

    @functools.wraps(original)
    def refit_policy_generation(
        policy: Any,
        policy_generation: Any,
        colocated_inference: bool,
        _refit_buffer_size_gb: float | None = None,
        timer: Any = None,
        kv_scales: dict[str, float] | None = None,
    ) -> Any:
        # Only this package's generation class has the attribute in this release.
        synchronizer = getattr(policy_generation, "weight_synchronizer", None)
        if synchronizer is not None:
            return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {}
        return original(
            policy,
            policy_generation,
            colocated_inference,
            _refit_buffer_size_gb,
            timer,
            kv_scales,
        )

    return refit_policy_generation
