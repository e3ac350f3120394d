"""The coordinator of one pipeline: owns its shards, obeys the scheduler.

One Ray actor per pipeline, in the pipeline's namespace, under the name that the
scheduler looks up. Long polls of routers have a concurrency group of their own,
so that however many wait, ``resize_infer`` is answered.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import ray

from nemo_rl_rlix.control_plane.protocol import (
    ActionResponse,
    coordinator_name,
    pipeline_namespace,
)
from nemo_rl_rlix.errors import DeadlineExceededError, PipelineClosedError, RLixError
from nemo_rl_rlix.observe.switches import SwitchTracer
from nemo_rl_rlix.observe.trace import open_tracer
from nemo_rl_rlix.ray_errors import Callee, unwrap
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.shards.owner import ShardOwner
from nemo_rl_rlix.shards.protocol import InferenceShard, ResizeReport
from nemo_rl_rlix.shards.sequences import SequenceContext
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot
from nemo_rl_rlix.shards.table import ShardTable
from nemo_rl_rlix.weights.book import CacheBook
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)

POLL_THREADS = 64
"""Routers that can wait at once; further ones queue behind polls that end within seconds."""

CONCURRENCY_GROUPS = {"resize": 8, "poll": POLL_THREADS, "train": 4, "control": 8}


class DeviceGuard(Protocol):
    """Told which devices a shard may use; a host without such book-keeping has none."""

    def grant(self, dp_rank: int) -> None:
        """The shard's GPUs are its own from now on."""
        ...

    def revoke(self, dp_rank: int) -> None:
        """The shard's GPUs are free from now on. Idempotent."""
        ...


class Heartbeat(Protocol):
    """The part of a control plane that a coordinator calls by itself."""

    def heartbeat(self) -> None:
        """State that the pipeline lives."""
        ...


@dataclass(frozen=True)
class CoordinatorPlan:
    """What a coordinator is made from; travels to its process.

    Attributes:
        pipeline_id: The pipeline.
        settings: Its ``rlix:`` block.
        shard_gpus: dp rank -> logical GPU ids.
        make_shards: Makes the control surfaces, in the coordinator's process, whose
            children the engines' processes become: they end with it.
        make_guard: Makes the device guard, if the host has one.
        initial_version: Version of the weights that training starts from.
        clear_cache_on_refresh: Whether an update in place drops running requests' KV cache.
        trace_name: Name of the pipeline on trace tracks.
    """

    pipeline_id: str
    settings: RLixSettings
    shard_gpus: Mapping[int, tuple[int, ...]]
    make_shards: Callable[[], Mapping[int, InferenceShard]]
    make_guard: Callable[[], DeviceGuard] | None = None
    initial_version: int = 0
    clear_cache_on_refresh: bool = False
    trace_name: str = ""


@dataclass(frozen=True)
class CoordinatorStatus:
    """A coordinator's account of itself.

    Attributes:
        pipeline_id: The pipeline.
        routing: States of the shards.
        switch_seconds: Direction -> seconds of every switch so far.
        failures: Times a shard failed.
        resizes: Resizes served.
        cause_of_failures: dp rank -> why it failed last.
    """

    pipeline_id: str
    routing: RoutingSnapshot
    switch_seconds: dict[str, list[float]]
    failures: int
    resizes: int
    cause_of_failures: dict[int, str] = field(default_factory=dict)


