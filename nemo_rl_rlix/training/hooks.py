"""The hooks of a time-shared run: one training step between two grants."""

from __future__ import annotations

import logging
import time
from typing import Protocol

from nemo_rl_rlix.control_plane.protocol import (
    TRAIN_CLUSTER,
    ControlPlane,
    Priority,
    ProgressReport,
)
from nemo_rl_rlix.errors import GrantRequiredError
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.shards.protocol import ResizeReport
from nemo_rl_rlix.training.protocol import Trainer
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)


class TrainGuard(Protocol):
    """Told when the training GPUs are the trainer's, where the host keeps such a book."""

    def grant(self) -> None:
        """The training GPUs are the trainer's from now on."""
        ...

    def revoke(self) -> None:
        """They are free from now on. Idempotent."""
        ...


class CacheKeeper(Protocol):
    """The coordinator's side of a weight hand-over."""

    def begin_cache_build(self) -> int:
        """Reserve a slot."""
        ...

    def commit_cache(self, handle: CacheHandle) -> None:
        """Make the built cache the newest."""
        ...

    def abort_cache(self, slot: int) -> None:
        """Give the slot back."""
        ...

    def refresh_and_publish(self, version: int) -> ResizeReport:
        """Update serving shards and publish."""
        ...


def version_after(step: int) -> int:
    """Version of the weights after training step ``step`` (0-based): one more than it."""
    return step + 1


class TimeSharingHooks:
    """``RLixHooks`` of a pipeline that shares its GPUs.

    Args:
        pipeline_id: The pipeline.
        control_plane: Its scheduler.
        trainer: Its training workers.
        keeper: Its coordinator.
        settings: Its ``rlix:`` block.
        guard: Device book-keeping of the host, if any.
    """

    def __init__(
        self,
        pipeline_id: str,
        *,
        control_plane: ControlPlane,
        trainer: Trainer,
        keeper: CacheKeeper,
        settings: RLixSettings,
        guard: TrainGuard | None = None,
    ) -> None:
        self._pipeline_id = pipeline_id
        self._control_plane = control_plane
        self._trainer = trainer
        self._keeper = keeper
        self._limits = settings.deadlines
        self._guard = guard
        self._held = False

    @property
    def holds_training_gpus(self) -> bool:
        """Whether the training GPUs are granted to this pipeline now."""
        return self._held

    def acquire(self, step: int, priority: Priority = Priority.ACTOR_TRAINING) -> None:
        """Wait for the training GPUs; a no-op while they are held."""
        if self._held:
            return
        self._control_plane.request_gpus(
            TRAIN_CLUSTER, priority, global_step=step, timeout_s=self._limits.grant_s
        )
        self._held = True
        if self._guard is not None:
            try:
                self._guard.grant()
            except BaseException:
                self.release(step)
                raise

    def release(self, step: int) -> None:
        """Give the training GPUs back, whatever state the trainer is in. Idempotent."""
        if not self._held:
            return
        try:
            self._trainer.offload(timeout_s=self._limits.offload_s)
        finally:
            self._held = False
            try:
                if self._guard is not None:
                    self._guard.revoke()
            finally:
                self._control_plane.release_gpus(TRAIN_CLUSTER, global_step=step)

    def before_training(self, step: int) -> None:
        """Return once the training GPUs are granted and the trainer is on them."""
        self.acquire(step)
        try:
            self._trainer.onload(timeout_s=self._limits.offload_s)
        except BaseException:
            self.release(step)
            raise

    def after_training(self, step: int) -> None:
        """Cache, offload, refresh, publish, release: in this order, on every path out."""
        if not self._held:
            raise GrantRequiredError(self._pipeline_id, [], f"end training step {step}")
        try:
            self.hand_over(version_after(step))
        finally:
            self.release(step)

    def hand_over(self, version: int) -> ResizeReport:
        """Snapshot the weights, free the devices, and bring the shards to ``version``.

        The training GPUs are still held when the serving shards are refreshed, so
        that a transport that needs the sender's GPU may use it.
        """
        self.build_cache(version)
        self._trainer.offload(timeout_s=self._limits.offload_s)
        return self._keeper.refresh_and_publish(version)

    def build_cache(self, version: int) -> None:
        """Build the CPU cache of ``version``; a failed build leaves no half of one."""
        slot = self._keeper.begin_cache_build()
        try:
            handle = self._trainer.build_cpu_weight_cache(
                version, slot=slot, timeout_s=self._limits.cache_build_s
            )
            self._keeper.commit_cache(handle)
        except BaseException:
            self._keeper.abort_cache(slot)
            raise

    def report_progress(self, collected: int, target: int) -> None:
        """Send a demand snapshot; a target of 0 says nothing and is not sent."""
        if target <= 0:
            return
        self._control_plane.report_progress(
            ProgressReport(self._pipeline_id, target, collected, time.time())
        )

    def clear_progress(self) -> None:
        """Withdraw the demand snapshot."""
        self._control_plane.clear_progress()
