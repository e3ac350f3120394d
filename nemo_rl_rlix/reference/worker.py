"""The process of one reference inference shard.

The admission gate stands in front of the engine; control calls have a concurrency
group of their own, so that they never queue behind generations.
"""

from __future__ import annotations

import asyncio
import math
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import ray

from nemo_rl_rlix.errors import ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.observe.trace import open_tracer
from nemo_rl_rlix.reference.device import LogicalGpu, LogicalGpuSpec
from nemo_rl_rlix.reference.engine import (
    ABORT,
    ContinuousBatchingEngine,
    EngineConfig,
    EngineDeadError,
    EngineOutput,
    PauseMode,
    TokenDelta,
)
from nemo_rl_rlix.reference.host import EngineHost
from nemo_rl_rlix.reference.ledger import process_start_time
from nemo_rl_rlix.reference.memory import DeviceAccount
from nemo_rl_rlix.shards.admission import AdmissionGate
from nemo_rl_rlix.shards.preempt import drain_engine_async
from nemo_rl_rlix.shards.protocol import DrainReport, MemoryReport, ReceiveReport
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.weights.transports.shm import ShmReceiver
from nemo_rl_rlix.weights.types import CacheHandle

T = TypeVar("T")

GENERATE_CONCURRENCY = 512
CONTROL_CONCURRENCY = 8
SWITCH_INTERVAL_S = 0.0005


@dataclass(frozen=True)
class ShardWorkerConfig:
    """What a shard's process needs to know. Picklable.

    Attributes:
        pipeline_id: Pipeline of the shard.
        dp_rank: Rank of the shard.
        owner: Name that holds the GPU's grant while the shard serves.
        gpu: Its logical GPU.
        engine: Sizes and seed of the engine.
        sleeping_budget_bytes: Device memory that it may keep asleep.
        admission_delay_s: Seconds between the gate and the engine's table, where
            a real worker tokenises.
        pin: Whether to tie the process to the GPU's core.
        trace_dir: Folder of the run's trace, ``None`` for none.
        trace_name: Name of the pipeline on the trace's tracks.
    """

    pipeline_id: str
    dp_rank: int
    owner: str
    gpu: LogicalGpuSpec
    engine: EngineConfig = field(default_factory=EngineConfig)
    sleeping_budget_bytes: int = 0
    admission_delay_s: float = 0.0
    pin: bool = True
    trace_dir: str | None = None
    trace_name: str = ""

    @property
    def resident(self) -> str:
        """Name of the actor, and under which device memory is charged."""
        return f"{self.pipeline_id}-shard-{self.dp_rank}"


@dataclass(frozen=True)
class WorkerIdentity:
    """Which process a shard is.

    Attributes:
        pid: Process id.
        start_time: Its start, in clock ticks since boot, so that a reused pid is noticed.
        ray_gpu_ids: GPUs that Ray assigned to it.
        core: Core that it is tied to, ``None`` when it is not.
    """

    pid: int
    start_time: int
    ray_gpu_ids: tuple[str, ...]
    core: int | None


@dataclass(frozen=True)
class WorkerStats:
    """What a shard has done since its process started.

    Attributes:
        steps: Engine steps.
        tokens: Tokens sampled for requests that passed the gate, aborted ones included.
        running_gauge: Running requests at the last step; for displays only.
        in_flight: Callers behind the gate.
        refused: Callers turned away by the gate.
        prefix_hits: Prompts found in the prefix cache.
        weights_version: Version of the weights.
        host_bytes: Host memory of a sleeping engine's copies.
    """

    steps: int
    tokens: int
    running_gauge: int
    in_flight: int
    refused: int
    prefix_hits: int
    weights_version: int
    host_bytes: int


