"""What NeMo RL calls to refit, in a time-shared run: the weight hand-over."""

from __future__ import annotations

import time
from typing import Any

from nemo_rl.weight_sync.interfaces import WeightSynchronizer

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl.session import Session


class TimeSharingSynchronizer(WeightSynchronizer):
    """Ends a training step: weights to the cache, GPUs back, serving shards updated.

    Args:
        session: The run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def sync_weights(
        self, *, timer: Any = None, kv_scales: dict[str, float] | None = None
    ) -> dict[str, float]:
        """Hand the weights over. The first call waits for one shard and sends nothing.

        Args:
            timer: NeMo RL's timer; its own timing of the refit is enough.
            kv_scales: Must be ``None``.

        Returns:
            Figures for NeMo RL's logger.

        Raises:
            GrantRequiredError: Nothing has been trained since the last call.
            SettingError: The KV cache has scales.
        """
        if kv_scales is not None:
            raise SettingError(
                "policy.generation.vllm_cfg.kv_cache_dtype",
                "fp8",
                "scales of a KV cache do not reach shards that sleep",
                "Use auto",
            )
        started = time.monotonic()
        if not self._session.generating:
            self._session.start_generation()
        else:
            self._session.after_training()
        return {
            "rlix_seconds": time.monotonic() - started,
            "rlix_weights_version": float(self._session.step),
        }

    @property
    def is_stale(self) -> bool:
        """True until the first call, so that both versions make it."""
        return not self._session.generating

    def mark_stale(self) -> None:
        """Nothing: the training loop keeps account itself."""

    def init_communicator(self) -> None:
        """Nothing: each transfer brings what it needs."""

    def shutdown(self) -> None:
        """Leave the scheduler; the workers may end afterwards."""
        self._session.leave()
