"""Handles of a reference shard: one that controls it, one that sends requests."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_rlix.control_plane.protocol import pipeline_namespace
from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.ray_errors import Callee, unwrap
from nemo_rl_rlix.reference.device import LogicalGpu
from nemo_rl_rlix.reference.engine import TokenDelta
from nemo_rl_rlix.reference.ledger import process_start_time
from nemo_rl_rlix.reference.worker import (
    ReferenceShardWorker,
    ShardWorkerConfig,
    WorkerIdentity,
    WorkerStats,
)
from nemo_rl_rlix.shards.protocol import DrainReport, InferenceShard, MemoryReport, ReceiveReport
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)

POLL_S = 0.02
POLITE_S = 1.0
"""Seconds, at most half of the deadline, that Ray has to end a process before a signal does."""


class ShardEndpoint:
    """Sends requests to a shard, whichever process it is at the moment. Picklable.

    Args:
        name: Name of the shard's actor; the next incarnation takes it over.
        namespace: Ray namespace of the pipeline.
        dp_rank: Rank of the shard.
    """

    def __init__(self, name: str, namespace: str, dp_rank: int) -> None:
        self.name, self.namespace, self.dp_rank = name, namespace, dp_rank
        self._handle: Any = None

    def __reduce__(self) -> tuple[type[ShardEndpoint], tuple[str, str, int]]:
        # Without the handle: where this goes, the process may be another one.
        return (ShardEndpoint, (self.name, self.namespace, self.dp_rank))

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Have the request answered; cancelling aborts it.

        Raises:
            ShardPreemptedError: The shard is closed, was taken, or its process is
                gone (epoch -1, nothing kept).
            ValueError: The request can never run.
        """
        handle = await self._resolve()
        ref = handle.generate.remote(request)
        try:
            answer: GenerationOutput = await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise
        except RayError as error:
            raise self._typed(error, handle) from error
        return answer

    async def stream(
        self, request: GenerationRequest
    ) -> AsyncIterator[TokenDelta | GenerationOutput]:
        """As :meth:`generate`, yielding each token and, last, the whole answer."""
        handle = await self._resolve()
        try:
            async for ref in handle.generate_stream.remote(request):
                yield await ref
        except RayError as error:
            raise self._typed(error, handle) from error

    async def _resolve(self) -> Any:
        if self._handle is None:
            try:
                self._handle = await asyncio.to_thread(ray.get_actor, self.name, self.namespace)
            except ValueError as error:
                raise ShardPreemptedError(self.dp_rank) from error
        return self._handle

    def _typed(self, error: RayError, handle: Any) -> BaseException:
        typed = unwrap(error, Callee(f"generation on shard {self.dp_rank}", self.dp_rank))
        if isinstance(typed, ShardFailedError):
            if self._handle is handle:
                self._handle = None
            return ShardPreemptedError(self.dp_rank)
        return typed