class PipelineCoordinator:
    """See the module; :func:`start_coordinator` makes it an actor.

    Args:
        plan: What it is made from.
    """

    def __init__(self, plan: CoordinatorPlan) -> None:
        settings = plan.settings
        self._plan = plan
        self._name = plan.trace_name or plan.pipeline_id
        self._tracer = open_tracer(settings.trace_dir, f"{self._name}-coordinator")
        self._switches = SwitchTracer(self._tracer, self._name, plan.shard_gpus)
        self._table = ShardTable(
            plan.shard_gpus, published_version=plan.initial_version, listener=self._switches
        )
        self._book = CacheBook(slots=settings.weight_cache.slots)
        self._guard = plan.make_guard() if plan.make_guard is not None else None
        self._owner = ShardOwner(
            plan.make_shards(),
            SequenceContext(
                table=self._table,
                weights=self._book,
                deadlines=settings.deadlines,
                sleep_level=settings.sleep_level,
                clear_cache_on_refresh=plan.clear_cache_on_refresh,
            ),
            name=self._name,
        )
        self._resizes = 0
        self._stop = threading.Event()
        self._monitors: list[threading.Thread] = []

    @ray.method(concurrency_group="resize")
    def resize_infer(
        self, dp_ranks_to_remove: list[int], dp_ranks_to_add: list[int]
    ) -> ActionResponse:
        """Take shards away, or bring shards in, for the scheduler.

        Ranks that are already as wanted are no-ops, duplicates count once.

        Raises:
            ShardFailedError: Memory of a shard cannot be got back by any means; the
                GPU must not be handed over.
        """
        self._resizes += 1
        with self._tracer.span(
            "control", "resize", remove=list(dp_ranks_to_remove), add=list(dp_ranks_to_add)
        ):
            if dp_ranks_to_remove:
                self._log(self._owner.shrink(dp_ranks_to_remove))
                self._for_known(dp_ranks_to_remove, "revoke")
            if dp_ranks_to_add:
                try:
                    self._table.check_open()
                    self._for_known(dp_ranks_to_add, "grant")
                    self._log(self._owner.expand(dp_ranks_to_add))
                except PipelineClosedError:
                    # A resize that crosses the end of the pipeline is no fault.
                    self._for_known(dp_ranks_to_add, "revoke")
                    logger.info("%s has ended; expand of %s ignored", self._name, dp_ranks_to_add)
        return ActionResponse(success=True)

    @ray.method(concurrency_group="poll")
    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        """The routing state as soon as it is newer than ``epoch``, or after ``timeout_s``."""
        return self._table.wait_newer(epoch, timeout_s)

    @ray.method(concurrency_group="control")
    def suspect(self, dp_rank: int) -> None:
        """Look after a shard that a router found gone."""
        self._owner.suspect(dp_rank)

    @ray.method(concurrency_group="control")
    def status(self) -> CoordinatorStatus:
        """What the shards do and what it cost."""
        records = [self._table.get(rank) for rank in self._table.dp_ranks]
        return CoordinatorStatus(
            pipeline_id=self._plan.pipeline_id,
            routing=self._table.snapshot(),
            switch_seconds=self._switches.seconds,
            failures=self._switches.failures,
            resizes=self._resizes,
            cause_of_failures={r.dp_rank: r.cause for r in records if r.cause},
        )

    @ray.method(concurrency_group="train")
    def build_shards(self) -> None:
        """Build every engine, under an INITIALIZATION grant; each ends asleep."""
        for rank in self._table.dp_ranks:
            self._for_known([rank], "grant")
        try:
            self._owner.build()
        finally:
            for rank in self._table.dp_ranks:
                self._for_known([rank], "revoke")

    @ray.method(concurrency_group="train")
    def begin_cache_build(self) -> int:
        """Reserve a slot of the weight cache that no reader uses."""
        return self._book.begin_build(self._plan.settings.deadlines.cache_build_s)

    @ray.method(concurrency_group="train")
    def commit_cache(self, handle: CacheHandle) -> None:
        """Make a complete cache the newest one; not yet published to requests."""
        self._book.commit(handle)

    @ray.method(concurrency_group="train")
    def abort_cache(self, slot: int) -> None:
        """Give a slot back whose build failed."""
        self._book.abort(slot)

    @ray.method(concurrency_group="train")
    def refresh_and_publish(self, version: int) -> ResizeReport:
        """Update serving shards in place to the newest cache, then publish ``version``."""
        report = self._owner.refresh_and_publish(version)
        self._log(report)
        return report

    @ray.method(concurrency_group="control")
    def attach(self, control_plane: Heartbeat) -> None:
        """Start heartbeats, once the pipeline is registered."""
        if self._monitors:
            return
        # Two threads: a hung engine must not make the pipeline look dead.
        self._monitors = [
            threading.Thread(
                target=self._beat, args=(control_plane,), name="heartbeat", daemon=True
            ),
            threading.Thread(target=self._look_after, name="look-after", daemon=True),
        ]
        for monitor in self._monitors:
            monitor.start()

    @ray.method(concurrency_group="control")
    def close(self) -> None:
        """Stop heartbeats, end waiting requests, end the engines. Idempotent."""
        self._stop.set()
        self._owner.close()
        self._for_known(self._table.dp_ranks, "revoke")
        self._tracer.close()

    def _beat(self, control_plane: Heartbeat) -> None:
        while not self._stop.wait(self._plan.settings.heartbeat_s):
            try:
                control_plane.heartbeat()
            except DeadlineExceededError as error:
                logger.warning("%s: %s", self._name, error)
            except Exception as error:  # noqa: BLE001  waiting requests must end, whatever ends the beat
                if not self._stop.is_set():
                    self._table.fail(f"the control plane no longer serves {self._name}: {error}")
                return

    def _look_after(self) -> None:
        while not self._stop.wait(self._plan.settings.heartbeat_s):
            self._owner.check_serving()
            self._tracer.flush()

    def _for_known(self, dp_ranks: Iterable[int], act: str) -> None:
        if self._guard is None:
            return
        for rank in sorted(set(dp_ranks) & set(self._table.dp_ranks)):
            if act == "grant":
                self._guard.grant(rank)
            elif not self._table.get(rank).granted:
                # An expand that came meanwhile has been granted the rank again.
                self._guard.revoke(rank)

    def _log(self, report: ResizeReport) -> None:
        for outcome in report.outcomes:
            if outcome.cause:
                logger.warning(
                    "%s shard %d is %s after a resize: %s",
                    self._name,
                    outcome.dp_rank,
                    outcome.state,
                    outcome.cause,
                )


