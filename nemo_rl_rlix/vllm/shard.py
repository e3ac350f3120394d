"""An inference shard that is a vLLM engine in a worker actor (an ``InferenceShard``)."""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import RLixError, ShardFailedError
from nemo_rl_rlix.ray_errors import Callee, unwrap
from nemo_rl_rlix.shards.protocol import DrainReport, MemoryReport, ReceiveReport
from nemo_rl_rlix.vllm.processes import end_trees
from nemo_rl_rlix.vllm.worker import WorkerIdentity
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)

POLITE_SHARE = 0.5
"""Share of a kill's deadline that is left to the worker actor itself."""

RETURN_S = 1.0
"""Seconds for the way there and back; the worker keeps the deadline itself."""

Respawn = Callable[[int], Any]
"""Makes a new leader actor for a dp rank whose actor is gone."""


class VllmShard:
    """Control surface of one data-parallel shard. The leader does every act.

    Args:
        dp_rank: Rank of the shard.
        leader: Actor handle of the shard's leader, an
            :class:`~nemo_rl_rlix.vllm.worker.AsyncShardWorkerMixin`.
        respawn: Makes a new leader when the actor itself is gone; without it such a
            shard stays failed.
    """

    def __init__(self, dp_rank: int, leader: Any, respawn: Respawn | None = None) -> None:
        self._dp_rank = dp_rank
        self._leader = leader
        self._respawn = respawn
        self._lock = threading.Lock()
        self._identity: WorkerIdentity | None = None

    @property
    def dp_rank(self) -> int:
        """Rank of the shard."""
        return self._dp_rank

    @property
    def leader(self) -> Any:
        """The leader's actor handle at the moment."""
        return self._leader

    @property
    def identity(self) -> WorkerIdentity | None:
        """Its processes when it was last built, ``None`` before."""
        return self._identity

    # -- life -------------------------------------------------------------------

    def build(self, *, timeout_s: float) -> None:
        """Make an engine; it is asleep at level 2 when this returns.

        Raises:
            DeadlineExceededError: It did not come up in time.
            ShardFailedError: Its actor is gone and cannot be made again.
        """
        deadline = Deadline(f"build of shard {self._dp_rank}", timeout_s)
        leader = self._leader
        if leader is None:
            if self._respawn is None:
                raise ShardFailedError(self._dp_rank, "its worker actor is gone")
            leader = self._leader = self._respawn(self._dp_rank)
        # Before the build: whoever ends it has to know where its processes are.
        self._identity = self._call("identity", timeout_s=deadline.left(timeout_s))
        remaining = deadline.left(timeout_s)
        identity = self._call("build", self._dp_rank, remaining, timeout_s=remaining)
        with self._lock:
            if self._leader is not leader:
                raise ShardFailedError(self._dp_rank, "it was ended while it was built")
            self._identity = identity

    def kill(self, *, timeout_s: float) -> MemoryReport:
        """End the engine's processes; the actor stays, unless it does not answer.

        Returns:
            0 bytes when every process is gone. A process that is left holds an unknown
            amount, reported as more than is allowed.
        """
        started = time.monotonic()
        with self._lock:
            leader, identity = self._leader, self._identity
        if leader is None:
            return MemoryReport(0, 0)
        polite_s = POLITE_SHARE * timeout_s
        ref = leader.rlix_kill.remote(max(polite_s - RETURN_S, 0.1))
        try:
            report: MemoryReport = ray.get(ref, timeout=polite_s)
            if report.within_budget:
                return report
            logger.warning("shard %d: its worker could not end its engine", self._dp_rank)
        except RayError as error:
            logger.warning("shard %d: its worker did not end its engine: %s", self._dp_rank, error)
        with self._lock:
            self._leader = None
        # With its children, and before Ray does: children of a dead actor are found no more.
        left = self._end_processes(identity, timeout_s - (time.monotonic() - started))
        ray.kill(leader, no_restart=True)
        return MemoryReport(len(left), 0)

    def _end_processes(self, identity: WorkerIdentity | None, timeout_s: float) -> set[int]:
        """End what an actor leaves behind, on its node."""
        if identity is None:
            return set()
        on_node = NodeAffinitySchedulingStrategy(identity.node_id, soft=False)
        task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=on_node)(end_trees)
        try:
            left: set[int] = ray.get(
                task.remote(identity.processes, max(timeout_s - RETURN_S, 0.1)),
                timeout=max(timeout_s, RETURN_S),
            )
        except RayError as error:
            logger.error("shard %d: its processes are out of reach: %s", self._dp_rank, error)
            return set(identity.processes)
        return left

    # -- control ----------------------------------------------------------------

    def close_admission(self, *, epoch: int, timeout_s: float) -> None:
        """Refuse requests from now on."""
        self._call("close_admission", epoch, timeout_s=timeout_s)

    def open_admission(self, *, epoch: int, weights_version: int, timeout_s: float) -> None:
        """Accept requests; refused while the shard could not answer rightly."""
        self._call("open_admission", epoch, weights_version, timeout_s=timeout_s)

    def drain(self, *, timeout_s: float) -> DrainReport:
        """Abort until the engine is idle, or say what is left over."""
        report: DrainReport = self._call("drain", timeout_s, timeout_s=timeout_s + RETURN_S)
        return report

    def sleep(self, *, level: int, timeout_s: float) -> MemoryReport:
        """Free the device memory."""
        report: MemoryReport = self._call("sleep", level, timeout_s, timeout_s=timeout_s)
        return report

    def wake(self, *, tags: tuple[str, ...], timeout_s: float) -> None:
        """Map memory again."""
        self._call("wake", tags, timeout_s, timeout_s=timeout_s)

    def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        """Load a version from host memory."""
        report: ReceiveReport = self._call("receive", source, timeout_s, timeout_s=timeout_s)
        return report

    def receive_by(self, method: str, *args: object, timeout_s: float) -> ReceiveReport:
        """Load a version by another transport, see ``EngineControl.receive_by``."""
        report: ReceiveReport = self._call(
            "receive_by", method, pickle.dumps(args), timeout_s, timeout_s=timeout_s
        )
        return report

    def prepare_cache(self, source: CacheHandle, *, timeout_s: float) -> None:
        """Map and register a slot of the weight cache, outside of any resize."""
        self._call("prepare_cache", source, timeout_s, timeout_s=timeout_s)

    def finalize_weights(self, *, timeout_s: float) -> None:
        """Run post-load work."""
        self._call("finalize_weights", timeout_s, timeout_s=timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        """Forget cached prefixes; ``False`` when requests hold some."""
        return bool(self._call("reset_prefix_cache", timeout_s, timeout_s=timeout_s))

    def probe(self, *, timeout_s: float) -> None:
        """Generate one token past the gate."""
        self._call("probe", timeout_s, timeout_s=timeout_s)

    def ping(self, *, timeout_s: float) -> None:
        """Prove that actor, engine and workers answer."""
        self._call("ping", timeout_s, timeout_s=timeout_s)

    def pause_keep(self, *, clear_cache: bool, timeout_s: float) -> int:
        """Freeze between two steps; returns the epoch of the pause."""
        return int(self._call("pause_keep", clear_cache, timeout_s, timeout_s=timeout_s))

    def resume(self, *, pause_epoch: int, timeout_s: float) -> bool:
        """Continue after that pause; ``False`` if another act came between."""
        return bool(self._call("resume", pause_epoch, timeout_s, timeout_s=timeout_s))

    def _call(self, method: str, *args: object, timeout_s: float) -> Any:
        leader = self._leader
        if leader is None:
            raise ShardFailedError(self._dp_rank, f"{method}: its worker actor is gone")
        callee = Callee(f"{method} of shard {self._dp_rank}", self._dp_rank, timeout_s)
        ref = getattr(leader, f"rlix_{method}").remote(*args)
        try:
            return ray.get(ref, timeout=timeout_s)
        except RayError as error:
            typed = unwrap(error, callee)
            if isinstance(typed, RLixError):
                raise typed from error
            raise ShardFailedError(self._dp_rank, f"{method}: {typed}") from error
