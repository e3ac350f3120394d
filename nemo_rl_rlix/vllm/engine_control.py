"""The acts on one engine, each made on its event loop, each with a deadline.

Works over an ``AsyncLLM``. The order of the acts is the core's business; this module
sees to it that each leaves the engine in a known state or raises.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import pickle
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import DeadlineExceededError, RLixError, ShardFailedError
from nemo_rl_rlix.shards.admission import AdmissionGate
from nemo_rl_rlix.shards.preempt import drain_engine_async
from nemo_rl_rlix.shards.protocol import (
    MEMORY_TAGS,
    DrainReport,
    MemoryReport,
    ReceiveReport,
)
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.accounting import CONTEXT_BYTES, shard_report
from nemo_rl_rlix.vllm.loop import EngineLoop
from nemo_rl_rlix.vllm.processes import end_processes, with_descendants
from nemo_rl_rlix.vllm.receive import merge
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)

T = TypeVar("T")

POLL_S = 0.01
PROBE_TOKEN_ID = 0
"""Prompt of the probe; every vocabulary has it."""


class EngineControl:
    """Control of one engine. Make it on the event loop on which requests are served.

    Args:
        engine: The ``AsyncLLM``; awake.
        dp_rank: Rank of the shard.
        gate: The gate in front of it.
        sleeping_budget_bytes: Device memory that it may keep asleep, on each GPU.
        context_bytes: See :func:`~nemo_rl_rlix.vllm.accounting.held_bytes`.
    """

    def __init__(
        self,
        engine: Any,
        *,
        dp_rank: int,
        gate: AdmissionGate,
        sleeping_budget_bytes: int,
        context_bytes: int = CONTEXT_BYTES,
    ) -> None:
        self.engine = engine
        self.gate = gate
        self._rank = dp_rank
        self._budget_bytes = sleeping_budget_bytes
        self._context_bytes = context_bytes
        self._loop = EngineLoop()
        self._acting = asyncio.Lock()
        self._generate = engine.generate
        self._dead_error = compat.dead_error()
        self._mapped = set(MEMORY_TAGS)
        self._pause_epoch = 0
        self._paused_keep = False
        self._numbers = itertools.count()
        self.weights_version = -1
        self.killed = False

    # -- what it is doing -------------------------------------------------------

    @property
    def asleep(self) -> bool:
        """Whether any of its memory is not there."""
        return self._mapped != set(MEMORY_TAGS)

    @property
    def dead(self) -> bool:
        """Whether its process has ended."""
        return self.killed or bool(self.engine.errored)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for it and no request is in its table."""
        return self.gate.in_flight == 0 and not compat.open_requests(self.engine)

    # -- requests ---------------------------------------------------------------

    async def abort_all(self, left: Callable[[], int], *, timeout_s: float) -> int:
        """Abort open requests until those who asked are gone; admission may stay open.

        Args:
            left: How many of the callers that are meant are still inside. One that has
                passed the gate and is not in the table yet is missed by one abort.
            timeout_s: Deadline in seconds.

        Returns:
            Number of requests that were aborted.
        """

        async def act() -> int:
            self._refuse_asleep("abort requests")
            aborted: set[str] = set()
            while True:
                ids = compat.open_requests(self.engine)
                if ids:
                    aborted.update(ids)
                    await self.engine.abort(ids, internal=True)
                if not left():
                    return len(aborted)
                await asyncio.sleep(POLL_S)

        return await self._act(act, "abort of all requests", timeout_s)

    async def drain(self, *, timeout_s: float) -> DrainReport:
        """Pause, then abort until the table is empty in two reads.

        An engine that sleeps is looked at only: an abort would make it step on memory
        that is not there. What is in its table then is reported as left over.
        """
        ended_by_pause = 0

        async def pause() -> None:
            nonlocal ended_by_pause
            if not self.asleep:
                ended_by_pause = len(compat.open_requests(self.engine))
                await self.engine.pause_generation(mode="abort", clear_cache=True)

        async def abort(ids: Collection[str]) -> None:
            if not self.asleep:
                await self.engine.abort(list(ids), internal=True)

        async def act() -> DrainReport:
            self._new_epoch()
            report = await drain_engine_async(
                pause=pause,
                table=lambda: compat.open_requests(self.engine),
                abort=abort,
                callers=lambda: self.gate.in_flight,
                timeout_s=timeout_s,
            )
            aborted = max(report.aborted, ended_by_pause)
            return DrainReport(aborted, report.empty_reads, report.leftover, report.seconds)

        # The loop inside keeps the deadline and says what is left over.
        return await self._act(act, "drain", timeout_s + 1.0)

    async def probe(self, *, timeout_s: float) -> None:
        """Generate one token, past the gate.

        Raises:
            ShardFailedError: It ended in another way than with a token.
        """

        async def act() -> None:
            from vllm import SamplingParams

            params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
            last: Any = None
            async for output in self._generate(
                prompt={"prompt_token_ids": [PROBE_TOKEN_ID]},
                sampling_params=params,
                request_id=f"rlix-probe-{self._rank}-{os.getpid()}-{next(self._numbers)}",
            ):
                last = output
            completion = last.outputs[0] if last is not None else None
            if completion is None or completion.finish_reason not in ("length", "stop"):
                reason = getattr(completion, "finish_reason", "no output")
                raise ShardFailedError(self._rank, f"the probe ended as {reason!r}")

        await self._act(act, "one-token probe", timeout_s)

    # -- pausing ----------------------------------------------------------------

    async def pause_keep(self, *, clear_cache: bool, timeout_s: float) -> int:
        """Freeze between two steps, keeping requests; returns the epoch of the pause.

        Args:
            clear_cache: Drop cached keys; running requests compute theirs anew.
            timeout_s: Deadline in seconds.
        """

        async def act() -> int:
            self._refuse_asleep("be paused with its requests kept")
            epoch = self._new_epoch()
            await self.engine.pause_generation(mode="keep", clear_cache=clear_cache)
            self._paused_keep = True
            return epoch

        return await self._act(act, "pause", timeout_s)

    async def resume(self, *, pause_epoch: int, timeout_s: float) -> bool:
        """Continue after the pause of that epoch.

        Returns:
            ``False``, having done nothing, when another act came between: the shard may
            have been taken meanwhile, and a resume would let it step.
        """

        async def act() -> bool:
            if pause_epoch != self._pause_epoch or not self._paused_keep or self.asleep:
                return False
            self._paused_keep = False
            await self.engine.resume_generation()
            return True

        return await self._act(act, "resume", timeout_s)

    async def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        """Forget cached prefixes; ``False`` when requests hold some."""

        async def act() -> bool:
            return bool(await self.engine.reset_prefix_cache())

        return await self._act(act, "reset of the prefix cache", timeout_s)

    # -- memory -----------------------------------------------------------------

    async def sleep(self, *, level: int, timeout_s: float) -> MemoryReport:
        """Give the memory back. The engine is idle; a second sleep only reports.

        Raises:
            ShardFailedError: It is not idle, or its processes could not do it.
        """

        async def act() -> MemoryReport:
            self._new_epoch()
            if self._mapped:
                left = compat.open_requests(self.engine)
                if left:
                    raise ShardFailedError(
                        self._rank, f"sleep of a busy engine, {len(left)} requests in its table"
                    )
                if self.asleep:
                    # Half awake its executor counts as sleeping, and would do nothing.
                    await self._wake(set(MEMORY_TAGS))
                # Its sender side must forget what the receiver forgets by sleeping.
                await self.engine.reset_mm_cache()
                await self.engine.sleep(level=level, mode="abort")
                self._mapped.clear()
                if level > 1:
                    self.weights_version = -1
            # Asked after the sleep: that its processes answer is the proof.
            return await self._memory(timeout_s)

        return await self._act(act, f"sleep at level {level}", timeout_s)

    async def wake(self, *, tags: Collection[str], timeout_s: float) -> None:
        """Map memory again; the engine does not step before all of it is there."""

        async def act() -> None:
            self._new_epoch()
            await self._wake(tags)

        await self._act(act, f"wake of {', '.join(tags)}", timeout_s)

    async def _wake(self, tags: Collection[str]) -> None:
        for tag in MEMORY_TAGS:
            if tag not in tags or tag in self._mapped:
                continue
            await self.engine.wake_up([tag])
            self._mapped.add(tag)
            # Before 0.25 any wake lets the engine step.
            if self.asleep and not await self.engine.is_paused():
                await self.engine.pause_generation(mode="keep", clear_cache=False)

    async def memory(self, *, timeout_s: float) -> MemoryReport:
        """Device memory that its processes hold."""
        return await self._act(lambda: self._memory(timeout_s), "memory reading", timeout_s)

    async def _memory(self, timeout_s: float) -> MemoryReport:
        answers = await self._rpc("rlix_memory", timeout_s)
        return shard_report(answers, self._budget_bytes, self._context_bytes)

    # -- weights ----------------------------------------------------------------

    async def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        """Load a version from host memory of the node."""

        async def act() -> ReceiveReport:
            self.weights_version = -1
            answers = await self._rpc("rlix_receive_shm", timeout_s, source, timeout_s)
            return self._received(merge(answers))

        return await self._act(act, f"receive of version {source.weights_version}", timeout_s)

    async def receive_by(self, method: str, *args: object, timeout_s: float) -> ReceiveReport:
        """Load a version by another transport of the worker extension.

        Args:
            method: ``rlix_receive_ipc`` or ``rlix_receive_group``.
            args: Its arguments.
            timeout_s: Deadline in seconds.
        """

        async def act() -> ReceiveReport:
            self.weights_version = -1
            return self._received(merge(await self._rpc(method, timeout_s, *args)))

        return await self._act(act, method, timeout_s)

    async def finalize_weights(self, *, timeout_s: float) -> None:
        """Run the engine's post-load work once and free staging."""

        async def act() -> None:
            await self._rpc("rlix_finalize", timeout_s)

        await self._act(act, "finalize of weights", timeout_s)

    async def worker_rpc(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        """Call a method of the worker extension in every worker process."""
        return await self._act(lambda: self._rpc(method, timeout_s, *args), method, timeout_s)

    def _received(self, report: ReceiveReport) -> ReceiveReport:
        if not report.missing:
            self.weights_version = report.weights_version
        return report

    async def _rpc(self, method: str, timeout_s: float, *args: object) -> list[Any]:
        # Bytes pass through vLLM's serializer whatever its settings.
        answers = await self.engine.collective_rpc(
            method, timeout=timeout_s, args=(pickle.dumps(args),)
        )
        return [pickle.loads(answer) for answer in answers]

    # -- its end ----------------------------------------------------------------

    async def ping(self, *, timeout_s: float) -> None:
        """Prove that engine and workers answer; legal asleep."""
        await self.worker_rpc("rlix_ping", timeout_s=timeout_s)

    async def kill(self, *, timeout_s: float) -> int:
        """End its processes, whatever they are doing.

        Interrupts every other act. Callers get ``ShardPreemptedError``.

        Returns:
            Number of processes that could not be ended in time.
        """
        self.killed = True
        self._pause_epoch += 1
        deadline = Deadline(f"end of the engine of shard {self._rank}", timeout_s)
        roots = compat.engine_process_ids(self.engine)
        processes = await asyncio.to_thread(with_descendants, roots)
        left = await asyncio.to_thread(end_processes, processes, deadline.left(timeout_s))
        if left:
            logger.error("shard %d: processes %s did not end", self._rank, sorted(left))
        await self._loop.run(
            self._end_callers, f"end of callers of shard {self._rank}", deadline.left(timeout_s)
        )
        try:
            # What is left in this process: sockets, the output handler, its threads.
            await asyncio.wait_for(
                asyncio.to_thread(self.engine.shutdown), deadline.left(timeout_s)
            )
        except TimeoutError:
            logger.warning("shard %d: the client of its engine did not shut down", self._rank)
        self._mapped.clear()
        return len(left)

    async def _end_callers(self) -> None:
        # Before the client goes: without its output handler they would wait for ever.
        compat.end_requests(self.engine)
        while self.gate.in_flight:
            await asyncio.sleep(POLL_S)

    # -- helpers ----------------------------------------------------------------

    def _new_epoch(self) -> int:
        self._pause_epoch += 1
        self._paused_keep = False
        return self._pause_epoch

    def _refuse_asleep(self, act: str) -> None:
        if self.asleep:
            raise ShardFailedError(self._rank, f"it sleeps and cannot {act}")

    async def _act(self, make: Callable[[], Awaitable[T]], what: str, timeout_s: float) -> T:
        async def serialised() -> T:
            async with self._acting:
                return await make()

        def coroutine() -> Coroutine[Any, Any, T]:
            return serialised()

        named = f"{what} of shard {self._rank}"
        if self.dead:
            raise ShardFailedError(self._rank, f"{what}: its engine has ended")
        started = time.monotonic()
        try:
            return await self._loop.run(coroutine, named, timeout_s)
        except (RLixError, asyncio.CancelledError):
            raise
        except self._dead_error as error:
            raise ShardFailedError(self._rank, f"{what}: its engine has died") from error
        except TimeoutError as error:  # vLLM's own deadline of a call to its workers
            raise DeadlineExceededError(named, time.monotonic() - started) from error
        except Exception as error:
            cause = f"{what}: {type(error).__name__}: {error}"
            raise ShardFailedError(self._rank, cause) from error
