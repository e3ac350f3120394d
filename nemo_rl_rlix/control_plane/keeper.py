"""The coordinator's side of a weight hand-over, called over Ray."""

from __future__ import annotations

from typing import Any

from nemo_rl_rlix.control_plane.coordinator import call
from nemo_rl_rlix.settings import Deadlines
from nemo_rl_rlix.shards.protocol import ResizeReport
from nemo_rl_rlix.weights.types import CacheHandle


class RemoteKeeper:
    """A ``CacheKeeper`` that is an actor elsewhere.

    Args:
        coordinator: Its handle.
        limits: Deadlines in seconds.
    """

    def __init__(self, coordinator: Any, limits: Deadlines) -> None:
        self._coordinator = coordinator
        self._limits = limits

    def begin_cache_build(self) -> int:
        """Reserve a slot."""
        limit = self._limits.cache_build_s + self._limits.control_s
        return int(call(self._coordinator, "begin_cache_build", timeout_s=limit))

    def commit_cache(self, handle: CacheHandle) -> None:
        """Make the built cache the newest."""
        call(self._coordinator, "commit_cache", handle, timeout_s=self._limits.control_s)

    def abort_cache(self, slot: int) -> None:
        """Give the slot back."""
        call(self._coordinator, "abort_cache", slot, timeout_s=self._limits.control_s)

    def refresh_and_publish(self, version: int) -> ResizeReport:
        """Update serving shards and publish."""
        # One resize may be in the way, and a shard of either may have to be ended.
        limit = 2 * (self._limits.resize_s + self._limits.kill_s)
        report: ResizeReport = call(
            self._coordinator, "refresh_and_publish", version, timeout_s=limit
        )
        return report
