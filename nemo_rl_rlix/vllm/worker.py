"""Mixins for worker actors that own an engine: gate, control calls, build and end.

Put in front of a class that has ``cfg``, ``llm``, ``_load_model(bundle_indices, seed)``
and ``_create_engine(arguments)``, as NeMo RL's workers do. Control calls have a
concurrency group of their own, so that they never queue behind generations.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import RLixError, ShardFailedError
from nemo_rl_rlix.shards.protocol import DrainReport, MemoryReport, ReceiveReport
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.build_lock import build_lock
from nemo_rl_rlix.vllm.engine_control import EngineControl
from nemo_rl_rlix.vllm.extension import ExtensionConfig
from nemo_rl_rlix.vllm.model_size import weight_bytes
from nemo_rl_rlix.vllm.options import (
    EXTENSION_CLS,
    ShardSettings,
    derive_kv_cache_bytes,
    engine_arguments,
)
from nemo_rl_rlix.vllm.processes import end_processes, with_descendants
from nemo_rl_rlix.vllm.serving import Serving
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)

CONTROL_GROUP = "rlix_control"
CONTROL_CONCURRENCY = 8
MAX_NEW_TOKENS_KEY = "rlix_max_new_tokens"
"""In a request's data: tokens it may still sample, a list of one number."""
SEGMENTS_KEY = "rlix_segments"
"""In a result: ``[segments]``, the weight version of each run of new tokens."""
ABORT_TIMEOUT_S = 10.0
POLL_S = 0.1


@dataclass(frozen=True)
class WorkerIdentity:
    """Which processes a shard has.

    Attributes:
        node_id: Ray node of the actor.
        processes: ``pid -> start`` of the actor, its engine and the engine's workers.
    """

    node_id: str
    processes: dict[int, int]


class ShardBuildMixin:
    """Builds engines that share their card, one at a time on each."""

    cfg: Any
    llm: Any
    rlix_extension_cls = EXTENSION_CLS
    _rlix_place: tuple[Any, Any] | None = None

    @property
    def rlix_settings(self) -> ShardSettings:
        """Settings of the shard, from the generation config."""
        return ShardSettings.from_config(self.cfg)

    def _load_model(self, bundle_indices: Any, seed: Any) -> None:
        self._rlix_place = (bundle_indices, seed)
        super()._load_model(bundle_indices, seed)  # type: ignore[misc]

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        settings = self.rlix_settings
        arguments = engine_arguments(
            llm_kwargs,
            settings,
            extension_cls=self.rlix_extension_cls,
            kv_cache_bytes=llm_kwargs.get("kv_cache_memory_bytes") or _kv_cache_bytes(llm_kwargs),
        )
        spread = _gpus_per_engine(llm_kwargs) > 1
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        devices = [] if spread or not visible else visible.split(",")
        with build_lock(devices, timeout_s=settings.build_timeout_s):
            super()._create_engine(arguments)  # type: ignore[misc]