class ShardWorker:
    """One inference shard: engine, gate and control calls. Starts asleep at level 2."""

    def __init__(self, config: ShardWorkerConfig) -> None:
        self._config = config
        self._rank = config.dp_rank
        self._tokens = 0
        # The engine's thread lets go of the interpreter at every operation; an event
        # loop that kept it for the usual 5 ms would halve the step rate.
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        gpu = LogicalGpu(config.gpu)
        self._core = gpu.pin() if config.pin else None
        self._account = DeviceAccount(gpu, config.owner, config.resident)
        engine = ContinuousBatchingEngine(config.engine, self._account)
        engine.pause(PauseMode.ABORT)
        engine.sleep(2)
        self._gate = AdmissionGate(config.dp_rank)
        tracer = open_tracer(config.trace_dir, f"{config.trace_name}-shard{config.dp_rank}")
        track = f"gpu/{config.gpu.gpu_id}/{config.trace_name}"
        self._host = EngineHost(
            engine,
            gpu=gpu,
            name=config.resident,
            on_step=lambda began_s, ended_s, tokens: tracer.accumulate(
                track, "generate", began_s, ended_s, tokens=tokens
            ),
            on_idle=tracer.flush,
        )
        self._receiver = ShmReceiver(_node_id())

    # -- generation -------------------------------------------------------------

    @ray.method(concurrency_group="generate")
    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """Answer one request.

        Raises:
            ShardPreemptedError: The gate is closed, the request was aborted, or the
                engine has crashed (epoch -1). Carries the tokens so far.
            ValueError: The request can never run.
        """
        self._refuse_if_dead()
        with self._gate.enter():
            await self._preprocess()
            try:
                return self._answer(await self._host.run(request))
            except EngineDeadError as error:
                raise ShardPreemptedError(self._rank) from error

    @ray.method(concurrency_group="generate")
    async def generate_stream(
        self, request: GenerationRequest
    ) -> AsyncIterator[TokenDelta | GenerationOutput]:
        """As :meth:`generate`, yielding each token and, last, the whole answer."""
        self._refuse_if_dead()
        with self._gate.enter():
            await self._preprocess()
            try:
                async for event in self._host.stream(request):
                    yield event if isinstance(event, TokenDelta) else self._answer(event)
            except EngineDeadError as error:
                raise ShardPreemptedError(self._rank) from error

    async def _preprocess(self) -> None:
        if self._config.admission_delay_s:
            await asyncio.sleep(self._config.admission_delay_s)

    def _refuse_if_dead(self) -> None:
        if self._host.dead:
            raise ShardPreemptedError(self._rank)

    def _answer(self, output: EngineOutput) -> GenerationOutput:
        generation = output.generation
        self._tokens += len(generation.token_ids)
        if output.finish_reason == ABORT:
            raise ShardPreemptedError(self._rank, generation, self._gate.epoch)
        return GenerationOutput(
            request_id=output.request_id,
            token_ids=generation.token_ids,
            logprobs=generation.logprobs,
            segments=generation.segments,
            finish_reason=output.finish_reason,
            dp_rank=self._rank,
        )

    # -- control ----------------------------------------------------------------

    @ray.method(concurrency_group="control")
    async def identity(self) -> WorkerIdentity:
        """Which process this is."""
        pid = os.getpid()
        start = process_start_time(pid)
        assert start is not None, "a running process has a start time"
        gpus = ray.get_runtime_context().get_accelerator_ids().get("GPU", [])
        return WorkerIdentity(pid, start, tuple(gpus), self._core)

    @ray.method(concurrency_group="control")
    async def stats(self) -> WorkerStats:
        """What this shard has done."""
        engine = self._host.engine
        return WorkerStats(
            steps=engine.steps,
            tokens=self._tokens,
            running_gauge=engine.running_gauge,
            in_flight=self._gate.in_flight,
            refused=self._gate.refused,
            prefix_hits=engine.memory.prefixes.hits,
            weights_version=engine.weights_version,
            host_bytes=engine.memory.host_bytes,
        )

    @ray.method(concurrency_group="control")
    async def close_admission(self, epoch: int) -> None:
        """Refuse requests from now on."""
        self._gate.close(epoch)

    @ray.method(concurrency_group="control")
    async def open_admission(self, epoch: int, weights_version: int) -> None:
        """Accept requests.

        Raises:
            ShardFailedError: The engine sleeps, or lacks the weights of that version.
        """

        def check(engine: ContinuousBatchingEngine) -> str:
            if not engine.awake:
                return f"only {sorted(engine.memory.mapped)} of its memory is awake"
            if engine.weights_discarded:
                return "its weights were discarded and not synced since"
            if engine.weights_version != weights_version:
                return f"it holds version {engine.weights_version}, not {weights_version}"
            return ""

        if cause := await self._on_engine(check):
            raise ShardFailedError(self._rank, f"cannot serve: {cause}")
        self._gate.open(epoch, weights_version)

    @ray.method(concurrency_group="control")
    async def drain(self, timeout_s: float) -> DrainReport:
        """Abort until the engine is idle, see :func:`~..shards.preempt.drain_engine_async`."""

        async def pause() -> None:
            await self._on_engine(lambda engine: engine.pause(PauseMode.ABORT))

        async def abort(ids: Sequence[str]) -> None:
            await self._on_engine(lambda engine: engine.abort(ids))

        return await drain_engine_async(
            pause=pause,
            table=self._host.engine.request_ids,
            abort=abort,
            callers=lambda: self._gate.in_flight,
            timeout_s=timeout_s,
        )

    @ray.method(concurrency_group="control")
    async def sleep(self, level: int) -> MemoryReport:
        """Free the device memory.

        Raises:
            ShardFailedError: The shard is not idle; sleeping would kill its engine.
        """

        def act(engine: ContinuousBatchingEngine) -> int:
            busy = len(engine.request_ids())
            if busy or self._gate.in_flight or self._gate.is_open:
                raise ShardFailedError(
                    self._rank,
                    f"asked to sleep with {busy} requests and {self._gate.in_flight} callers,"
                    f" gate {'open' if self._gate.is_open else 'closed'}: close and drain first",
                )
            engine.pause(PauseMode.KEEP)
            engine.sleep(level)
            return engine.memory.device_bytes

        really_held = await self._on_engine(act)
        held = max(self._account.held_bytes(), really_held)
        return MemoryReport(held, self._config.sleeping_budget_bytes)

    @ray.method(concurrency_group="control")
    async def wake(self, tags: tuple[str, ...]) -> None:
        """Map memory again; the engine runs once every tag is mapped."""
        await self._on_engine(lambda engine: engine.wake(tags))

    @ray.method(concurrency_group="control")
    async def receive(self, source: CacheHandle, timeout_s: float) -> ReceiveReport:
        """Copy a version from shared memory and load it."""

        def act(engine: ContinuousBatchingEngine) -> ReceiveReport:
            received = self._receiver.receive(
                source, engine.load_weights, "cpu", timeout_s=timeout_s
            )
            report = ReceiveReport(
                weights_version=source.weights_version,
                loaded=received.loaded,
                expected=engine.expected_names(),
                nbytes=received.nbytes,
                seconds=received.seconds,
            )
            if not report.missing:
                engine.weights_version = source.weights_version
            return report

        return await self._on_engine(act)

    @ray.method(concurrency_group="control")
    async def finalize_weights(self) -> None:
        """Nothing is derived from the weights here, and the receiver keeps no staging."""
        await self._on_engine(lambda engine: engine.expected_names())

    @ray.method(concurrency_group="control")
    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; ``False`` while requests hold some."""
        return await self._on_engine(lambda engine: engine.reset_prefix_cache())

    @ray.method(concurrency_group="control")
    async def probe(self, timeout_s: float) -> None:
        """Generate one token past the gate.

        Raises:
            ShardFailedError: No token in time, or one from garbage.
            ShardPreemptedError: A drain took it.
        """
        request = GenerationRequest(f"probe-{self._rank}", (0,), 1, temperature=0.0)
        try:
            async with asyncio.timeout(timeout_s):
                output = await self._host.run(request)
        except TimeoutError:
            raise ShardFailedError(self._rank, f"no token within {timeout_s:g} s") from None
        except EngineDeadError as error:
            raise ShardFailedError(self._rank, str(error)) from error
        if output.finish_reason == ABORT:
            raise ShardPreemptedError(self._rank, epoch=self._gate.epoch)
        if not all(math.isfinite(logprob) for logprob in output.generation.logprobs):
            raise ShardFailedError(self._rank, "it samples from garbage; were its weights synced?")

    @ray.method(concurrency_group="control")
    async def ping(self) -> None:
        """Answer if the engine's thread does.

        Raises:
            ShardFailedError: The engine has crashed.
        """
        await self._on_engine(lambda engine: engine.expected_names())

    @ray.method(concurrency_group="control")
    async def pause_keep(self, clear_cache: bool) -> int:
        """Freeze between two steps; returns the epoch of the pause."""
        return await self._on_engine(
            lambda engine: engine.pause(PauseMode.KEEP, clear_cache=clear_cache)
        )

    @ray.method(concurrency_group="control")
    async def resume(self, pause_epoch: int) -> bool:
        """Continue, unless another act came after the pause of that epoch."""
        return await self._on_engine(lambda engine: engine.resume(pause_epoch))

    async def _on_engine(self, act: Callable[[ContinuousBatchingEngine], T]) -> T:
        def checked(engine: ContinuousBatchingEngine) -> T:
            engine.check_alive()
            return act(engine)

        try:
            return await asyncio.wrap_future(self._host.call(checked))
        except EngineDeadError as error:
            raise ShardFailedError(self._rank, str(error)) from error


def _node_id() -> str:
    return str(ray.get_runtime_context().get_node_id())


ReferenceShardWorker = ray.remote(
    concurrency_groups={"generate": GENERATE_CONCURRENCY, "control": CONTROL_CONCURRENCY},
    max_restarts=0,
    max_task_retries=0,
)(ShardWorker)
"""The Ray actor class. A shard is rebuilt by its owner, never restarted by Ray."""
