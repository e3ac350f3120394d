"""What the core needs from an inference shard, and what a shard reports.

The core never sees vLLM. ``reference/`` and ``vllm/`` implement this protocol,
each call thin around its engine; the order of the calls is the core's business.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from nemo_rl_rlix.weights.types import CacheHandle

WEIGHTS_TAG = "weights"
KV_CACHE_TAG = "kv_cache"
MEMORY_TAGS = (WEIGHTS_TAG, KV_CACHE_TAG)


@dataclass(frozen=True)
class DrainReport:
    """How a shard became idle.

    Attributes:
        aborted: Requests that were aborted, those still being admitted included.
        empty_reads: Consecutive reads of the request table that were empty (2 when idle).
        leftover: Requests still in the table; 0 when the drain worked.
        seconds: Time it took.
    """

    aborted: int
    empty_reads: int
    leftover: int
    seconds: float

    @property
    def idle(self) -> bool:
        """Whether the engine has acknowledged that it runs nothing."""
        return self.leftover == 0 and self.empty_reads >= 2


@dataclass(frozen=True)
class MemoryReport:
    """Device memory that a shard's own processes hold.

    Attributes:
        held_bytes: Bytes mapped or reserved by the shard, summed over its GPUs.
        budget_bytes: Bytes a sleeping shard may keep; ``held_bytes`` above it
            means that the GPU cannot be handed over.
    """

    held_bytes: int
    budget_bytes: int

    @property
    def within_budget(self) -> bool:
        """Whether the GPU may be handed over."""
        return self.held_bytes <= self.budget_bytes


@dataclass(frozen=True)
class ReceiveReport:
    """What arrived in one weight transfer.

    Attributes:
        weights_version: Version that was received.
        loaded: Names of the engine tensors that were written.
        expected: Names of every parameter and buffer that the engine has and
            that a level-2 sleep discards, ties resolved to the stored name.
        nbytes: Bytes copied to the device.
        seconds: Time it took.
    """

    weights_version: int
    loaded: frozenset[str]
    expected: frozenset[str]
    nbytes: int
    seconds: float

    @property
    def missing(self) -> list[str]:
        """Tensors that the engine expects and did not get."""
        return sorted(self.expected - self.loaded)

    @property
    def unexpected(self) -> list[str]:
        """Tensors that were sent and that the engine does not know."""
        return sorted(self.loaded - self.expected)


class InferenceShard(Protocol):
    """Control surface of one data-parallel inference shard.

    Every call may block for at most ``timeout_s`` seconds and then raises
    :class:`~nemo_rl_rlix.errors.DeadlineExceededError`; a shard whose process is
    gone raises :class:`~nemo_rl_rlix.errors.ShardFailedError`. Calls for one
    shard are never made concurrently, except :meth:`kill`, which may interrupt
    any of them.
    """

    @property
    def dp_rank(self) -> int:
        """Rank of the shard among the pipeline's shards."""
        ...

    def build(self, *, timeout_s: float) -> None:
        """Start the engine process; it ends asleep at level 2, admission closed.

        Legal when there is no process (never built, or killed). Any earlier
        process is gone when this returns.
        """
        ...

    def close_admission(self, *, epoch: int, timeout_s: float) -> None:
        """Refuse every request from now on with ``ShardPreemptedError``."""
        ...

    def open_admission(self, *, epoch: int, weights_version: int, timeout_s: float) -> None:
        """Accept requests; stamp their tokens with ``weights_version``."""
        ...

    def drain(self, *, timeout_s: float) -> DrainReport:
        """Pause with abort, then abort until the table is empty in two reads.

        Admission is closed already. The aborted requests end for their callers
        as ``ShardPreemptedError``. A drain that does not succeed returns a
        report with ``leftover > 0``; it does not sleep by force.
        """
        ...

    def sleep(self, *, level: int, timeout_s: float) -> MemoryReport:
        """Give the device memory back. The engine is idle and stays paused.

        Args:
            level: 1 keeps the weights in host memory, 2 discards them.
            timeout_s: Deadline in seconds.

        A second sleep is a no-op that reports memory again.
        """
        ...

    def wake(self, *, tags: tuple[str, ...], timeout_s: float) -> None:
        """Map the memory of ``tags`` again; admission stays closed.

        The engine stays paused until every tag is awake. A second wake of a tag
        is a no-op.
        """
        ...

    def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        """Copy the weights of ``source`` to the device and load them."""
        ...

    def finalize_weights(self, *, timeout_s: float) -> None:
        """Run the engine's post-load work once and free transfer staging."""
        ...

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        """Forget cached prefixes; ``False`` when the engine could not."""
        ...

    def probe(self, *, timeout_s: float) -> None:
        """Generate one token, past the admission gate, to prove that it serves."""
        ...

    def ping(self, *, timeout_s: float) -> None:
        """Prove that the shard's process answers; legal in every state, asleep too."""
        ...

    def pause_keep(self, *, clear_cache: bool, timeout_s: float) -> int:
        """Freeze between engine steps, keeping requests; returns the pause epoch."""
        ...

    def resume(self, *, pause_epoch: int, timeout_s: float) -> bool:
        """Continue after the pause of that epoch; ``False`` if another act came between."""
        ...

    def kill(self, *, timeout_s: float) -> MemoryReport:
        """End the engine's processes and report what they still hold (0 bytes).

        Requests that were running end for their callers as
        ``ShardPreemptedError`` without partial tokens.
        """
        ...


@dataclass(frozen=True)
class RankOutcome:
    """What a resize did to one shard.

    Attributes:
        dp_rank: Rank of the shard.
        state: Name of the state it ended in.
        seconds: Time it took.
        aborted: Requests it was serving that must go elsewhere.
        synced_bytes: Bytes of weights it received.
        cause: Why it failed; empty when it did not.
    """

    dp_rank: int
    state: str
    seconds: float = 0.0
    aborted: int = 0
    synced_bytes: int = 0
    cause: str = ""


@dataclass(frozen=True)
class ResizeReport:
    """What a resize did, shard by shard, in the order of the ranks."""

    outcomes: tuple[RankOutcome, ...] = field(default=())
    seconds: float = 0.0
