"""The embedded control plane: one Ray actor that runs the planner for all pipelines."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

from nemo_rl_rlix.control_plane.embedded.books import Books, PipelineRecord
from nemo_rl_rlix.control_plane.embedded.events import ControlEvent, EventKind, EventLog
from nemo_rl_rlix.control_plane.embedded.planner import (
    DEFAULT_CONFIG,
    PlannerConfig,
    make_plan,
    validate_plan,
)
from nemo_rl_rlix.control_plane.embedded.processes import end_pipeline, find_coordinator
from nemo_rl_rlix.control_plane.embedded.snapshot import Grant
from nemo_rl_rlix.control_plane.protocol import PipelineSpec, Priority, ProgressReport
from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    PipelineClosedError,
    RLixError,
)
from nemo_rl_rlix.ray_errors import Callee, unwrap

logger = logging.getLogger(__name__)

SCHEDULER_NAME = "rlix_embedded:scheduler"
CONTROL_NAMESPACE = "rlix_embedded"
MAX_CONCURRENCY = 10_000
"""Calls that may be open at once. A pipeline has at most one waiting request per cluster,
so waits cannot use these up and a report or a release always gets through."""

TICK_S = 1.0
MISSED_HEARTBEATS = 5
MAX_PAUSE_S = 0.5


class EmbeddedScheduler:
    """Grants GPUs and calls ``resize_infer``; RLix's calls, without its shared fate.

    Everything runs on one event loop: a decision and its booking are never
    interrupted, so there are no locks. What waits on a pipeline is a task of its
    own: a slow, failing or dead coordinator concerns no other pipeline.

    Run it as an actor under :data:`SCHEDULER_NAME`; see :mod:`.client`.

    Args:
        num_gpus: Logical GPUs of the cluster, ``None`` when unknown.
        config: What a switch must be worth.
        kill_s: Seconds in which the actors of an evicted pipeline must be gone.
    """

    def __init__(
        self,
        num_gpus: int | None = None,
        config: PlannerConfig = DEFAULT_CONFIG,
        kill_s: float = 15.0,
    ) -> None:
        self._events = EventLog()
        self._books = Books(num_gpus, time.monotonic, self._events)
        self._config = config
        self._kill_s = kill_s
        self._coordinators: dict[str, Any] = {}
        self._waiters: dict[tuple[str, str], asyncio.Future[list[int]]] = {}
        self._releases: dict[str, asyncio.Future[None]] = {}
        self._evicting: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None
        self._last_tick = time.monotonic()
        self._cycles = 0
        self._plan_s = 0.0
        self._blocked: dict[str, str] = {}
        self._fault = ""

    # --- life ------------------------------------------------------------

    async def start(self) -> None:
        """Begin to plan; a second call changes nothing."""
        if self._loop_task is None:
            self._last_tick = time.monotonic()
            self._loop_task = asyncio.create_task(self._run())

    async def shutdown(self) -> None:
        """Stop planning and end every wait. The caller kills the actor afterwards."""
        if self._loop_task is not None:
            self._loop_task.cancel()
        error = ControlPlaneLostError("the embedded control plane was shut down")
        waiters: list[asyncio.Future[Any]] = [*self._waiters.values(), *self._releases.values()]
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error)

    # --- registration ----------------------------------------------------

    async def register(
        self, spec: PipelineSpec, *, heartbeat_s: float = 2.0, resize_s: float = 180.0
    ) -> None:
        """Make a pipeline known and admit it; its coordinator exists already.

        Args:
            spec: What it registers.
            heartbeat_s: Interval of its heartbeats; silent for five, it is evicted.
            resize_s: Deadline of a resize; a pipeline that outlasts it is evicted.

        Raises:
            SettingError: It cannot work, e.g. there is no coordinator.
            RequestRefusedError: It is registered already.
        """
        await self.start()
        coordinator = await asyncio.to_thread(find_coordinator, spec)
        self._books.register(spec, heartbeat_s=heartbeat_s, resize_s=resize_s)
        self._coordinators[spec.pipeline_id] = coordinator
        logger.info("pipeline %s registered", spec.pipeline_id)

    async def unregister_pipeline(self, pipeline_id: str) -> None:
        """Forget a pipeline; its waiters end with ``PipelineClosedError``. Idempotent.

        Its GPUs are free at once, as with RLix, save those of a running resize: call
        ``await_release_gpus`` first where shards are in place.
        """
        record = self._books.pipelines.get(pipeline_id)
        if record is None:
            return
        if record.active:
            logger.warning(
                "pipeline %s unregisters with active shards %s", pipeline_id, sorted(record.active)
            )
        in_flight = set(record.gpus_of(record.shrinking | record.expanding))
        self._events.add(EventKind.UNREGISTER, pipeline_id)
        self._close(record, "it was unregistered", lost=in_flight or None)

    async def heartbeat(self, pipeline_id: str) -> None:
        """Say that a pipeline is alive.

        Raises:
            PipelineClosedError: It is not registered any more.
        """
        self._alive(self._books.record(pipeline_id))

    # --- requests --------------------------------------------------------

    async def request_gpus(
        self,
        *,
        cluster_id: str,
        priority: Priority,
        global_step: int | None = None,
        step_target_estimate: int | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Wait for GPUs; see :class:`~nemo_rl_rlix.control_plane.protocol.ControlPlane`.

        Raises:
            DeadlineExceededError: After ``timeout_s``; the request is withdrawn.
            RequestRefusedError: It does not fit what the pipeline holds.
            PipelineClosedError: The pipeline ended, with the cause.
        """
        record, cluster = self._books.resolve(cluster_id)
        self._alive(record)
        pid = record.spec.pipeline_id
        priority = Priority(priority)
        release = self._releases.get(pid)
        if release is not None and priority is Priority.GENERATION:
            await asyncio.wait_for(asyncio.shield(release), timeout_s)
            record, cluster = self._books.resolve(cluster_id)
        have = self._books.request(record, cluster, priority, step_target_estimate)
        self._wake.set()
        if have is not None:
            return have
        waiter: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters[(pid, cluster)] = waiter
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError as error:
            if _was_granted(waiter):
                return waiter.result()  # both happened in one turn of the loop
            self._books.withdraw(record, cluster)
            raise DeadlineExceededError(
                f"request of {cluster_id} at {priority.name} (step {global_step})",
                timeout_s or 0.0,
                self._blocked.get(f"{cluster_id}@{priority.name}", ""),
            ) from error
        except asyncio.CancelledError:
            if not _was_granted(waiter):
                self._books.withdraw(record, cluster)
            elif priority is Priority.GENERATION:
                # The shards serve and hold memory: they are taken, not struck off.
                self._books.stop_generation(record)
            else:
                self._books.release(record, cluster)
            raise
        finally:
            if self._waiters.get((pid, cluster)) is waiter:
                del self._waiters[(pid, cluster)]
            self._wake.set()

    async def cancel_request(self, *, cluster_id: str) -> bool:
        """Withdraw a waiting request; its waiter ends with ``PipelineClosedError``.

        Returns:
            Whether there was one; ``False`` when it was granted before.
        """
        record, cluster = self._books.resolve(cluster_id)
        self._alive(record)
        withdrawn = self._books.withdraw(record, cluster)
        waiter = self._waiters.get((record.spec.pipeline_id, cluster))
        if waiter is not None and not waiter.done():
            waiter.set_exception(PipelineClosedError(f"request of {cluster_id} was cancelled"))
        self._wake.set()
        return withdrawn

    async def notify_release_gpus(self, *, cluster_id: str, global_step: int | None = None) -> None:
        """Take back what a request got; the memory is free already.

        Raises:
            RequestRefusedError: It holds nothing, or a resize is running.
        """
        record, cluster = self._books.resolve(cluster_id)
        self._alive(record)
        self._books.release(record, cluster)
        self._wake.set()

    async def await_release_gpus(self, *, pipeline_id: str, timeout_s: float) -> None:
        """Have every shard taken; none comes back before a new request.

        Returns when no shard is in place and no resize is running, also when one
        was running as this was called.

        Raises:
            DeadlineExceededError: After ``timeout_s``; the shards are still being taken.
        """
        record = self._books.record(pipeline_id)
        self._alive(record)
        self._books.withdraw(record, "actor_infer")
        waiter = self._waiters.get((pipeline_id, "actor_infer"))
        if waiter is not None and not waiter.done():
            waiter.set_exception(PipelineClosedError(f"{pipeline_id} stopped generating"))
        self._books.stop_generation(record)
        release = self._releases.setdefault(pipeline_id, asyncio.get_running_loop().create_future())
        self._settle_release(record)
        self._wake.set()
        try:
            await asyncio.wait_for(asyncio.shield(release), timeout_s)
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"release of the shards of {pipeline_id}",
                timeout_s,
                f"still in place: {sorted(record.resident)}",
            ) from error

    async def report_progress(self, report: ProgressReport) -> None:
        """Replace the pipeline's demand snapshot."""
        record = self._books.record(report.pipeline_id)
        self._alive(record)
        if self._books.report(record, report):
            self._wake.set()

    async def clear_progress(self, *, pipeline_id: str) -> None:
        """Forget the pipeline's demand."""
        record = self._books.record(pipeline_id)
        self._alive(record)
        self._books.clear_progress(record)
        self._wake.set()

    # --- what others may look at -----------------------------------------

    async def status(self) -> dict[str, Any]:
        """The state as plain data: pipelines, GPUs, pending and blocked requests, timings."""
        return {
            **self._books.status(),
            "blocked": dict(self._blocked),
            "waiting_calls": len(self._waiters) + len(self._releases),
            "cycles": self._cycles,
            "seconds_per_plan": self._plan_s / max(self._cycles, 1),
            "fault": self._fault,
        }

    async def events(self, since: int = 0) -> list[ControlEvent]:
        """Events numbered above ``since`` that are still kept, oldest first."""
        return self._events.since(since)

    # --- planning --------------------------------------------------------

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), TICK_S)
            self._wake.clear()
            began = time.monotonic()
            try:
                self._evict_silent(began)
                self._cycle()
            except Exception as error:
                self._fault = repr(error)
                logger.exception("planning cycle failed")
            spent = time.monotonic() - began
            self._cycles += 1
            self._plan_s += spent
            # Leave the loop to the calls for as long as the planning took.
            await asyncio.sleep(min(spent, MAX_PAUSE_S))

    def _evict_silent(self, now: float) -> None:
        gap = now - self._last_tick
        self._last_tick = now
        if gap > 2 * TICK_S:
            # This process stood still: heartbeats that came meanwhile are not read yet.
            for record in self._books.pipelines.values():
                record.last_seen += gap
        for pid, silence in self._books.silent(now, MISSED_HEARTBEATS):
            self._evict(self._books.pipelines[pid], f"no heartbeat for {silence:.1f} s")

    def _cycle(self) -> None:
        snapshot = self._books.snapshot()
        plan = make_plan(snapshot, self._config)
        validate_plan(snapshot, plan)
        self._blocked = plan.blocked
        self._books.keep_promises(plan)
        for pid, ranks in plan.shrinks.items():
            self._start_resize(pid, ranks, shrink=True)
        for pid, ranks in plan.expands.items():
            self._start_resize(pid, ranks, shrink=False)
        for grant in plan.grants:
            self._grant(grant)

    def _grant(self, grant: Grant) -> None:
        waiter = self._waiters.get((grant.pipeline_id, grant.cluster))
        if waiter is None or waiter.done():
            # Its caller timed out or was cancelled and has not withdrawn it yet.
            self._books.withdraw(self._books.pipelines[grant.pipeline_id], grant.cluster)
            return
        self._books.grant(grant)
        waiter.set_result(list(grant.gpus))

    # --- resizes ---------------------------------------------------------

    def _start_resize(self, pid: str, ranks: tuple[int, ...], *, shrink: bool) -> None:
        record = self._books.pipelines[pid]
        self._books.resize_started(pid, ranks, shrink=shrink)
        self._spawn(self._resize(record, ranks, shrink=shrink))

    def _spawn(self, act: Any) -> None:
        task = asyncio.get_running_loop().create_task(act)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resize(
        self, record: PipelineRecord, ranks: tuple[int, ...], *, shrink: bool
    ) -> None:
        pid = record.spec.pipeline_id
        verb = "shrink" if shrink else "expand"
        coordinator = self._coordinators[pid]
        began = time.monotonic()
        cause = ""
        try:
            reference = coordinator.resize_infer.remote(
                dp_ranks_to_remove=list(ranks) if shrink else [],
                dp_ranks_to_add=[] if shrink else list(ranks),
            )
            await asyncio.wait_for(asyncio.wrap_future(reference.future()), record.resize_s)
        except TimeoutError:
            cause = f"{verb} of {list(ranks)} did not end within {record.resize_s:g} s"
        except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this pipeline alone
            raised = unwrap(error, Callee(f"resize_infer of {pid}", timeout_s=record.resize_s))
            cause = f"{verb} of {list(ranks)} raised {type(raised).__name__}: {raised}"
        seconds = time.monotonic() - began
        if self._books.pipelines.get(pid) is record:
            if cause:
                self._evict(record, cause)
            else:
                self._books.resize_ended(record, ranks, shrink=shrink, seconds=seconds)
                self._settle_release(record)
        elif pid not in self._evicting:
            await self._resize_of_unregistered(record, ranks, coordinator, cause)
        self._wake.set()

    async def _resize_of_unregistered(
        self, record: PipelineRecord, ranks: tuple[int, ...], coordinator: Any, cause: str
    ) -> None:
        """Return the GPUs that a resize kept after the pipeline was unregistered."""
        if cause:
            await asyncio.to_thread(end_pipeline, record.spec, coordinator, timeout_s=self._kill_s)
        self._books.recover(record.spec.pipeline_id, set(record.gpus_of(ranks)))

    def _settle_release(self, record: PipelineRecord) -> None:
        release = self._releases.get(record.spec.pipeline_id)
        if release is None or record.resident:
            return
        del self._releases[record.spec.pipeline_id]
        if not release.done():
            release.set_result(None)

    # --- the end of a pipeline -------------------------------------------

    def _evict(self, record: PipelineRecord, cause: str) -> None:
        """End a pipeline that failed; its GPUs come back when its actors are gone."""
        pid = record.spec.pipeline_id
        logger.error("pipeline %s is evicted: %s", pid, cause)
        lost = self._books.occupied_by(record)
        self._events.add(EventKind.EVICT, pid, gpus=tuple(sorted(lost)), detail=cause)
        coordinator = self._coordinators[pid]
        self._evicting.add(pid)
        self._close(record, f"it was evicted: {cause}", lost=lost)
        self._spawn(self._finish_eviction(record, coordinator, tuple(sorted(lost))))

    async def _finish_eviction(
        self, record: PipelineRecord, coordinator: Any, gpus: tuple[int, ...]
    ) -> None:
        pid = record.spec.pipeline_id
        began = time.monotonic()
        try:
            gone = await asyncio.to_thread(
                end_pipeline, record.spec, coordinator, timeout_s=self._kill_s
            )
        except Exception:
            logger.exception("pipeline %s: eviction failed, GPUs %s stay unused", pid, gpus)
            return
        finally:
            self._evicting.discard(pid)
        if gone:
            self._books.recover(pid)
            self._events.add(EventKind.EVICTED, pid, gpus=gpus, seconds=time.monotonic() - began)
        self._wake.set()

    def _close(self, record: PipelineRecord, cause: str, *, lost: set[int] | None) -> None:
        pid = record.spec.pipeline_id
        self._books.close(pid, cause, lost=lost)
        self._coordinators.pop(pid, None)
        error: RLixError = PipelineClosedError(f"pipeline {pid} has ended: {cause}")
        for (owner, _), waiter in self._waiters.items():
            if owner == pid and not waiter.done():
                waiter.set_exception(error)
        release = self._releases.pop(pid, None)
        if release is not None and not release.done():
            release.set_exception(error)
            release.exception()  # awaited or not, it is not an unread failure
        self._wake.set()

    def _alive(self, record: PipelineRecord) -> None:
        record.last_seen = max(record.last_seen, time.monotonic())


def _was_granted(waiter: asyncio.Future[list[int]]) -> bool:
    return waiter.done() and not waiter.cancelled() and waiter.exception() is None
