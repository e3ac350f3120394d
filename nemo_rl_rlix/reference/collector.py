"""The trajectory collector: generates prompt groups ahead of training.

It runs an event loop in a thread of its own. What a group needs from the GPU goes
through ``dispatch``, which hides preemption; what it needs from the verifier only
takes time. Reports of demand count the former: a trajectory that only waits for
its verifier wants no GPU.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    NoLiveShardError,
    PipelineClosedError,
    RLixError,
)
from nemo_rl_rlix.hooks import RLixHooks
from nemo_rl_rlix.reference.buffer import DuplicateGroupError, ReplayBuffer, Reservation
from nemo_rl_rlix.reference.task import Problem, Task, Workload, reward, verifier_seconds
from nemo_rl_rlix.reference.tokenizer import EOS_ID, decode, encode
from nemo_rl_rlix.reference.trajectory import PromptGroup, Trajectory
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest

logger = logging.getLogger(__name__)

Dispatch = Callable[[GenerationRequest], Awaitable[GenerationOutput]]
"""Has a request answered, however often its shard is taken."""

FATAL = (NoLiveShardError, PipelineClosedError, ControlPlaneLostError)
"""Errors that another attempt cannot cure."""

REPORT_SHARE = 0.02
"""Demand is reported when this share of it has been met since the last report."""


class CollectionFailedError(RLixError):
    """The collector has given up; the run must end."""

    def __init__(self, what: str, cause: str) -> None:
        super().__init__(f"trajectory collection failed: {what}: {cause}")
        self.what = what
        self.cause = cause


@dataclass(frozen=True)
class CollectorConfig:
    """How trajectories are collected.

    Attributes:
        name: Pipeline, for request ids and the log.
        workload: What one step asks for.
        seed: Seed of sampling and of the verifier's time.
        max_groups: Groups that generate at the same time.
        max_attempts: Attempts at one group before the run fails.
        retry_pause_s: Seconds before a failed group is tried again.
    """

    name: str
    workload: Workload
    seed: int = 0
    max_groups: int = 16
    max_attempts: int = 4
    retry_pause_s: float = 0.1


@dataclass(frozen=True)
class CollectorStats:
    """What has been generated since the start.

    Attributes:
        tokens: Response tokens of finished generations.
        trajectories: Finished generations.
        dispatches: Dispatches to shards that accepted the request.
        preempted: Of these, the ones that were interrupted.
        tokens_kept: Tokens of interrupted dispatches that became part of an answer.
        tokens_dropped: Tokens of interrupted dispatches that were thrown away.
        groups: Groups pushed.
        retries: Attempts at groups that failed.
        generating: Trajectories that wait for, or use, a GPU now.
        verifying: Trajectories that only wait for the verifier now.
    """

    tokens: int = 0
    trajectories: int = 0
    dispatches: int = 0
    preempted: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    groups: int = 0
    retries: int = 0
    generating: int = 0
    verifying: int = 0


class ProgressReporter:
    """Decides when a snapshot of demand is worth a report, and makes it.

    Args:
        hooks: Receives the reports; called from the collector's thread.
    """

    def __init__(self, hooks: RLixHooks) -> None:
        self._hooks = hooks
        self._last: tuple[int, int] | None = None

    def update(self, collected: int, target: int, *, open_groups: bool) -> None:
        """Take note of the demand at this moment.

        Args:
            collected: Trajectories of all targets allowed now that are generated.
            target: Trajectories of all targets allowed now.
            open_groups: Whether any of their groups is not complete. Then one may
                still fail and want a GPU again, so nothing is cleared.
        """
        if not open_groups:
            self.clear()
            return
        if worth_reporting(self._last, collected, target):
            self._last = (collected, target)
            self._hooks.report_progress(collected, target)

    def clear(self) -> None:
        """State that nothing can be wanted, if anything was."""
        if self._last is not None:
            self._last = None
            self._hooks.clear_progress()


def worth_reporting(last: tuple[int, int] | None, collected: int, target: int) -> bool:
    """Whether ``(collected, target)`` says something that the last report did not.

    Another target, an end of the demand, a step back and every 2 % forward do.
    """
    if last is None or target != last[1] or collected < last[0]:
        return True
    if collected == last[0]:
        return False
    return collected == target or collected - last[0] >= REPORT_SHARE * target


class TrajectoryCollector:
    """Fills a replay buffer until it is stopped or fails.

    Args:
        config: Workload, limits and seed.
        task: Problems.
        buffer: Receives the groups, and says which are wanted.
        dispatch: Has one request answered.
        hooks: Receives reports of demand.
        on_failure: Called once, from the collector's thread, when it gives up.
    """

    def __init__(
        self,
        config: CollectorConfig,
        *,
        task: Task,
        buffer: ReplayBuffer,
        dispatch: Dispatch,
        hooks: RLixHooks,
        on_failure: Callable[[CollectionFailedError], None] | None = None,
    ) -> None:
        self._config, self._task, self._buffer = config, task, buffer
        self._dispatch, self._on_failure = dispatch, on_failure
        self._reporter = ProgressReporter(hooks)
        self._version = 0
        self._stats = CollectorStats()
        self._generated: dict[str, int] = {}
        self._failure: CollectionFailedError | None = None
        self._stopping = False
        self._loop = asyncio.new_event_loop()
        self._wake = asyncio.Event()
        self._thread = threading.Thread(
            target=self._run, name=f"collector-{config.name}", daemon=True
        )

    # -- called from any thread ---------------------------------------------------

    def start(self, version: int) -> None:
        """Begin with the weights at ``version``."""
        self._version = version
        self._thread.start()

    def set_version(self, version: int) -> None:
        """The shards serve ``version`` from now on; further targets become allowed."""
        self._call(lambda: self._advance(version))

    def stop(self, timeout_s: float) -> None:
        """Cancel everything in flight and end; idempotent. Open groups stay to be done.

        Raises:
            DeadlineExceededError: A dispatch does not heed its cancellation.
        """
        if self._thread.ident is None:
            self._loop.close()
            return
        self._call(self._begin_stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise DeadlineExceededError(f"stop of the collector of {self._config.name}", timeout_s)

    @property
    def failure(self) -> CollectionFailedError | None:
        """Why it gave up, if it did."""
        return self._failure

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._thread.is_alive()

    @property
    def stats(self) -> CollectorStats:
        """What it has generated."""
        return self._stats

    def _call(self, act: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(act)
        except RuntimeError:
            # The loop is closed: it has stopped or failed, and nothing is left to tell it.
            logger.debug("collector %s has ended already", self._config.name)

    # -- on the collector's thread --------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._collect())
        finally:
            self._loop.close()

    def _advance(self, version: int) -> None:
        self._version = max(self._version, version)
        self._wake.set()

    def _begin_stop(self) -> None:
        self._stopping = True
        self._wake.set()

    async def _collect(self) -> None:
        groups: set[asyncio.Task[None]] = set()
        slots = asyncio.Semaphore(self._config.max_groups)
        try:
            while not self._stopping and self._failure is None:
                self._wake.clear()
                while reservation := self._buffer.reserve(self._version):
                    self._generated[reservation.group_id] = 0
                    groups.add(self._loop.create_task(self._serve(reservation, slots)))
                self._report()
                await self._wake.wait()
                groups = {group for group in groups if not group.done()}
        except Exception as error:  # noqa: BLE001  a dead thread must not pass for a slow one
            self._fail("collector", error)
        finally:
            for group in groups:
                group.cancel()
            await asyncio.gather(*groups, return_exceptions=True)
            self._end()

    def _end(self) -> None:
        try:
            self._reporter.clear()
        except RLixError as error:
            logger.warning("collector %s: %s", self._config.name, error)
        if self._failure is not None:
            logger.error("collector %s: %s", self._config.name, self._failure)
            self._buffer.close(str(self._failure))
            if self._on_failure is not None:
                self._on_failure(self._failure)

    async def _serve(self, reservation: Reservation, slots: asyncio.Semaphore) -> None:
        """Bring one reservation to its end: pushed, or given back."""
        pushed = False
        try:
            group = await self._make(reservation, slots)
            self._buffer.push(reservation, group)
            pushed = True
            self._stats = replace(self._stats, groups=self._stats.groups + 1)
        except Exception as error:  # noqa: BLE001  whatever ends a group costs it an attempt
            self._count_failure(reservation, error)
            self._generated[reservation.group_id] = 0
            if self._failure is None:
                self._report()  # What the attempt had is wanted once more.
                await asyncio.sleep(self._config.retry_pause_s)
        finally:
            if not pushed:
                self._give_back(reservation)
            self._generated.pop(reservation.group_id, None)
            self._wake.set()

    def _give_back(self, reservation: Reservation) -> None:
        try:
            self._buffer.fail(reservation)
        except DuplicateGroupError as error:
            # The buffer was restored meanwhile: the group has another attempt by now.
            logger.warning("collector %s: %s", self._config.name, error)

    def _count_failure(self, reservation: Reservation, error: Exception) -> None:
        self._stats = replace(self._stats, retries=self._stats.retries + 1)
        name, attempt = reservation.group_id, reservation.attempt + 1
        logger.warning("group %s failed at attempt %d: %r", name, attempt, error)
        if isinstance(error, FATAL) or attempt >= self._config.max_attempts:
            self._fail(f"group {name}, attempt {attempt}", error)

    def _fail(self, what: str, error: Exception) -> None:
        if self._failure is None:
            self._failure = CollectionFailedError(what, f"{type(error).__name__}: {error}")
            self._failure.__cause__ = error
            self._wake.set()

    async def _make(self, reservation: Reservation, slots: asyncio.Semaphore) -> PromptGroup:
        problem = self._task.problem(reservation.target_version, reservation.index)
        try:
            async with asyncio.TaskGroup() as whole:
                async with slots:
                    answers = [
                        whole.create_task(self._generate(request, reservation.group_id))
                        for request in self._requests(reservation, problem)
                    ]
                    checks = [
                        whole.create_task(self._verify(problem, answer)) for answer in answers
                    ]
                    await asyncio.wait(answers)
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        trajectories = tuple(check.result() for check in checks)
        return PromptGroup(reservation.group_id, reservation.target_version, trajectories)

    def _requests(self, reservation: Reservation, problem: Problem) -> list[GenerationRequest]:
        workload = self._config.workload
        # An id of its own for each attempt: a cancelled request may still be in an engine.
        suffix = f"-a{reservation.attempt}" if reservation.attempt else ""
        names = [
            f"{reservation.group_id}-t{number}" for number in range(workload.generations_per_prompt)
        ]
        return [
            GenerationRequest(
                request_id=f"{self._config.name}-{name}{suffix}",
                prompt_ids=encode(problem.prompt),
                max_new_tokens=workload.max_new_tokens,
                temperature=workload.temperature,
                stop_ids=(EOS_ID,),
                seed=request_seed(self._config.seed, name),
            )
            for name in names
        ]

    async def _generate(
        self, request: GenerationRequest, group_id: str
    ) -> tuple[GenerationRequest, GenerationOutput]:
        self._stats = replace(self._stats, generating=self._stats.generating + 1)
        try:
            output = await self._dispatch(request)
        finally:
            self._stats = replace(self._stats, generating=self._stats.generating - 1)
        old = self._stats
        self._stats = replace(
            old,
            tokens=old.tokens + len(output.token_ids),
            trajectories=old.trajectories + 1,
            dispatches=old.dispatches + output.dispatches,
            preempted=old.preempted + output.dispatches - 1,
            tokens_kept=old.tokens_kept + output.tokens_kept,
            tokens_dropped=old.tokens_dropped + output.tokens_dropped,
        )
        self._generated[group_id] += 1
        self._report()
        return request, output

    async def _verify(
        self, problem: Problem, answer: asyncio.Task[tuple[GenerationRequest, GenerationOutput]]
    ) -> Trajectory:
        request, output = await answer
        config = self._config
        self._stats = replace(self._stats, verifying=self._stats.verifying + 1)
        try:
            await asyncio.sleep(verifier_seconds(config.workload, config.seed, request.request_id))
        finally:
            self._stats = replace(self._stats, verifying=self._stats.verifying - 1)
        ended = bool(output.token_ids) and output.token_ids[-1] == EOS_ID
        score = reward(problem, decode(output.token_ids), finished=ended)
        return Trajectory.from_output(request.prompt_ids, output, score)

    def _report(self) -> None:
        ready, wanted = self._buffer.progress(self._version)
        size = self._config.workload.generations_per_prompt
        collected = ready * size + sum(self._generated.values())
        target = wanted * size
        self._reporter.update(min(collected, target), target, open_groups=ready < wanted)


def request_seed(seed: int, name: str) -> int:
    """Seed of one trajectory's sampler: the same in every run, attempt and shard."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest(), "big")
