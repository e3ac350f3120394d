"""NeMo RL's generation object in a time-shared run: requests go to shards that serve.

The original lives in the driver; pickled copies live in the trajectory collector and
wherever else NeMo RL sends it. A copy routes by itself and owns nothing: it neither
ends workers nor holds the weight synchronizer.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ray
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm.utils import aggregate_spec_decode_counters
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from ray.exceptions import RayError

from nemo_rl_rlix.control_plane.coordinator import call
from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    NoLiveShardError,
    PipelineClosedError,
    RLixError,
    SettingError,
    ShardFailedError,
    ShardPreemptedError,
)
from nemo_rl_rlix.nemo_rl import session
from nemo_rl_rlix.nemo_rl.failures import no_healthy_shards_error
from nemo_rl_rlix.nemo_rl.samples import make_sample
from nemo_rl_rlix.nemo_rl.shard_leaders import SomeShards, run_on_dp_shard_leaders
from nemo_rl_rlix.nemo_rl.worker_call import answer_timeout_s, call_worker
from nemo_rl_rlix.settings import MIB, RLixSettings
from nemo_rl_rlix.shards.redispatch import DispatchCounts, DispatchStats, generate
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.shards.router import ShardRouter, SnapshotSource
from nemo_rl_rlix.shards.snapshot import RoutingSnapshot
from nemo_rl_rlix.vllm.options import SETTINGS_KEY, ShardSettings

logger = logging.getLogger(__name__)

FATAL = (NoLiveShardError, PipelineClosedError, ControlPlaneLostError)
"""Errors after which no request of this process will be answered any more."""


@dataclass(frozen=True)
class Link:
    """How the generation object and its copies reach the rest of their run; picklable.

    Attributes:
        pipeline_id: The pipeline.
        settings: Its ``rlix:`` block.
        source: Where the routing state comes from.
        coordinator: Actor handle of the owner of the shards.
    """

    pipeline_id: str
    settings: RLixSettings
    source: SnapshotSource
    coordinator: Any


class TimeSharedVllmGeneration(VllmGeneration):
    """``VllmGeneration`` over shards that sleep and wake one by one."""

    _rlix_copy = False
    _rlix_failure: RLixError | None = None
    weight_synchronizer: Any = None
    fleet_monitor: Any = None

    def __init__(
        self,
        cluster: Any,
        config: Any,
        name_prefix: str = "vllm_policy",
        workers_per_node: Any = None,
        defer_model_load: bool = False,
    ) -> None:
        if defer_model_load:
            raise SettingError(
                "env.should_use_nemo_gym",
                True,
                "engines cannot be loaded later: they are built under a grant of the scheduler",
                "Turn it off, or unset RLIX_CONTROL_PLANE",
            )
        run = session.current()
        link = Link(run.pipeline_id, run.settings, run.router_source, run.coordinator)
        config.setdefault(SETTINGS_KEY, shard_settings(link).to_config())
        with run.build_turn():
            super().__init__(
                cluster,
                config,
                # Names of Ray actors: two pipelines may come from one recipe.
                name_prefix=f"{run.pipeline_id}-{name_prefix}",
                workers_per_node=workers_per_node,
            )
            self._rlix_attach(link)
            run.announce_leaders(self.rlix_leaders())

    def _rlix_attach(self, link: Link) -> None:
        """Begin to route."""
        self._rlix = link
        self._rlix_router = ShardRouter(link.source, link.settings.routing, name=link.pipeline_id)
        self._rlix_stats = DispatchStats()
        self._rlix_counters: dict[int, Any] = {}

    def rlix_leaders(self) -> dict[int, Any]:
        """For each dp rank, the worker actor that owns the shard's engine."""
        group = self.worker_group
        return {
            rank: group.workers[group.get_dp_leader_worker_idx(rank)]
            for rank in range(group.dp_size)
        }

    # -- requests -----------------------------------------------------------------

    async def _async_generate_base(
        self,
        data: Any,
        method_name: str,
        data_validation_fn: Callable[[Any], bool],
        greedy: bool = False,
    ) -> AsyncGenerator[tuple[int, Any], None]:
        """Have one sample answered by whichever shard serves, however often it is taken.

        Rollouts swallow what is raised here and go on with half a sample, so everything
        that can be cured by another dispatch is cured below.

        Raises:
            NoLiveShardError: No shard can ever answer; :attr:`rlix_failure` keeps it.
            PipelineClosedError: The pipeline has ended.
        """
        if not self.cfg["vllm_cfg"]["async_engine"]:
            raise RuntimeError(f"{method_name} needs policy.generation.vllm_cfg.async_engine=true")
        assert isinstance(data, BatchedDataDict), f"not a BatchedDataDict: {type(data)}"
        if not data_validation_fn(data):
            return
        assert data.size == 1, f"{method_name} takes one sample at a time, not {data.size}"
        yield await self._rlix_answer(data, method_name, greedy)

    async def _rlix_answer(self, data: Any, method_name: str, greedy: bool) -> tuple[int, Any]:
        routing = self._rlix.settings.routing
        sample = make_sample(method_name, data, self.cfg, routing.preempted_requests)
        index, last = 0, None

        async def send(rank: int, request: GenerationRequest) -> GenerationOutput:
            nonlocal index, last
            index, last = await self._rlix_ask(rank, method_name, sample.data(request), greedy)
            return sample.output(last, rank)

        try:
            output = await generate(
                sample.request,
                router=self._rlix_router,
                send=send,
                policy=sample.policy,
                stats=self._rlix_stats,
                backoff_s=routing.redispatch_backoff_s,
            )
        except FATAL as error:
            self._rlix_failure = self._rlix_failure or error
            raise
        answer = sample.answer(output, last)
        leader = self.worker_group.get_dp_leader_worker_idx(output.dp_rank)
        answer["gen_leader_worker_idx"] = [int(leader)]
        return index, answer

    async def _rlix_ask(
        self, rank: int, method_name: str, data: Any, greedy: bool
    ) -> tuple[int, Any]:
        self._rlix_refuse_quarantined(rank)
        try:
            found = await call_worker(
                self.worker_group,
                rank,
                method_name,
                data=data,
                greedy=greedy,
                timeout_s=answer_timeout_s(),
                on_silence=lambda: self._rlix.source.suspect(rank),
            )
        except ShardPreemptedError:
            raise  # no failure, and none to be reported as one
        except ShardFailedError as error:
            self._rlix_report(rank, error)
            raise ShardPreemptedError(rank) from error
        except Exception as error:
            self._rlix_report(rank, error)
            raise
        if self.fleet_monitor is not None:
            self.fleet_monitor.report_success(rank)
        return found

    def _rlix_report(self, rank: int, error: Exception) -> None:
        if self.fleet_monitor is not None:
            self.fleet_monitor.report_failure(rank, error)

    def _rlix_refuse_quarantined(self, rank: int) -> None:
        """Refuse for a shard that NeMo RL's fleet health has taken out, as its gate would.

        Fleet health knows nothing of sleeping shards, so that its own choice of a shard
        is not asked for.
        """
        monitor = self.fleet_monitor
        if monitor is None:
            return
        serving = monitor.serving_shards()
        if not serving:
            raise no_healthy_shards_error()(f"fleet health permits none of {self.dp_size} shards")
        if rank not in serving:
            raise ShardPreemptedError(rank, epoch=self._rlix_router.snapshot.epoch + 1)

    def generate(self, data: Any, greedy: bool = False) -> Any:
        """Refused: a synchronous batch cannot be dispatched again in part."""
        raise RuntimeError("a time-shared run generates with generate_async")

    @property
    def rlix_failure(self) -> RLixError | None:
        """Why no request of this process will be answered any more, if that is so."""
        return self._rlix_failure

    def rlix_end_cause(self) -> RLixError | None:
        """The same for the whole pipeline, as its coordinator says; asks it once."""
        if self._rlix_failure is not None:
            return self._rlix_failure
        snapshot = self._rlix_snapshot()
        return NoLiveShardError(snapshot.failure) if snapshot.failure else None

    def rlix_open_requests(self) -> int:
        """Requests of this process that wait for a shard or for its answer."""
        router = self._rlix_router
        return router.waiting + sum(router.in_flight().values())

    def rlix_dispatch_counts(self) -> DispatchCounts:
        """How the requests of this process have fared."""
        return self._rlix_stats.counts

    # -- shards -------------------------------------------------------------------

    def _rlix_snapshot(self) -> RoutingSnapshot:
        """The routing state as its owner has it, or as it was seen last."""
        try:
            self._rlix_router.apply(self._rlix.source.poll(-1, 0.0))
        except RLixError as error:
            logger.warning("%s: routing state: %s", self._rlix.pipeline_id, error)
        return self._rlix_router.snapshot

    @property
    def _active_dp_ranks(self) -> set[int]:
        """Ranks that requests may be sent to; a view, the coordinator owns the states."""
        return set(self._rlix_snapshot().active)

    @property
    def _preempted_shards(self) -> set[int]:
        """Ranks whose requests are being aborted; a view."""
        return set(self._rlix_snapshot().preempted)

    def sleep_partial(self, dp_ranks: Iterable[int], level: int = 2) -> None:
        """Take shards away; the memory of their GPUs is free when this returns.

        For the scheduler's side, which calls the same on the coordinator: whoever else
        does so takes shards away that the scheduler counts as serving.

        Args:
            dp_ranks: The shards; those that do not serve are no-ops, all is ordinary.
            level: As ``rlix.sleep_level`` says.

        Raises:
            SettingError: Another level.
            ShardFailedError: Memory could not be got back.
        """
        wanted = self._rlix.settings.sleep_level
        if level != wanted:
            raise SettingError(
                "rlix.sleep_level", wanted, f"engines were built for it, not for {level}", "Set it"
            )
        self._rlix_resize(remove=dp_ranks)

    def wake_up_partial(self, dp_ranks: Iterable[int]) -> None:
        """Bring shards in; each serves when this returns, or is being rebuilt."""
        self._rlix_resize(add=dp_ranks)

    def activate_dp_ranks(self, dp_ranks: Iterable[int]) -> None:
        """See that shards serve. There is no way for one to serve with older weights.

        Raises:
            ShardFailedError: One does not.
        """
        ranks = set(dp_ranks)
        self._rlix_resize(add=ranks)
        snapshot = self._rlix_snapshot()
        for rank in sorted(ranks - snapshot.active):
            raise ShardFailedError(rank, f"it is {snapshot.states.get(rank, 'unknown')}")

    def mark_dp_ranks_inactive(self, dp_ranks: Iterable[int]) -> None:
        """Cut the routes to shards; they go to sleep, which is not waited for.

        Raises:
            DeadlineExceededError: The coordinator did not do so in time.
        """
        ranks = set(dp_ranks)
        limit = self._rlix.settings.deadlines.control_s
        deadline = Deadline(f"route cut of shards {sorted(ranks)}", limit)
        self._rlix.coordinator.resize_infer.remote(sorted(ranks), [])
        snapshot = self._rlix.source.poll(-1, 0.0)
        while ranks & snapshot.active:
            snapshot = self._rlix.source.poll(snapshot.epoch, deadline.left(limit))
        self._rlix_router.apply(snapshot)

    def _rlix_resize(self, *, remove: Iterable[int] = (), add: Iterable[int] = ()) -> None:
        limits = self._rlix.settings.deadlines
        call(
            self._rlix.coordinator,
            "resize_infer",
            sorted(set(remove)),
            sorted(set(add)),
            timeout_s=limits.resize_s + limits.kill_s + limits.control_s,
        )

    def run_on_dp_shard_leaders(
        self, dp_ranks: Iterable[int], method_name: str, **kwargs: Any
    ) -> list[Any]:
        """Run a method on the leaders of some shards; one object reference for each."""
        return run_on_dp_shard_leaders(self.worker_group, dp_ranks, method_name, **kwargs)

    # -- what NeMo RL asks of all shards ------------------------------------------

    def _rlix_awake(self) -> Any:
        """What the base class's methods see of this object: only shards that serve."""
        shards = SomeShards(self.worker_group, self._rlix_snapshot().active)
        return SimpleNamespace(cfg=self.cfg, worker_group=shards)

    def finish_generation(self, *args: Any, **kwargs: Any) -> bool:
        """Forget cached prefixes of shards that serve; none sleeps by this."""
        return bool(VllmGeneration.finish_generation(self._rlix_awake()))

    def invalidate_kv_cache(self) -> bool:
        """Forget cached prefixes of shards that serve; a woken one has none."""
        return bool(VllmGeneration.invalidate_kv_cache(self._rlix_awake()))

    def _get_raw_spec_counters(self) -> Any:
        """Sums over all shards; one that does not serve counts with what it had before.

        Differences of the sums are taken, so that a shard must not drop out of them.
        """
        ranks = sorted(self._rlix_snapshot().active)
        refs = self.run_on_dp_shard_leaders(ranks, "_get_raw_spec_counters")
        for rank, ref in zip(ranks, refs, strict=True):
            try:
                self._rlix_counters[rank] = ray.get(ref)
            except RayError as error:
                logger.warning("%s shard %d: counters: %s", self._rlix.pipeline_id, rank, error)
        return aggregate_spec_decode_counters(list(self._rlix_counters.values()))

    def get_vllm_logger_metrics(self) -> dict[str, Any]:
        """Metrics of shards that serve."""
        try:
            return dict(VllmGeneration.get_vllm_logger_metrics(self._rlix_awake()))
        except RayError as error:  # a shard that ended meanwhile must not end the training loop
            logger.warning("%s: metrics: %s", self._rlix.pipeline_id, error)
            return {}

    def clear_vllm_logger_metrics(self) -> None:
        """Clear metrics of shards that serve."""
        try:
            VllmGeneration.clear_vllm_logger_metrics(self._rlix_awake())
        except RayError as error:
            logger.warning("%s: metrics: %s", self._rlix.pipeline_id, error)

    def start_gpu_profiling(self) -> None:
        """Profile shards that serve."""
        VllmGeneration.start_gpu_profiling(self._rlix_awake())

    def stop_gpu_profiling(self) -> None:
        """Stop profiling shards that serve."""
        VllmGeneration.stop_gpu_profiling(self._rlix_awake())

    def init_collective(
        self, ip: str, port: int, world_size: int, *, train_world_size: int
    ) -> list[Any]:
        """Do nothing: a trainer and an engine on one GPU cannot share an NCCL group."""
        return []

    def update_weights_via_ipc_zmq(self) -> list[Any]:
        """Refused, see :meth:`update_weights_from_collective`."""
        return self.update_weights_from_collective()

    def update_weights_from_collective(self) -> list[Any]:
        """Refused: sleeping shards take part in no broadcast."""
        raise RuntimeError("weights reach time-shared shards through the weight synchronizer")

    # -- its end ------------------------------------------------------------------

    def shutdown(self) -> bool:
        """End the workers, after the pipeline has left its scheduler. A copy ends nothing."""
        state = vars(self)
        if "_rlix_router" in state:
            self._rlix_router.close()
        if self._rlix_copy or "worker_group" not in state:
            return True
        run = session.find()
        if run is not None and "_rlix" in state and run.pipeline_id == self._rlix.pipeline_id:
            # Some versions of the training loop print what ends them, and return.
            cause = self.rlix_end_cause()
            if cause is not None:
                run.fail(cause)
            run.leave()
        return bool(super().shutdown())

    def __del__(self) -> None:
        if not self._rlix_copy:
            self.shutdown()
        elif "_rlix_router" in vars(self):
            self._rlix_router.close()

    def __getstate__(self) -> dict[str, Any]:
        dropped = ("weight_synchronizer", "fleet_monitor", "fleet_selector", "_rlix_stats")
        state = {key: value for key, value in vars(self).items() if key not in dropped}
        return {**state, "fleet_selector": None, "_rlix_copy": True}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._rlix_stats = DispatchStats()


def shard_settings(link: Link) -> ShardSettings:
    """What the workers of a pipeline are told."""
    settings = link.settings
    return ShardSettings(
        link.pipeline_id,
        sleep_level=settings.sleep_level,
        sleeping_budget_bytes=settings.sleeping_memory_mib * MIB,
        build_timeout_s=settings.deadlines.build_s,
    )