class AsyncShardWorkerMixin(ShardBuildMixin):
    """An async worker whose engine is one shard."""

    _rlix_serving: Serving | None = None
    _rlix_refit_info: Any = None
    _rlix_building = False
    _rlix_kills = 0

    # -- generation -------------------------------------------------------------

    async def generate_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """As the base class's, behind the gate.

        Raises:
            ShardPreemptedError: The gate is closed, or the request was aborted; carries
                the tokens so far.
        """
        async for result in self._rlix_admitted(super().generate_async, data, greedy):  # type: ignore[misc]
            yield result

    async def generate_text_async(self, data: Any, greedy: bool = False) -> AsyncIterator[Any]:
        """As :meth:`generate_async`; nothing is kept of an aborted one."""
        async for result in self._rlix_admitted(super().generate_text_async, data, greedy):  # type: ignore[misc]
            yield result

    async def _rlix_admitted(self, method: Any, data: Any, greedy: bool) -> AsyncIterator[Any]:
        limits = data.get(MAX_NEW_TOKENS_KEY)
        limit = None if limits is None else int(limits[0])
        with self._rlix().admit(limit) as admitted:
            async for index, batch in method(data, greedy=greedy):
                batch[SEGMENTS_KEY] = [record.segments for record in admitted.records[-1:]]
                yield index, batch

    # -- the RFC's names --------------------------------------------------------

    async def abort_all_requests(self) -> int:
        """Abort every open request of the engine; returns how many there were."""
        return await self._rlix().abort_all(timeout_s=ABORT_TIMEOUT_S)

    async def is_idle(self) -> bool:
        """Whether no request is open. Read from the engine's table, not from a gauge."""
        return self._rlix().require().idle

    async def sleep_async(self) -> None:
        """Close, drain and sleep at the configured level."""
        settings, serving = self.rlix_settings, self._rlix()
        control = serving.require()
        serving.gate.close(serving.gate.epoch)
        report = await control.drain(timeout_s=ABORT_TIMEOUT_S)
        if not report.idle:
            raise ShardFailedError(serving.dp_rank, f"{report.leftover} requests did not end")
        await control.sleep(level=settings.sleep_level, timeout_s=settings.build_timeout_s)

    async def wake_up_async(self, **kwargs: Any) -> None:
        """Map memory again; the gate stays closed until the shard is activated."""
        tags = tuple(kwargs.get("tags") or ("weights", "kv_cache"))
        await self._rlix().require().wake(tags=tags, timeout_s=self.rlix_settings.build_timeout_s)

    async def prepare_refit_info_async(self, state_dict_info: dict[str, Any]) -> None:
        """Remember what a rebuilt engine has to be told again."""
        self._rlix_refit_info = state_dict_info
        await super().prepare_refit_info_async(state_dict_info)  # type: ignore[misc]

    # -- life -------------------------------------------------------------------

    # In the group of the generations: what is made here belongs to their event loop.
    async def rlix_build(self, dp_rank: int, timeout_s: float) -> WorkerIdentity:
        """Make the engine, or take over the one made at the start; ends asleep at level 2.

        Raises:
            DeadlineExceededError: It did not come up in time; end it.
            SettingError: Something of the recipe cannot be time-shared.
        """
        deadline = Deadline(f"build of shard {dp_rank}", timeout_s)
        kills, self._rlix_building = self._rlix_kills, True
        try:
            identity = await self._rlix_build(dp_rank, deadline)
        except (RLixError, asyncio.CancelledError):
            raise
        except Exception as error:
            cause = f"its engine did not start: {type(error).__name__}: {error}"
            raise ShardFailedError(dp_rank, cause) from error
        finally:
            self._rlix_building = False
        if kills != self._rlix_kills:
            # The kill came when there was nothing to be ended yet.
            await self._rlix().require().kill(timeout_s=deadline.left(ABORT_TIMEOUT_S))
            raise ShardFailedError(dp_rank, "it was ended while it was built")
        return identity

    async def _rlix_build(self, dp_rank: int, deadline: Deadline) -> WorkerIdentity:
        timeout_s = deadline.remaining_s
        if self._rlix_serving is None:
            self._rlix_serving = Serving(dp_rank)
        serving, settings = self._rlix_serving, self.rlix_settings
        serving.gate.close(serving.gate.epoch)
        if self.llm is None or (serving.control is not None and serving.control.dead):
            await self._rlix_reload(deadline)
        if serving.control is None or serving.control.engine is not self.llm:
            serving.bind(
                self.llm,
                lambda gate: EngineControl(
                    self.llm,
                    dp_rank=dp_rank,
                    gate=gate,
                    sleeping_budget_bytes=settings.sleeping_budget_bytes,
                    context_bytes=settings.context_bytes,
                ),
            )
        control = serving.require()
        config = ExtensionConfig(
            settings.pipeline_id, dp_rank, settings.sleep_level, _node_ids_by_host()
        )
        await control.worker_rpc("rlix_attach", config, timeout_s=deadline.left(timeout_s))
        report = await control.drain(timeout_s=deadline.left(ABORT_TIMEOUT_S))
        if not report.idle:
            raise ShardFailedError(dp_rank, f"a new engine has {report.leftover} requests")
        await control.sleep(level=2, timeout_s=deadline.left(timeout_s))
        return self._rlix_identity()

    async def _rlix_reload(self, deadline: Deadline) -> None:
        if self._rlix_place is None:
            raise ShardFailedError(
                self._rlix().dp_rank, "its worker has never loaded a model; build the group first"
            )
        self.llm = None
        loading = asyncio.to_thread(self._load_model, *self._rlix_place)
        await asyncio.wait_for(loading, deadline.remaining_s)
        await super().post_init_async()  # type: ignore[misc]
        if self._rlix_refit_info is not None:
            await super().prepare_refit_info_async(self._rlix_refit_info)  # type: ignore[misc]

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_kill(self, timeout_s: float) -> MemoryReport:
        """End the engine's processes; the actor stays and can build another engine."""
        deadline = Deadline("end of an engine", timeout_s)
        self._rlix_kills += 1
        serving = self._rlix_serving
        if serving is not None:
            serving.gate.close(serving.gate.epoch)
        while self._rlix_building and deadline.remaining_s:
            # An engine that is just starting is known to nobody but as a child.
            children = await asyncio.to_thread(_children)
            await asyncio.to_thread(end_processes, children, deadline.remaining_s)
            await asyncio.sleep(POLL_S)
        if self._rlix_building:
            return MemoryReport(len(await asyncio.to_thread(_children)) + 1, 0)
        control = serving.control if serving is not None else None
        if control is None or control.killed:
            return MemoryReport(0, 0)
        return MemoryReport(await control.kill(timeout_s=deadline.left(timeout_s)), 0)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_identity(self) -> WorkerIdentity:
        """Which processes the shard has now."""
        return self._rlix_identity()

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_ping(self, timeout_s: float) -> None:
        """Prove that actor, engine and workers answer."""
        await self._rlix().require().ping(timeout_s=timeout_s)

    # -- control ----------------------------------------------------------------

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_close_admission(self, epoch: int) -> None:
        """Refuse requests from now on."""
        self._rlix().gate.close(epoch)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_open_admission(self, epoch: int, weights_version: int) -> None:
        """Accept requests."""
        self._rlix().open(epoch, weights_version)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_drain(self, timeout_s: float) -> DrainReport:
        """Abort until the engine is idle."""
        return await self._rlix().require().drain(timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_sleep(self, level: int, timeout_s: float) -> MemoryReport:
        """Give the device memory back."""
        return await self._rlix().require().sleep(level=level, timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_wake(self, tags: tuple[str, ...], timeout_s: float) -> None:
        """Map memory again."""
        await self._rlix().require().wake(tags=tags, timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_receive(self, source: CacheHandle, timeout_s: float) -> ReceiveReport:
        """Load a version from host memory of the node."""
        return await self._rlix().require().receive(source, timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_receive_by(
        self, method: str, arguments: bytes, timeout_s: float
    ) -> ReceiveReport:
        """Load a version by another transport; the arguments are pickled."""
        control = self._rlix().require()
        return await control.receive_by(method, *pickle.loads(arguments), timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_finalize_weights(self, timeout_s: float) -> None:
        """Run post-load work once."""
        await self._rlix().require().finalize_weights(timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_reset_prefix_cache(self, timeout_s: float) -> bool:
        """Forget cached prefixes."""
        return await self._rlix().require().reset_prefix_cache(timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_probe(self, timeout_s: float) -> None:
        """Generate one token past the gate."""
        await self._rlix().require().probe(timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_pause_keep(self, clear_cache: bool, timeout_s: float) -> int:
        """Freeze between two steps."""
        control = self._rlix().require()
        return await control.pause_keep(clear_cache=clear_cache, timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_resume(self, pause_epoch: int, timeout_s: float) -> bool:
        """Continue after that pause."""
        return await self._rlix().require().resume(pause_epoch=pause_epoch, timeout_s=timeout_s)

    @ray.method(concurrency_group=CONTROL_GROUP)
    async def rlix_prepare_cache(self, source: CacheHandle, timeout_s: float) -> None:
        """Map and register a slot of the weight cache, outside of any resize."""
        await self._rlix().require().worker_rpc("rlix_prepare", source, timeout_s=timeout_s)

    # -- helpers ----------------------------------------------------------------

    def _rlix(self) -> Serving:
        if self._rlix_serving is None:
            raise ShardFailedError(-1, "its worker was not told which shard it is")
        return self._rlix_serving

    def _rlix_identity(self) -> WorkerIdentity:
        return WorkerIdentity(
            str(ray.get_runtime_context().get_node_id()), with_descendants([os.getpid()])
        )


class SyncShardWorkerMixin(ShardBuildMixin):
    """A sync worker: sleeps at the configured level and says whether it is idle.

    Its engine runs inside of its calls, so that it cannot be preempted and a
    time-shared run needs the async one.
    """

    def abort_all_requests(self) -> int:
        """Abort every open request of the engine; returns how many there were."""
        engine = self.llm.llm_engine
        ids = compat.open_requests(engine)
        engine.abort_request(ids, internal=True)
        return len(ids)

    def is_idle(self) -> bool:
        """Whether no request is open."""
        return not compat.open_requests(self.llm.llm_engine)

    def sleep(self) -> None:
        """Sleep at the configured level."""
        self.llm.llm_engine.reset_prefix_cache()
        self.llm.renderer.clear_mm_cache()
        self.llm.sleep(level=self.rlix_settings.sleep_level)


def _children() -> dict[int, int]:
    """Everything that this process has started and that still runs."""
    processes = with_descendants([os.getpid()])
    del processes[os.getpid()]
    return processes


def _gpus_per_engine(arguments: dict[str, Any]) -> int:
    tensor = int(arguments.get("tensor_parallel_size", 1))
    return tensor * int(arguments.get("pipeline_parallel_size", 1))


def _kv_cache_bytes(arguments: dict[str, Any]) -> int:
    from vllm.platforms import current_platform

    weights = weight_bytes(arguments["model"], str(arguments.get("dtype", "bfloat16")))
    return derive_kv_cache_bytes(
        # From NVML: a CUDA context in this process would hold memory for nothing.
        int(current_platform.get_device_total_memory()),
        float(arguments.get("gpu_memory_utilization", 0.9)),
        -(-weights // _gpus_per_engine(arguments)),
    )


def _node_ids_by_host() -> dict[str, str]:
    return {node["NodeManagerHostname"]: node["NodeID"] for node in ray.nodes() if node["Alive"]}
