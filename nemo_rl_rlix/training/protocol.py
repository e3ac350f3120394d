"""What the core needs from a trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nemo_rl_rlix.shards.protocol import MemoryReport
    from nemo_rl_rlix.weights.types import CacheHandle


class Trainer(Protocol):
    """Control surface of the training side of one pipeline (all its ranks)."""

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> CacheHandle:
        """Snapshot the weights into ``slot`` of the CPU cache; all ranks take part.

        The returned handle is not published yet: a reader sees it only after the
        coordinator committed it. On an error the slot is invalid.
        """
        ...

    def onload(self, *, timeout_s: float) -> None:
        """Bring parameters, gradients and optimizer state to the device.

        Re-creates and warms communication groups first. A no-op when loaded.
        """
        ...

    def offload(self, *, timeout_s: float) -> MemoryReport:
        """Move every tensor to the host and destroy communication groups.

        A no-op when offloaded. Raises if any tensor stayed on the device.
        """
        ...
