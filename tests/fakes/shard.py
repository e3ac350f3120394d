"""A shard around the fake engine: its process is an event loop in a thread.

Every call has a deadline and can be made to hang, raise, die or half work, so that
the core meets each fault of the real thing at each place.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fakes.engine import (
    RESIDUE_BYTES,
    WEIGHT_NAMES,
    EngineDeadError,
    EngineOutput,
    FakeEngine,
    weights_of,
)
from nemo_rl_rlix.errors import (
    CacheNotReadyError,
    DeadlineExceededError,
    PartialGeneration,
    Segment,
    ShardFailedError,
    ShardPreemptedError,
)
from nemo_rl_rlix.shards.admission import AdmissionGate
from nemo_rl_rlix.shards.preempt import drain_engine_async
from nemo_rl_rlix.shards.protocol import DrainReport, MemoryReport, ReceiveReport
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest, join_segments
from nemo_rl_rlix.weights.types import (
    BucketLayout,
    CacheHandle,
    SharedMemoryHandle,
    TensorSpec,
)

HANG, RAISE, DIE, LEAVE = "hang", "raise", "die", "leave"
"""Faults: never answer; raise; the process is gone; keep memory (sleep and kill)."""

BUDGET_BYTES = 2 * RESIDUE_BYTES


def cache_handle(
    version: int, *, names: Iterable[str] = WEIGHT_NAMES, slot: int = 0
) -> CacheHandle:
    """A handle whose weights the fake engine derives from the version."""
    tensors = tuple(TensorSpec(name, (1,), "float32", 4) for name in names)
    return CacheHandle(
        pipeline_id="fake",
        weights_version=version,
        slot=slot,
        layout=BucketLayout(tensors, (), (), (), 0),
        memory=SharedMemoryHandle("", 0, "", ""),
        checksum="",
    )


@dataclass
class FakeWeights:
    """A source of weights whose newest version a test sets.

    Attributes:
        cache_ready_step: Newest complete version, -1 without one.
        names: Names of the tensors in it.
        leases: Leases held at the moment.
    """

    cache_ready_step: int = 0
    names: tuple[str, ...] = WEIGHT_NAMES
    leases: int = 0

    @contextlib.contextmanager
    def lease(self, *, timeout_s: float = 0.0) -> Iterator[CacheHandle]:
        end = time.monotonic() + timeout_s
        while self.cache_ready_step < 0:
            if time.monotonic() >= end:
                raise CacheNotReadyError("no complete weight cache")
            time.sleep(0.002)
        self.leases += 1
        try:
            yield cache_handle(self.cache_ready_step, names=self.names)
        finally:
            self.leases -= 1


class ProcessGoneError(Exception):
    """The process ended before it answered."""


Answer = concurrent.futures.Future[Any]


class _Process:
    """One life of a shard: a loop in a thread, an engine, an admission gate."""

    def __init__(self, dp_rank: int, make_engine: Callable[[], FakeEngine]) -> None:
        self.gate = AdmissionGate(dp_rank)
        self.pause_epoch = 0
        self.alive = True
        self._lock = threading.Lock()
        self._answers: set[Answer] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._live, name=f"engine-{dp_rank}", daemon=True)
        self._thread.start()
        self.engine: FakeEngine = self.submit(_made_by(make_engine)).result(5)

    def _live(self) -> None:
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def submit(self, coroutine: Coroutine[Any, Any, Any]) -> Answer:
        """Run a coroutine inside; the answer ends with the process at the latest."""
        answer = Answer()
        with self._lock:
            if self.alive:
                self._answers.add(answer)
                self._loop.call_soon_threadsafe(self._start, coroutine, answer)
                return answer
        coroutine.close()
        answer.set_exception(ProcessGoneError())
        return answer

    def end(self) -> None:
        """End the process, and with it everything that it was asked. Idempotent."""
        with self._lock:
            if not self.alive:
                return
            self.alive = False
            for answer in tuple(self._answers):
                _settle(answer, ProcessGoneError())
            self._loop.call_soon_threadsafe(self._stop)

    def join(self) -> None:
        """Wait for the thread of a process that was ended."""
        self._thread.join(5)

    def _start(self, coroutine: Coroutine[Any, Any, Any], answer: Answer) -> None:
        task = self._loop.create_task(coroutine)
        answer.add_done_callback(lambda _: self._cancel_if_given_up(answer, task))
        task.add_done_callback(lambda _: self._finish(answer, task))

    def _cancel_if_given_up(self, answer: Answer, task: asyncio.Task[Any]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and the task with it
            if answer.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

    def _finish(self, answer: Answer, task: asyncio.Task[Any]) -> None:
        self._answers.discard(answer)
        if task.cancelled():
            _settle(answer, ProcessGoneError())
        elif (error := task.exception()) is not None:
            _settle(answer, error)
        elif not answer.done():
            with contextlib.suppress(concurrent.futures.InvalidStateError):
                answer.set_result(task.result())

    def _stop(self) -> None:
        self.engine.stop("its process is gone")
        self._loop.stop()


def _settle(answer: Answer, error: BaseException) -> None:
    with contextlib.suppress(concurrent.futures.InvalidStateError):  # given up, or answered
        answer.set_exception(error)


async def _made_by(make_engine: Callable[[], FakeEngine]) -> FakeEngine:
    return make_engine()


@dataclass
class FakeShard:
    """See the module.

    Attributes:
        dp_rank: Rank of the shard.
        make_engine: Makes the engine of each new process.
        faults: Call -> faults of its next uses, the first one first.
        before: Call -> what to do in the caller's thread before the call is made.
        calls: Names of the calls made so far.
        timeouts: Call and its deadline in seconds, for each of them.
        hang_share: Share of its deadline after which a call that hangs is given up.
            Far below 1, deadlines can be long enough for a busy machine.
        drains: Reports of the drains so far.
    """

    dp_rank: int
    make_engine: Callable[[], FakeEngine] = FakeEngine
    faults: dict[str, list[str]] = field(default_factory=dict)
    before: dict[str, Callable[[], None]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    timeouts: list[tuple[str, float]] = field(default_factory=list)
    hang_share: float = 0.02
    drains: list[DrainReport] = field(default_factory=list)
    _process: _Process | None = None
    _dead: list[_Process] = field(default_factory=list)
    _interrupted: threading.Event = field(default_factory=threading.Event)
    _leftover_bytes: int = 0

    @property
    def engine(self) -> FakeEngine:
        """The engine of the present process."""
        assert self._process is not None
        return self._process.engine

    @property
    def gate(self) -> AdmissionGate:
        """The gate of the present process."""
        assert self._process is not None
        return self._process.gate

    @property
    def alive(self) -> bool:
        """Whether there is a process."""
        return self._process is not None and self._process.alive

    @property
    def held_bytes(self) -> int:
        """Device memory that this shard occupies now, dead processes included."""
        process = self._process
        held = process.engine.held_bytes if process is not None and process.alive else 0
        return held + self._leftover_bytes

    @property
    def violations(self) -> list[str]:
        """What any engine of this shard was made to do and must never do."""
        lives = [*self._dead, *([self._process] if self._process is not None else [])]
        return [life.engine.violation for life in lives if life.engine.violation]

    def build(self, *, timeout_s: float) -> None:
        fault = self._begin("build", timeout_s)
        self._interrupted.clear()
        self._retire()
        if fault == HANG:
            if self._interrupted.wait(timeout_s * self.hang_share):
                raise ShardFailedError(self.dp_rank, "ended while it was being built")
            raise DeadlineExceededError(f"build of shard {self.dp_rank}", timeout_s)
        if fault is not None:
            raise ShardFailedError(self.dp_rank, "the engine does not start")
        self._process = _Process(self.dp_rank, self.make_engine)

    def close_admission(self, *, epoch: int, timeout_s: float) -> None:
        async def act(life: _Process) -> None:
            life.gate.close(epoch)

        self._call("close_admission", act, timeout_s)

    def open_admission(self, *, epoch: int, weights_version: int, timeout_s: float) -> None:
        async def act(life: _Process) -> None:
            life.gate.open(epoch, weights_version)
            life.engine.stamp = weights_version

        self._call("open_admission", act, timeout_s)

    def drain(self, *, timeout_s: float) -> DrainReport:
        async def act(life: _Process) -> DrainReport:
            life.pause_epoch += 1
            report = await drain_engine_async(
                pause=lambda: life.engine.pause("abort"),
                table=life.engine.internal_ids,
                abort=lambda ids: life.engine.abort(ids, internal=True),
                callers=lambda: life.gate.in_flight,
                timeout_s=0.8 * timeout_s,  # so that the report arrives in time
            )
            self.drains.append(report)
            return report

        return self._call("drain", act, timeout_s)

    def sleep(self, *, level: int, timeout_s: float) -> MemoryReport:
        async def act(life: _Process) -> MemoryReport:
            life.engine.sleep(level)
            return MemoryReport(life.engine.held_bytes, BUDGET_BYTES)

        return self._call("sleep", act, timeout_s)

    def wake(self, *, tags: tuple[str, ...], timeout_s: float) -> None:
        async def act(life: _Process) -> None:
            life.engine.wake(tags)

        self._call(f"wake_{'+'.join(tags)}", act, timeout_s)

    def receive(self, source: CacheHandle, *, timeout_s: float) -> ReceiveReport:
        async def act(life: _Process) -> ReceiveReport:
            names = [tensor.name for tensor in source.layout.tensors]
            values = weights_of(source.weights_version, names)
            loaded = life.engine.load(values)
            expected = frozenset(life.engine.weights)
            return ReceiveReport(source.weights_version, loaded, expected, 4 * len(loaded), 0.0)

        return self._call("receive", act, timeout_s)

    def finalize_weights(self, *, timeout_s: float) -> None:
        async def act(life: _Process) -> None:
            life.engine._check()

        self._call("finalize_weights", act, timeout_s)

    def reset_prefix_cache(self, *, timeout_s: float) -> bool:
        async def act(life: _Process) -> bool:
            return life.engine.reset_prefix_cache()

        return self._call("reset_prefix_cache", act, timeout_s, on_leave=False)

    def probe(self, *, timeout_s: float) -> None:
        async def act(life: _Process) -> None:
            await life.engine.generate("probe", (1,), 1)

        self._call("probe", act, timeout_s)

    def ping(self, *, timeout_s: float) -> None:
        async def act(life: _Process) -> None:
            life.engine._check()

        self._call("ping", act, timeout_s)

    def pause_keep(self, *, clear_cache: bool, timeout_s: float) -> int:
        async def act(life: _Process) -> int:
            await life.engine.pause("keep", clear_cache=clear_cache)
            life.pause_epoch += 1
            return life.pause_epoch

        return self._call("pause_keep", act, timeout_s)

    def resume(self, *, pause_epoch: int, timeout_s: float) -> bool:
        async def act(life: _Process) -> bool:
            if pause_epoch != life.pause_epoch:
                return False
            life.engine.resume()
            return True

        return self._call("resume", act, timeout_s, on_leave=False)

    def kill(self, *, timeout_s: float) -> MemoryReport:
        fault = self._begin("kill", timeout_s)
        self._interrupted.set()
        if fault == HANG:
            time.sleep(timeout_s * self.hang_share)
            raise DeadlineExceededError(f"end of shard {self.dp_rank}", timeout_s)
        if fault == RAISE:
            raise RuntimeError("the process table cannot be read")
        if fault == LEAVE:
            self._leftover_bytes = self.held_bytes
        else:
            self._leftover_bytes = 0
        if self._process is not None:
            self._process.end()
        return MemoryReport(self.held_bytes, BUDGET_BYTES)

    async def serve(self, request: GenerationRequest) -> GenerationOutput:
        """Answer a request as a worker does, from any event loop.

        Raises:
            ShardPreemptedError: The gate is closed, the request was aborted, or the
                process is gone.
        """
        life = self._process
        if life is None:
            raise ShardPreemptedError(self.dp_rank)
        try:
            return await asyncio.wrap_future(life.submit(_serve(life, self.dp_rank, request)))
        except ProcessGoneError as error:
            raise ShardPreemptedError(self.dp_rank) from error

    def close(self) -> None:
        """End the process and wait for its thread."""
        self._retire()
        for life in self._dead:
            life.join()

    def _retire(self) -> None:
        if self._process is not None:
            self._process.end()
            self._dead.append(self._process)
            self._process = None

    def _begin(self, name: str, timeout_s: float) -> str | None:
        self.calls.append(name)
        self.timeouts.append((name, timeout_s))
        if hook := self.before.get(name):
            hook()
        waiting = self.faults.get(name)
        return waiting.pop(0) if waiting else None

    def _call(
        self,
        name: str,
        act: Callable[[_Process], Awaitable[Any]],
        timeout_s: float,
        *,
        on_leave: Any = None,
    ) -> Any:
        fault = self._begin(name, timeout_s)
        life = self._process
        if fault == RAISE:
            raise RuntimeError(f"{name} of shard {self.dp_rank} went wrong")
        if fault == DIE and life is not None:
            life.end()
        if fault == LEAVE and name != "sleep":
            return on_leave
        if life is None:
            raise ShardFailedError(self.dp_rank, "there is no process")
        answer = life.submit(_answer(life, act, fault))
        try:
            return answer.result(timeout_s * (self.hang_share if fault == HANG else 1))
        except TimeoutError as error:
            raise DeadlineExceededError(f"{name} of shard {self.dp_rank}", timeout_s) from error
        except ProcessGoneError as error:
            raise ShardFailedError(self.dp_rank, "its process is gone") from error
        except EngineDeadError as error:
            raise ShardFailedError(self.dp_rank, f"its engine is dead: {error}") from error


async def _answer(
    life: _Process, act: Callable[[_Process], Awaitable[Any]], fault: str | None
) -> Any:
    if fault == HANG:
        await asyncio.Event().wait()
    life.engine.freed_share = 0.3 if fault == LEAVE else 1.0
    return await act(life)


async def _serve(life: _Process, dp_rank: int, request: GenerationRequest) -> GenerationOutput:
    with life.gate.enter():
        prior = request.prior.token_ids
        try:
            output = await life.engine.generate(
                request.request_id,
                (*request.prompt_ids, *prior),
                request.max_new_tokens - len(prior),
                request.stop_ids,
            )
        except EngineDeadError as error:
            raise ShardPreemptedError(dp_rank) from error
        partial = _as_partial(output)
        if output.finish_reason == "abort":
            raise ShardPreemptedError(dp_rank, partial, epoch=life.gate.epoch)
        return GenerationOutput(
            request.request_id,
            partial.token_ids,
            partial.logprobs,
            partial.segments,
            output.finish_reason,
            dp_rank,
        )


def _as_partial(output: EngineOutput) -> PartialGeneration:
    segments = join_segments((), tuple(Segment(stamp, 1) for stamp in output.stamps))
    return PartialGeneration(
        output.token_ids, tuple(-(token % 100) / 100 for token in output.token_ids), segments
    )