def start_coordinator(plan: CoordinatorPlan, **actor_options: Any) -> Any:
    """Start the coordinator actor of a pipeline and wait until it answers.

    Args:
        plan: What it is made from.
        actor_options: Further Ray actor options (environment, placement).

    Returns:
        The actor handle. The actor ends with the process that called this.

    Raises:
        ControlPlaneLostError: It could not be started.
    """
    timeout_s = plan.settings.deadlines.build_s
    actor_class: Any = ray.remote(concurrency_groups=CONCURRENCY_GROUPS)(PipelineCoordinator)
    handle = actor_class.options(
        name=coordinator_name(plan.pipeline_id),
        namespace=pipeline_namespace(plan.pipeline_id),
        num_cpus=0,
        max_concurrency=4,
        **actor_options,
    ).remote(plan)
    call(handle, "status", timeout_s=timeout_s)
    return handle


def call(handle: Any, method: str, *args: Any, timeout_s: float) -> Any:
    """Call a coordinator with a deadline and this package's errors.

    Raises:
        DeadlineExceededError: No answer within ``timeout_s``.
        ControlPlaneLostError: The coordinator is gone.
    """
    try:
        return ray.get(getattr(handle, method).remote(*args), timeout=timeout_s)
    except (ray.exceptions.RayError, RLixError) as error:
        callee = Callee(f"{method} of the coordinator", timeout_s=timeout_s)
        raise unwrap(error, callee) from error


class CoordinatorSource:
    """A router's way to the coordinator; picklable.

    Args:
        handle: Actor handle of the coordinator.
        grace_s: Seconds beyond a poll's own limit before it counts as unanswered.
    """

    def __init__(self, handle: Any, *, grace_s: float) -> None:
        self._handle = handle
        self._grace_s = grace_s

    def poll(self, epoch: int, timeout_s: float) -> RoutingSnapshot:
        """See ``SnapshotSource.poll``."""
        return call(self._handle, "poll", epoch, timeout_s, timeout_s=timeout_s + self._grace_s)

    def suspect(self, dp_rank: int) -> None:
        """See ``SnapshotSource.suspect``."""
        self._handle.suspect.remote(dp_rank)
