"""Errors of the weight cache and of the way from it to the shards."""

from __future__ import annotations

from nemo_rl_rlix.errors import RLixError


class LayoutError(RLixError):
    """The tensors cannot be laid out, or a layout contradicts itself."""


class SharedMemoryError(RLixError):
    """Shared host memory cannot be created or mapped here."""


class StaleHandleError(SharedMemoryError):
    """What lies behind a handle is no longer the memory that it was made for.

    Args:
        path: Path of the handle.
        reason: What was found there instead.
    """

    def __init__(self, path: str, reason: str) -> None:
        super().__init__(
            f"{path}: {reason}; the process that owned this weight cache has ended. "
            "Take a new handle from the coordinator"
        )
        self.path = path
        self.reason = reason


class TornReadError(RLixError):
    """A slot was not valid, or not the same, over the whole of a read."""


class CacheBuildError(RLixError):
    """A snapshot of the weights did not fit its plan; the slot is invalid.

    Args:
        reason: What did not fit.
        missing: Planned tensors that did not come.
        unexpected: Tensors that came and are not planned, or came twice.
    """

    def __init__(
        self, reason: str, missing: list[str] | None = None, unexpected: list[str] | None = None
    ) -> None:
        super().__init__(f"weight cache not built: {reason}")
        self.missing = sorted(missing or [])
        self.unexpected = sorted(unexpected or [])


class VersionOrderError(RLixError):
    """A version is not the one that has to come next, or not the one asked for."""


class NoTransportError(RLixError):
    """No legal way leads from the cache to a device.

    Args:
        dp_rank: Shard that cannot be reached.
        device: The device, as text.
        reasons: Why each transport is out, in the order they were considered.
    """

    def __init__(self, dp_rank: int, device: str, reasons: list[str]) -> None:
        super().__init__(
            f"no transport reaches shard {dp_rank} on {device}: {'; '.join(reasons)}. "
            "Let the node map the weight cache's memory, or sync while actor_train is granted"
        )
        self.dp_rank = dp_rank
        self.device = device
        self.reasons = list(reasons)
