"""One async-GRPO pipeline from start to end, time-shared through its hooks.

The order of things is the contract with the scheduler: build under an
INITIALIZATION grant, train between two hooks, and at the end no new resizes, then
unregister, then the workers die.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_rlix.cluster.placement import SharedCluster
from nemo_rl_rlix.control_plane.coordinator import (
    CoordinatorPlan,
    CoordinatorSource,
    CoordinatorStatus,
    call,
    start_coordinator,
)
from nemo_rl_rlix.control_plane.embedded.client import EmbeddedControlPlane
from nemo_rl_rlix.control_plane.keeper import RemoteKeeper
from nemo_rl_rlix.control_plane.protocol import (
    INFER_CLUSTER,
    Priority,
    pipeline_namespace,
)
from nemo_rl_rlix.errors import DeadlineExceededError, PipelineClosedError, RLixError
from nemo_rl_rlix.observe.trace import open_tracer
from nemo_rl_rlix.reference.audit import TrainingAudit, audit
from nemo_rl_rlix.reference.buffer import BufferStats, ReplayBuffer, group_name
from nemo_rl_rlix.reference.collector import (
    CollectorConfig,
    CollectorStats,
    Dispatch,
    TrajectoryCollector,
)
from nemo_rl_rlix.reference.config import GPU_FRACTION, PipelineConfig
from nemo_rl_rlix.reference.engine import EngineConfig
from nemo_rl_rlix.reference.guards import OwnerGuard, ShardGuards, shard_owner, trainer_owner
from nemo_rl_rlix.reference.shard import RayReferenceShard, ShardEndpoint
from nemo_rl_rlix.reference.task import make_task
from nemo_rl_rlix.reference.traced import TracedTrainer
from nemo_rl_rlix.reference.trainer import latest_checkpoint
from nemo_rl_rlix.reference.trainer_worker import ReferenceTrainer, TrainerWorkerConfig
from nemo_rl_rlix.reference.warmup import model_config
from nemo_rl_rlix.reference.worker import ShardWorkerConfig
from nemo_rl_rlix.shards.redispatch import DispatchCounts, DispatchStats, generate
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.shards.router import ShardRouter
from nemo_rl_rlix.training.hooks import TimeSharingHooks

logger = logging.getLogger(__name__)

POLL_GRACE_S = 5.0


@dataclass(frozen=True)
class PipelineProgress:
    """Where a running pipeline is; cheap to ask for.

    Attributes:
        step: Training steps done.
        rewards: Mean reward of each step.
        started_s: Unix seconds at which generation and training began, 0 before.
        ended_s: Unix seconds of the last step, 0 before.
        collector: What was generated.
        dispatch: How requests fared.
        buffer: Where groups went, by the buffer's own book.
    """

    step: int
    rewards: tuple[float, ...]
    started_s: float
    ended_s: float
    collector: CollectorStats
    dispatch: DispatchCounts
    buffer: BufferStats


class ReferencePipeline:
    """The driver of one pipeline.

    Args:
        config: What it is made from.
    """

    def __init__(self, config: PipelineConfig) -> None:
        self.config = config
        self._topology = config.topology()
        self._limits = config.settings.deadlines
        self._tracer = open_tracer(config.settings.trace_dir, f"{config.name}-driver")
        self._cluster: SharedCluster | None = None
        self._coordinator: Any = None
        self._control_plane: EmbeddedControlPlane | None = None
        self._trainer: ReferenceTrainer | None = None
        self._router: ShardRouter | None = None
        self._collector: TrajectoryCollector | None = None
        self._hooks: TimeSharingHooks | None = None
        self._buffer: ReplayBuffer | None = None
        self._dispatch_stats = DispatchStats()
        self._endpoints: dict[int, ShardEndpoint] = {}
        self._rewards: list[float] = []
        self._started_s = self._ended_s = 0.0
        self._stop = threading.Event()
        self._first_step = 0

    # -- start --------------------------------------------------------------------

    def setup(self) -> None:
        """Build everything, one grant after the other; every GPU is free afterwards.

        Raises:
            RLixError: Something could not be built; :meth:`close` cleans up.
        """
        config = self.config
        self._cluster = SharedCluster.connect(config.pipeline_id, num_gpus=len(config.gpus))
        shards = self._plan_shards()
        self._endpoints = {
            rank: ShardEndpoint(shard.resident, pipeline_namespace(config.pipeline_id), rank)
            for rank, (shard, _) in shards.items()
        }
        self._coordinator = start_coordinator(self._coordinator_plan(shards))
        self._control_plane = EmbeddedControlPlane(config.spec(), config.settings).connect()
        self._control_plane.register(config.spec())
        call(self._coordinator, "attach", self._control_plane, timeout_s=self._limits.control_s)
        self._build_trainer()
        self._build_shards()

    def _plan_shards(self) -> dict[int, tuple[ShardWorkerConfig, dict[str, Any]]]:
        config, layout = self.config, self._topology.inference
        assert self._cluster is not None
        task = make_task(config.data, config.workload, config.seed)
        engine = EngineConfig(
            model=model_config(task, config.workload),
            max_num_seqs=config.max_num_seqs,
            prefix_cache_bytes=config.prefix_cache_bytes,
            seed=config.seed,
            step_s=config.step_s,
        )
        plans = {}
        for rank in range(layout.num_shards):
            gpus = layout.shard_gpus(rank)
            worker = ShardWorkerConfig(
                pipeline_id=config.pipeline_id,
                dp_rank=rank,
                owner=shard_owner(config.name, rank),
                gpu=config.gpus[gpus[0]],
                engine=engine,
                trace_dir=config.settings.trace_dir,
                trace_name=config.name,
            )
            plans[rank] = (worker, self._cluster.actor_options(gpus, gpu_fraction=GPU_FRACTION))
        return plans

    def _coordinator_plan(
        self, shards: Mapping[int, tuple[ShardWorkerConfig, dict[str, Any]]]
    ) -> CoordinatorPlan:
        config, layout = self.config, self._topology.inference
        shard_gpus = {rank: layout.shard_gpus(rank) for rank in shards}
        specs = {rank: [config.gpus[gpu] for gpu in gpus] for rank, gpus in shard_gpus.items()}
        name = config.name
        return CoordinatorPlan(
            pipeline_id=config.pipeline_id,
            settings=config.settings,
            shard_gpus=shard_gpus,
            make_shards=lambda: {
                rank: RayReferenceShard(worker, options)
                for rank, (worker, options) in shards.items()
            },
            make_guard=lambda: ShardGuards(name, specs),
            trace_name=name,
        )

    def _build_trainer(self) -> None:
        config = self.config
        assert self._control_plane is not None and self._cluster is not None
        gpu = self._topology.train_gpus[0]
        worker = TrainerWorkerConfig(
            pipeline_id=config.pipeline_id,
            owner=trainer_owner(config.name),
            gpu=config.gpus[gpu],
            base_dir=config.base_dir,
            workload=config.workload,
            data=config.data,
            warmup=config.warmup,
            grpo=config.grpo,
            weight_cache=config.settings.weight_cache,
        )
        options = self._cluster.actor_options((gpu,), gpu_fraction=GPU_FRACTION)
        trainer_gpus = [config.gpus[gpu] for gpu in self._topology.train_gpus]
        self._trainer = ReferenceTrainer(worker, options)
        traced = TracedTrainer(self._trainer, self._tracer, f"gpu/{gpu}/{config.name}")
        self._hooks = TimeSharingHooks(
            config.pipeline_id,
            control_plane=self._control_plane,
            trainer=traced,
            keeper=RemoteKeeper(self._coordinator, self._limits),
            settings=config.settings,
            guard=OwnerGuard(trainer_gpus, worker.owner),
        )
        self._traced = traced
        self._hooks.acquire(0, Priority.INITIALIZATION)
        try:
            self._first_step = self._trainer.wait_ready(timeout_s=self._limits.build_s)
            newest = latest_checkpoint(config.run_dir) if config.resume else None
            if newest is not None:
                self._trainer.load(newest, timeout_s=self._limits.build_s)
                self._first_step = self._trainer.wait_ready(timeout_s=self._limits.build_s)
            traced.onload(timeout_s=self._limits.offload_s)
            self._hooks.hand_over(self._first_step)
        finally:
            self._hooks.release(0)

    def _build_shards(self) -> None:
        assert self._control_plane is not None
        self._control_plane.request_gpus(
            INFER_CLUSTER, Priority.INITIALIZATION, timeout_s=self._limits.grant_s
        )
        try:
            call(self._coordinator, "build_shards", timeout_s=self._limits.build_s)
        finally:
            self._control_plane.release_gpus(INFER_CLUSTER)

    # -- run ----------------------------------------------------------------------

    def run(self) -> PipelineProgress:
        """Train every step; returns the final account.

        Raises:
            RLixError: The run failed, and why; every GPU is released.
        """
        config = self.config
        hooks, control_plane = self._hooks, self._control_plane
        assert hooks is not None and control_plane is not None
        self._started_s = time.time()
        self._start_collection(hooks)
        estimate = config.workload.trajectories_per_step * (1 + config.max_age)
        try:
            control_plane.request_gpus(
                INFER_CLUSTER,
                Priority.GENERATION,
                step_target_estimate=estimate,
                timeout_s=self._limits.grant_s,
            )
            for step in range(self._first_step, config.steps):
                self._train_step(step, hooks)
                self._ended_s = time.time()
        finally:
            self._stop_collection()
        return self.progress()

    def _start_collection(self, hooks: TimeSharingHooks) -> None:
        config = self.config
        source = CoordinatorSource(self._coordinator, grace_s=POLL_GRACE_S)
        self._router = ShardRouter(source, config.settings.routing, name=config.name)
        self._buffer = ReplayBuffer(
            config.workload.prompts_per_step,
            config.workload.generations_per_prompt,
            config.max_age,
            first_version=self._first_step,
            end_version=config.steps,
        )
        self._collector = TrajectoryCollector(
            CollectorConfig(
                name=config.name,
                workload=config.workload,
                seed=config.seed,
                max_groups=config.workload.prompts_per_step * (1 + config.max_age),
            ),
            task=make_task(config.data, config.workload, config.seed),
            buffer=self._buffer,
            dispatch=self._make_dispatch(self._router),
            hooks=hooks,
        )
        self._collector.start(self._first_step)

    def _make_dispatch(self, router: ShardRouter) -> Dispatch:
        """Have a request answered by whichever shard serves.

        A function and not a method: a class with a coroutine method becomes an
        asyncio actor, whose other methods then wait for one another.
        """
        routing = self.config.settings.routing

        async def dispatch(request: GenerationRequest) -> GenerationOutput:
            return await generate(
                request,
                router=router,
                send=lambda rank, part: self._endpoints[rank].generate(part),
                policy=routing.preempted_requests,
                stats=self._dispatch_stats,
                backoff_s=routing.redispatch_backoff_s,
            )

        return dispatch

    def _train_step(self, step: int, hooks: TimeSharingHooks) -> None:
        config = self.config
        assert self._buffer is not None and self._collector is not None
        track = f"pipeline/{config.name}/trainer"
        with self._tracer.span(track, "wait for samples", step=step):
            groups = self._buffer.sample(
                step, timeout_s=config.sample_timeout_s, cancelled=self._stop.is_set
            )
        with self._tracer.span(track, "wait for GPUs", step=step):
            hooks.before_training(step)
        try:
            metrics = self._traced.train(step, groups, timeout_s=config.train_timeout_s)
            hooks.after_training(step)
        finally:
            hooks.release(step)
        self._rewards.append(metrics.reward_mean)
        self._collector.set_version(step + 1)
        self._tracer.counter(f"pipeline/{config.name}/reward", "reward", metrics.reward_mean)
        done = step + 1
        if config.checkpoint_every and done % config.checkpoint_every == 0:
            assert self._trainer is not None
            self._trainer.save(config.run_dir, timeout_s=self._limits.offload_s)

    def _stop_collection(self) -> None:
        if self._collector is not None:
            try:
                self._collector.stop(self._limits.control_s)
            except DeadlineExceededError as error:
                logger.warning("%s: %s", self.config.name, error)
        if self._router is not None:
            self._router.close()

    # -- look ---------------------------------------------------------------------

    def progress(self) -> PipelineProgress:
        """Where the run is; may be called from another thread."""
        collector, buffer = self._collector, self._buffer
        return PipelineProgress(
            step=len(self._rewards),
            rewards=tuple(self._rewards),
            started_s=self._started_s,
            ended_s=self._ended_s,
            collector=collector.stats if collector is not None else CollectorStats(),
            dispatch=self._dispatch_stats.counts,
            buffer=buffer.stats if buffer is not None else BufferStats(),
        )

    def audit(self) -> TrainingAudit:
        """What the trainer's process got, against what this run was to train on."""
        assert self._trainer is not None
        wanted = [
            group_name(step, index)
            for step in range(self._first_step, self.config.steps)
            for index in range(self.config.workload.prompts_per_step)
        ]
        return audit(self._trainer.account(timeout_s=self._limits.control_s), wanted)

    def coordinator_status(self) -> CoordinatorStatus | None:
        """The coordinator's account, ``None`` before there is one."""
        if self._coordinator is None:
            return None
        status: CoordinatorStatus = call(
            self._coordinator, "status", timeout_s=self._limits.control_s
        )
        return status

    # -- end ----------------------------------------------------------------------

    def stop(self) -> None:
        """End the run at the next wait; :meth:`run` raises ``PipelineClosedError``."""
        self._stop.set()

    def close(self) -> None:
        """Give everything back, in the order that the scheduler can bear. Idempotent."""
        self._stop.set()
        self._stop_collection()
        self._leave_scheduler()
        for what, act in (
            ("coordinator", self._close_coordinator),
            ("trainer", self._close_trainer),
            ("cluster", self._release_cluster),
        ):
            try:
                act()
            except RLixError as error:
                logger.warning("%s: end of the %s: %s", self.config.name, what, error)
        self._tracer.close()

    def _leave_scheduler(self) -> None:
        plane, self._control_plane = self._control_plane, None
        if plane is None:
            return
        try:
            if self._hooks is not None and self._hooks.holds_training_gpus:
                self._hooks.release(len(self._rewards))
            plane.await_release_generation(timeout_s=self._limits.resize_s)
        except RLixError as error:
            logger.warning("%s: release of the GPUs: %s", self.config.name, error)
        try:
            plane.unregister()
        except PipelineClosedError:
            logger.info("%s was unregistered already", self.config.name)
        except RLixError as error:
            logger.warning("%s: unregister: %s", self.config.name, error)

    def _close_coordinator(self) -> None:
        handle, self._coordinator = self._coordinator, None
        if handle is not None:
            limit = self._limits.kill_s * (1 + self._topology.inference.num_shards)
            call(handle, "close", timeout_s=limit)

    def _close_trainer(self) -> None:
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close(timeout_s=self._limits.offload_s)

    def _release_cluster(self) -> None:
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.release()
