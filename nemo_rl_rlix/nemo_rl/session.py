"""The time-shared run of this driver: what it is made of, from its start to its end.

One object per run, made by the wrapper around NeMo RL's ``setup`` and found by the
replacements of NeMo RL's classes through :func:`current`. The order of its acts is the
contract with the scheduler: register, build the trainer, then the engines, each under
a grant of its own; train between two grants; at the end no new resizes, then
unregister, and only then the workers may die.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Protocol

from nemo_rl_rlix.control_plane.coordinator import CoordinatorSource, DeviceGuard, call
from nemo_rl_rlix.control_plane.keeper import RemoteKeeper
from nemo_rl_rlix.control_plane.protocol import INFER_CLUSTER, ControlPlane, Priority
from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    GrantRequiredError,
    PipelineClosedError,
    RLixError,
)
from nemo_rl_rlix.hooks import RLixHooks
from nemo_rl_rlix.nemo_rl.demand_hooks import CollectorHooks, repeat_demand
from nemo_rl_rlix.nemo_rl.leaders import announce
from nemo_rl_rlix.nemo_rl.trainer import DeferredTrainer, EndableTrainer
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.shards.protocol import InferenceShard
from nemo_rl_rlix.topology import Topology
from nemo_rl_rlix.training.hooks import TimeSharingHooks, TrainGuard

logger = logging.getLogger(__name__)

POLL_GRACE_S = 5.0
"""Seconds beyond a long poll's own limit before the coordinator counts as silent."""


class State(StrEnum):
    """Where a run is."""

    BUILDING = "building"
    RUNNING = "running"
    LEFT = "left"
    CLOSED = "closed"


class ClusterView(Protocol):
    """The part of the shared placement groups that a session gives back."""

    def release(self) -> None:
        """Stop using the GPUs."""
        ...


@dataclass(frozen=True)
class Host:
    """What runs below NeMo RL's classes; tests put other engines and trainers there.

    Attributes:
        make_shards: Pipeline id and dp ranks -> control surfaces. Called in the
            coordinator's process, so it is picklable; it finds the leaders by
            ``leaders.find``.
        make_trainer: The policy object and the session -> its trainer.
        make_shard_guard: Device book-keeping of the host, if it has one; picklable.
        train_guard: The same for the training GPUs.
    """

    make_shards: Callable[[str, tuple[int, ...]], Mapping[int, InferenceShard]]
    make_trainer: Callable[[Any, Session], EndableTrainer]
    make_shard_guard: Callable[[], DeviceGuard] | None = None
    train_guard: TrainGuard | None = None


@dataclass(frozen=True)
class Parts:
    """What a session holds, made by :mod:`nemo_rl_rlix.nemo_rl.start`.

    Attributes:
        pipeline_id: The pipeline.
        settings: Its ``rlix:`` block.
        topology: Its GPUs.
        control_plane: Its scheduler, registered.
        coordinator: Actor handle of its coordinator.
        cluster: The shared placement groups, ``SharedCluster`` in a run.
        host: What runs below NeMo RL's classes.
        first_step: Training steps done before this run; the version of its first weights.
        demand_estimate: Trajectories that are wanted at the start.
        validation_samples: Trajectories of one validation.
    """

    pipeline_id: str
    settings: RLixSettings
    topology: Topology
    control_plane: ControlPlane
    coordinator: Any
    cluster: ClusterView
    host: Host
    first_step: int = 0
    demand_estimate: int = 1
    validation_samples: int = 1