class RayReferenceShard(InferenceShard):
    """Control surface of one reference shard.

    Args:
        config: What the shard's process needs.
        options: Options of the actor: resources, scheduling strategy, environment.
    """

    def __init__(self, config: ShardWorkerConfig, options: Mapping[str, Any]) -> None:
        self.config = config
        self._options = dict(options)
        self._namespace = pipeline_namespace(config.pipeline_id)
        self._gpu = LogicalGpu(config.gpu)
        self._lock = threading.Lock()
        self._handle: Any = None
        self._identity: WorkerIdentity | None = None

    @property
    def dp_rank(self) -> int:
        """Rank of the shard."""
        return self.config.dp_rank

    @property
    def identity(self) -> WorkerIdentity | None:
        """The process of the shard, ``None`` when there is none."""
        return self._identity

    @property
    def endpoint(self) -> ShardEndpoint:
        """Where to send requests; stays right over rebuilds."""
        return ShardEndpoint(self.config.resident, self._namespace, self.dp_rank)

    # -- life -------------------------------------------------------------------

    def build(self, *, timeout_s: float) -> None:
        """Start the process; it is asleep at level 2 when this returns.

        Raises:
            DeadlineExceededError: It did not come up in time; kill what is left.
            ShardFailedError: It died at once, or an earlier process cannot be ended.
        """
        deadline = Deadline(f"build of shard {self.dp_rank}", timeout_s)
        earlier = self.kill(timeout_s=deadline.left(timeout_s))
        if earlier.held_bytes:
            raise ShardFailedError(
                self.dp_rank, f"an earlier process still holds {earlier.held_bytes} bytes"
            )
        handle = ReferenceShardWorker.options(
            **self._options, name=self.config.resident, namespace=self._namespace
        ).remote(self.config)
        with self._lock:
            self._handle = handle
        identity = self._call("identity", timeout_s=deadline.left(timeout_s))
        with self._lock:
            if self._handle is not handle:
                raise ShardFailedError(self.dp_rank, "it was ended while it was built")
            self._identity = identity

    def kill(self, *, timeout_s: float) -> MemoryReport:
        """End the process, by Ray or by signal, and wait until its memory is free.

        Returns:
            What it still holds when the deadline is over: 0 bytes unless even the
            signal did not end it.
        """
        started = time.monotonic()
        with self._lock:
            handle, self._handle = self._handle, None
            identity, self._identity = self._identity, None
        processes = self._gpu.processes(self.config.resident)
        if identity is not None:
            processes[identity.pid] = identity.start_time
        for target in (handle, self._named()):
            if target is not None:
                ray.kill(target, no_restart=True)
        signalled = False
        while time.monotonic() - started < timeout_s:
            # A process that was still starting charges only later.
            processes |= self._gpu.processes(self.config.resident)
            alive = [pid for pid, start in processes.items() if process_start_time(pid) == start]
            if not alive and self._named() is None:
                break
            if not signalled and time.monotonic() - started > min(POLITE_S, timeout_s / 2):
                signalled = True
                for pid in alive:
                    logger.warning("shard %d: Ray did not end process %d", self.dp_rank, pid)
                    os.kill(pid, signal.SIGKILL)
            time.sleep(POLL_S)
        return MemoryReport(self._gpu.held_bytes(self.config.resident), 0)

    def _named(self) -> Any:
        try:
            return ray.get_actor(self.config.resident, namespace=self._namespace)
        except ValueError:
            return None

    # -- control ----------------------------------------------------------------

    def close_admission(self, *, epoch: int, timeout_s: float) -> None:
        """Refuse requests from now on."""
        self._call("close_admission", epoch, timeout_s=timeout_s)

    def open_admission(self, *, epoch: int, weights_version: int, timeout_s: float) -> None:
        """Accept requests; refused while the shard could not answer rightly."""
        self._call("open_admission", epoch, weights_version, timeout_s=timeout_s)

    def drain(self, *, timeout_s: float) -> DrainReport:
        """Abort until the engine is idle, or say what is left over."""
        # The worker keeps the deadline; what is added covers the way there and back.
        report: DrainReport = self._call("drain", timeout_s, timeout_s=timeout_s + 1.0)
        return report

    def sleep(self, *, level: int, timeout_s: float) -> MemoryReport:
        """Free the device memory."""
        report: MemoryReport = self._call("sleep", level, timeout_s=timeout_s)
        return report

    def wake(self, *, tags: tuple[str, ...], timeout_s: float) -> None:
        """Map memory again."""
        self._call("wake", tags, timeout_s=timeout_s)

    def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        """Load a version from shared memory."""
        report: ReceiveReport = self._call("receive", source, timeout_s, timeout_s=timeout_s)
        return report

    def finalize_weights(self, *, timeout_s: float) -> None:
        """Run post-load work."""
        self._call("finalize_weights", timeout_s=timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        """Forget cached prefixes; ``False`` when requests hold some."""
        return bool(self._call("reset_prefix_cache", timeout_s=timeout_s))

    def probe(self, *, timeout_s: float) -> None:
        """Generate one token past the gate."""
        self._call("probe", timeout_s, timeout_s=timeout_s)

    def ping(self, *, timeout_s: float) -> None:
        """Prove that process and engine thread answer."""
        self._call("ping", timeout_s=timeout_s)

    def pause_keep(self, *, clear_cache: bool, timeout_s: float) -> int:
        """Freeze between two steps; returns the epoch of the pause."""
        return int(self._call("pause_keep", clear_cache, timeout_s=timeout_s))

    def resume(self, *, pause_epoch: int, timeout_s: float) -> bool:
        """Continue after that pause; ``False`` if another act came between."""
        return bool(self._call("resume", pause_epoch, timeout_s=timeout_s))

    def stats(self, *, timeout_s: float) -> WorkerStats:
        """What the shard has done since its process started."""
        stats: WorkerStats = self._call("stats", timeout_s=timeout_s)
        return stats

    def _call(self, method: str, *args: object, timeout_s: float) -> Any:
        handle = self._handle
        if handle is None:
            raise ShardFailedError(self.dp_rank, f"{method}: it has no process; build it first")
        callee = Callee(f"{method} of shard {self.dp_rank}", self.dp_rank, timeout_s)
        try:
            return ray.get(getattr(handle, method).remote(*args), timeout=timeout_s)
        except RayError as error:
            raise unwrap(error, callee) from error
