"""A pipeline's side of the embedded control plane."""

from __future__ import annotations

import time
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_rlix.control_plane.embedded.events import ControlEvent
from nemo_rl_rlix.control_plane.embedded.messenger import Messenger
from nemo_rl_rlix.control_plane.embedded.planner import DEFAULT_CONFIG, PlannerConfig
from nemo_rl_rlix.control_plane.embedded.scheduler import (
    CONTROL_NAMESPACE,
    MAX_CONCURRENCY,
    SCHEDULER_NAME,
    EmbeddedScheduler,
)
from nemo_rl_rlix.control_plane.protocol import (
    PipelineSpec,
    Priority,
    ProgressReport,
    cluster_id,
)
from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import ControlPlaneLostError
from nemo_rl_rlix.ray_errors import Callee, unwrap
from nemo_rl_rlix.settings import RLixSettings


def connect_scheduler(
    *,
    create: bool = True,
    num_gpus: int | None = None,
    config: PlannerConfig = DEFAULT_CONFIG,
    timeout_s: float = 60.0,
) -> Any:
    """Find the scheduler of this Ray cluster, or start it.

    Drivers that race for it end with the same one.

    Args:
        create: Start it when there is none.
        num_gpus: Logical GPUs; ``None``: what Ray counts. Used only when it is started.
        config: What a switch must be worth. Used only when it is started.
        timeout_s: Deadline in seconds.

    Returns:
        Handle of the actor.

    Raises:
        ControlPlaneLostError: There is none and ``create`` is false, or it died.
        DeadlineExceededError: It did not come up in time.
    """
    if not create:
        try:
            return ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE)
        except ValueError as error:
            raise ControlPlaneLostError(
                f"no actor {SCHEDULER_NAME} runs on this Ray cluster; connect with create=True"
            ) from error
    counted = int(ray.cluster_resources().get("GPU", 0)) or None
    handle = (
        ray.remote(EmbeddedScheduler)
        .options(
            name=SCHEDULER_NAME,
            namespace=CONTROL_NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            num_cpus=0,
            max_concurrency=MAX_CONCURRENCY,
        )
        .remote(num_gpus if num_gpus is not None else counted, config)
    )
    call(handle, "start", within_s=timeout_s)
    return handle


def shutdown_scheduler(handle: Any, *, timeout_s: float = 10.0) -> None:
    """End the scheduler for every pipeline of the Ray cluster; returns when it is gone.

    Raises:
        DeadlineExceededError: It is still there after ``timeout_s``.
    """
    deadline = Deadline("shutdown of the embedded control plane", timeout_s)
    try:
        call(handle, "shutdown", within_s=timeout_s)
        ray.kill(handle, no_restart=True)
        while True:  # Ray ends it some time after the kill returns
            call(handle, "status", within_s=deadline.left(timeout_s))
            time.sleep(0.02)
    except ControlPlaneLostError:
        return


def call(handle: Any, method: str, *args: Any, within_s: float, **kwargs: Any) -> Any:
    """Call a method of the scheduler, with a deadline and its errors as they were raised.

    Raises:
        DeadlineExceededError: No answer within ``within_s`` seconds.
        ControlPlaneLostError: The actor is gone.
        RLixError: What the method raised.
    """
    try:
        return ray.get(getattr(handle, method).remote(*args, **kwargs), timeout=within_s)
    except RayError as error:
        raise unwrap(error, Callee(f"control plane call {method}", timeout_s=within_s)) from error