class Session:
    """See the module.

    Args:
        parts: What it holds.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._limits = parts.settings.deadlines
        self._state = State.BUILDING
        self._step = parts.first_step
        self._failure: BaseException | None = None
        self._trainer = DeferredTrainer()
        self._trainer_turn_over = threading.Event()
        self._generating = False
        self._ending = threading.RLock()
        self._hooks = TimeSharingHooks(
            parts.pipeline_id,
            control_plane=parts.control_plane,
            trainer=self._trainer,
            keeper=RemoteKeeper(parts.coordinator, self._limits),
            settings=parts.settings,
            guard=parts.host.train_guard,
        )

    # -- look ---------------------------------------------------------------------

    @property
    def pipeline_id(self) -> str:
        """Id of the pipeline, in names of actors and sockets."""
        return self._parts.pipeline_id

    @property
    def settings(self) -> RLixSettings:
        """The ``rlix:`` block."""
        return self._parts.settings

    @property
    def topology(self) -> Topology:
        """Its GPUs."""
        return self._parts.topology

    @property
    def coordinator(self) -> Any:
        """Actor handle of the coordinator; picklable."""
        return self._parts.coordinator

    @property
    def cluster(self) -> Any:
        """The shared placement groups."""
        return self._parts.cluster

    @property
    def router_source(self) -> CoordinatorSource:
        """What a ``ShardRouter`` polls; picklable, so that it reaches the collector."""
        return CoordinatorSource(self.coordinator, grace_s=POLL_GRACE_S)

    @property
    def hooks(self) -> TimeSharingHooks:
        """The hooks of the training loop."""
        return self._hooks

    @property
    def step(self) -> int:
        """Training steps done, which is the version of the published weights."""
        return self._step

    @property
    def state(self) -> State:
        """Where the run is."""
        return self._state

    @property
    def failure(self) -> BaseException | None:
        """The first error that time sharing met, ``None`` without one."""
        return self._failure

    def fail(self, error: BaseException) -> None:
        """Remember why the run cannot go on; the first reason stays."""
        if self._failure is None:
            self._failure = error

    def collector_hooks(self) -> RLixHooks:
        """Hooks for the collector and the buffer: picklable, never blocking."""
        return CollectorHooks(self.pipeline_id, self._parts.control_plane)

    # -- build --------------------------------------------------------------------

    @contextlib.contextmanager
    def trainer_turn(self) -> Iterator[None]:
        """Build the trainer inside; afterwards its weights are cached and its GPUs free.

        The body ends with :meth:`bind_trainer`.
        """
        try:
            self._hooks.acquire(self._step, Priority.INITIALIZATION)
            try:
                yield
                self._hooks.hand_over(self._step)
            finally:
                self._hooks.release(self._step)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._trainer_turn_over.set()

    def bind_trainer(self, policy: Any) -> None:
        """Take the trainer of a policy that has been built."""
        self._trainer.bind(self._parts.host.make_trainer(policy, self))

    @contextlib.contextmanager
    def build_turn(self) -> Iterator[None]:
        """Build the engines inside, after the trainer; afterwards they are asleep.

        NeMo RL builds both at the same time, in two threads, of which this one waits.

        Raises:
            PipelineClosedError: The trainer could not be built.
            DeadlineExceededError: It took too long.
        """
        limits = self._limits
        patience = limits.grant_s + limits.build_s + limits.cache_build_s + limits.offload_s
        if not self._trainer_turn_over.wait(patience):
            raise DeadlineExceededError("build of the trainer", patience)
        if self._failure is not None:
            raise PipelineClosedError(f"engines are not built: {self._failure}") from self._failure
        self._check_open("build engines")
        plane = self._parts.control_plane
        try:
            plane.request_gpus(INFER_CLUSTER, Priority.INITIALIZATION, timeout_s=limits.grant_s)
            try:
                yield
                call(self.coordinator, "build_shards", timeout_s=limits.build_s)
            finally:
                plane.release_gpus(INFER_CLUSTER)
        except BaseException as error:
            self.fail(error)
            raise

    def announce_leaders(self, leaders: Mapping[int, Any]) -> None:
        """Tell the coordinator the worker actors of its shards.

        Args:
            leaders: dp rank -> handle of the worker that owns the engine.
        """
        announce(self.coordinator, dict(leaders), timeout_s=self._limits.control_s)

    def built(self) -> None:
        """State that the setup has ended."""
        self._state = State.RUNNING

    # -- run ----------------------------------------------------------------------

    def start_generation(self) -> None:
        """Ask for inference GPUs; returns once one shard serves. Idempotent.

        The published weights are the trainer's, so nothing is transferred again.
        """
        if self._generating:
            return
        with self._remember_failure():
            self._parts.control_plane.request_gpus(
                INFER_CLUSTER,
                Priority.GENERATION,
                step_target_estimate=self._parts.demand_estimate,
                timeout_s=self._limits.grant_s,
            )
        self._generating = True

    @property
    def generating(self) -> bool:
        """Whether generation has been started."""
        return self._generating

    def before_training(self) -> None:
        """Return once the training GPUs are granted and the trainer is on them."""
        self._check_open("train")
        with self._remember_failure():
            self._hooks.before_training(self._step)

    def after_training(self) -> None:
        """Publish the weights of this step and give the training GPUs back."""
        with self._remember_failure():
            self._hooks.after_training(self._step)
        self._step += 1

    @contextlib.contextmanager
    def grant(self) -> Iterator[None]:
        """Hold the training GPUs, the trainer on them, for a call outside of a step.

        Inside of a step it changes nothing.
        """
        if self._hooks.holds_training_gpus:
            yield
            return
        self.before_training()
        try:
            yield
        finally:
            with self._remember_failure():
                self._hooks.release(self._step)

    def require_grant(self, act: str) -> None:
        """Refuse a use of the training GPUs that nobody has granted.

        Raises:
            GrantRequiredError: The pipeline does not hold them.
        """
        if not self._hooks.holds_training_gpus:
            gpus = list(self.topology.train_gpus)
            error = GrantRequiredError(self.pipeline_id, gpus, act)
            self.fail(error)
            raise error

    @property
    def validation_samples(self) -> int:
        """Trajectories of one validation."""
        return self._parts.validation_samples

    @contextlib.contextmanager
    def validation(self) -> Iterator[None]:
        """Count a validation as demand, for as long as no collector reports any."""
        hooks, settings = self.collector_hooks(), self.settings
        with repeat_demand(hooks, self.validation_samples, interval_s=settings.heartbeat_s):
            yield

    # -- end ----------------------------------------------------------------------

    def leave(self) -> None:
        """Give every GPU back and unregister; the workers may die afterwards. Idempotent."""
        with self._ending:
            if self._state in (State.LEFT, State.CLOSED):
                return
            self._state = State.LEFT
            self._trainer_turn_over.set()
            plane = self._parts.control_plane
            if self._hooks.holds_training_gpus:
                self._try("release of the training GPUs", self._release_or_end)
            if self._generating:
                self._try(
                    "release of the inference GPUs",
                    lambda: plane.await_release_generation(timeout_s=self._limits.resize_s),
                )
            self._try("unregister", plane.unregister)

    def close(self) -> None:
        """Leave, then end the coordinator and give the placement groups back. Idempotent."""
        with self._ending:
            if self._state is State.CLOSED:
                return
            self.leave()
            self._state = State.CLOSED
            limit = self._limits.kill_s * (1 + self.topology.inference.num_shards)
            self._try("end of the coordinator", lambda: self._close_coordinator(limit))
            self._try("return of the placement groups", self.cluster.release)

    def _close_coordinator(self, timeout_s: float) -> None:
        try:
            call(self.coordinator, "close", timeout_s=timeout_s)
        except ControlPlaneLostError:
            logger.info("%s: its coordinator has ended already", self.pipeline_id)

    def _release_or_end(self) -> None:
        """Memory must be free when the GPUs are released, if need be by ending the trainer."""
        try:
            self._trainer.offload(timeout_s=self._limits.offload_s)
        except RLixError as error:
            logger.warning("%s: the trainer is ended: %s", self.pipeline_id, error)
            self._trainer.end(timeout_s=self._limits.kill_s)
        self._hooks.release(self._step)

    def _try(self, what: str, act: Callable[[], object]) -> None:
        """Nothing may stop the end of a run."""
        try:
            act()
        except PipelineClosedError:
            logger.info("%s: %s: done already", self.pipeline_id, what)
        except RLixError as error:
            logger.warning("%s: %s: %s", self.pipeline_id, what, error)

    def _check_open(self, act: str) -> None:
        if self._state in (State.LEFT, State.CLOSED):
            raise PipelineClosedError(f"{self.pipeline_id} has ended and cannot {act}")

    @contextlib.contextmanager
    def _remember_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise


_current: Session | None = None


def current() -> Session:
    """The session of this driver.

    Raises:
        RLixError: There is none; in a Ray worker there never is.
    """
    if _current is None:
        raise RLixError(
            "no time-shared run in this process: nemo_rl.algorithms.grpo.setup makes one"
        )
    return _current


def find() -> Session | None:
    """The session of this driver, ``None`` without one."""
    return _current


def make_current(session: Session | None) -> None:
    """Set the session of this driver.

    Raises:
        RLixError: Another one is still open.
    """
    global _current
    if session is not None and _current is not None and _current.state is not State.CLOSED:
        raise RLixError(
            f"{_current.pipeline_id} is still open: one driver runs one time-shared pipeline"
        )
    _current = session