class EmbeddedControlPlane:
    """One pipeline's :class:`~nemo_rl_rlix.control_plane.protocol.ControlPlane`.

    Picklable: a copy in another process speaks for the same pipeline. Only the
    object that :meth:`register` was called on sends heartbeats, from a thread, so
    a driver that dies gives its GPUs back.

    Args:
        spec: The pipeline.
        settings: Its settings; heartbeat and deadlines are read.
    """

    def __init__(self, spec: PipelineSpec, settings: RLixSettings) -> None:
        self.spec = spec
        self._settings = settings
        self._handle: Any = None
        self._messenger: Messenger | None = None
        self._closed = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_messenger": None}

    def connect(
        self,
        *,
        create: bool = True,
        num_gpus: int | None = None,
        config: PlannerConfig = DEFAULT_CONFIG,
    ) -> EmbeddedControlPlane:
        """Find or start the scheduler; see :func:`connect_scheduler`. Returns itself."""
        self._handle = connect_scheduler(
            create=create,
            num_gpus=num_gpus,
            config=config,
            timeout_s=max(60.0, self._settings.deadlines.control_s),
        )
        return self

    def register(self, spec: PipelineSpec) -> None:
        """Register the pipeline and begin to send heartbeats.

        Args:
            spec: Replaces the one given at construction.

        Raises:
            SettingError: It cannot work, e.g. there is no coordinator.
            RequestRefusedError: It is registered already.
        """
        deadlines = self._settings.deadlines
        self.spec = spec
        self._call(
            "register",
            spec,
            heartbeat_s=self._settings.heartbeat_s,
            # Later than the coordinator's own deadline, which fails one shard only.
            resize_s=deadlines.resize_s + deadlines.kill_s + deadlines.control_s,
        )
        self._closed = False
        self._stop_messenger()
        self._messenger = self._new_messenger(self._settings.heartbeat_s)

    def request_gpus(
        self,
        cluster: str,
        priority: Priority,
        *,
        global_step: int | None = None,
        step_target_estimate: int | None = None,
        timeout_s: float | None = None,
    ) -> list[int]:
        """Wait for GPUs, ``deadlines.grant_s`` at most unless ``timeout_s`` is given.

        Raises:
            DeadlineExceededError: Not granted in time; the request is withdrawn.
            RequestRefusedError: It does not fit what the pipeline holds.
            PipelineClosedError: The pipeline ended, with the cause.
            ControlPlaneLostError: The scheduler is gone.
        """
        limit = self._settings.deadlines.grant_s if timeout_s is None else timeout_s
        return self._call(
            "request_gpus",
            within_s=limit + self._settings.deadlines.control_s,
            cluster_id=cluster_id(self.spec.pipeline_id, cluster),
            priority=priority,
            global_step=global_step,
            step_target_estimate=step_target_estimate,
            timeout_s=limit,
        )

    def cancel_request(self, cluster: str) -> bool:
        """Withdraw a waiting request; whether there was one."""
        name = cluster_id(self.spec.pipeline_id, cluster)
        return self._call("cancel_request", cluster_id=name)

    def release_gpus(self, cluster: str, *, global_step: int | None = None) -> None:
        """Give back what a request got. The memory is free already.

        Raises:
            RequestRefusedError: It holds nothing.
        """
        name = cluster_id(self.spec.pipeline_id, cluster)
        self._call("notify_release_gpus", cluster_id=name, global_step=global_step)

    def await_release_generation(self, *, timeout_s: float) -> None:
        """Have every shard taken; none comes back before a new GENERATION request.

        Raises:
            DeadlineExceededError: Some were still in place.
        """
        if self._messenger is not None:
            self._messenger.discard()
        self._call(
            "await_release_gpus",
            within_s=timeout_s + self._settings.deadlines.control_s,
            pipeline_id=self.spec.pipeline_id,
            timeout_s=timeout_s,
        )

    def report_progress(self, report: ProgressReport) -> None:
        """Have a snapshot sent; returns at once. A newer one may overtake it."""
        self._post(report)

    def clear_progress(self) -> None:
        """Have the demand forgotten; returns at once."""
        self._post(None)

    def unregister(self) -> None:
        """Forget the pipeline and return its GPUs. Idempotent."""
        self._closed = True
        self._stop_messenger()
        self._call("unregister_pipeline", self.spec.pipeline_id)

    def heartbeat(self) -> None:
        """Say that the pipeline is alive; done by itself where it was registered.

        Raises:
            PipelineClosedError: It was evicted or unregistered.
        """
        self._call("heartbeat", self.spec.pipeline_id)

    def status(self) -> dict[str, Any]:
        """State of the whole control plane as plain data."""
        return self._call("status")

    def events(self, since: int = 0) -> list[ControlEvent]:
        """Events of all pipelines numbered above ``since``."""
        return self._call("events", since)

    def _call(self, method: str, *args: Any, within_s: float | None = None, **kwargs: Any) -> Any:
        if self._handle is None:
            raise ControlPlaneLostError("not connected: call connect() first")
        limit = self._settings.deadlines.control_s if within_s is None else within_s
        return call(self._handle, method, *args, within_s=limit, **kwargs)

    def _post(self, report: ProgressReport | None) -> None:
        if self._closed:
            return
        if self._messenger is None:
            self._messenger = self._new_messenger(None)
        self._messenger.post(report)

    def _new_messenger(self, interval_s: float | None) -> Messenger:
        pid = self.spec.pipeline_id

        def send(report: ProgressReport | None) -> None:
            if report is None:
                self._call("clear_progress", pipeline_id=pid)
            else:
                self._call("report_progress", report)

        return Messenger(send, self.heartbeat, interval_s)

    def _stop_messenger(self) -> None:
        if self._messenger is not None:
            self._messenger.stop(self._settings.deadlines.control_s)
            self._messenger = None
