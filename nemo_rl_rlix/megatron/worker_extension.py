"""What time sharing adds to NeMo RL's Megatron policy worker.

A mixin, put in front of the worker class of the NeMo RL version at hand:

    class Worker(TimeSharingWorkerMixin, MegatronPolicyWorkerImpl): ...

It calls NeMo RL and Megatron only through its ``super()`` and when it is used.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.megatron.caches import clear_training_caches, library_globals
from nemo_rl_rlix.megatron.errors import TrainerBusyError, TrainerOffloadedError
from nemo_rl_rlix.megatron.export import (
    build_from_export,
    find_ties,
    read_coordinates,
    specs_of_info,
)
from nemo_rl_rlix.megatron.install import install_reloadable_groups
from nemo_rl_rlix.megatron.limits import refuse_unsupported
from nemo_rl_rlix.megatron.nccl_offload import (
    NCCL_ONLY,
    CycleReport,
    destroy_megatron_nccl_groups,
    reinit_megatron_nccl_groups,
)
from nemo_rl_rlix.megatron.offload import DeviceOffloader, OffloadReport
from nemo_rl_rlix.settings import MIB, RLixSettings
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.types import CacheHandle, TensorSpec

logger = logging.getLogger(__name__)

RESIDUE_MIB = 256
"""MiB that may stay allocated: library workspaces to which nothing leads."""


class _Worker(Protocol):
    """What is used of NeMo RL's worker, the same in all supported versions."""

    model: torch.nn.Module
    optimizer: object
    refit_conversion_tasks: list[Any] | None

    def prepare_refit_info(self) -> Mapping[str, tuple[Any, torch.dtype]]: ...

    def _iter_params_with_optional_kv_scales(
        self, kv_scales: dict[str, float] | None = None
    ) -> Iterable[tuple[str, torch.Tensor]]: ...


class TimeSharingWorkerMixin:
    """Weight cache, offload and communicators of one training rank.

    Attributes:
        rlix_device_type: Device that is given up.
        rlix_group_kinds: Kinds of process groups that hold memory of it.
    """

    rlix_device_type = "cuda"
    rlix_group_kinds: frozenset[str] = NCCL_ONLY

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._rlix_cache: CpuWeightCache | None = None
        self._rlix_settings = RLixSettings()
        self._rlix_pipeline = ("", "")
        self._rlix_specs: tuple[TensorSpec, ...] | None = None
        self._rlix_offloader: DeviceOffloader | None = None
        # Before the base class makes the first group: handles that Megatron, its
        # optimizers and the bridge keep then survive a destroy.
        install_reloadable_groups()
        super().__init__(*args, **kwargs)
        refuse_unsupported(
            *(
                vars(value)
                for module in self._rlix_models()
                for name, value in vars(module).items()
                if name in ("config", "ddp_config")
            )
        )

    # Set-up

    def configure_time_sharing(
        self, pipeline_id: str, node_id: str, rlix_block: dict[str, Any] | None = None
    ) -> None:
        """Tell this rank which pipeline and node it belongs to, before anything else.

        Args:
            pipeline_id: The pipeline.
            node_id: Node of this process, under which others map its cache.
            rlix_block: The recipe's ``rlix:`` block.
        """
        self._rlix_pipeline = (pipeline_id, node_id)
        self._rlix_settings = RLixSettings.from_recipe(rlix_block)

    def prepare_refit_info(self) -> Mapping[str, tuple[Any, torch.dtype]]:
        """As the base class; remembers the answer as the plan of the cache.

        Collective, like every export.
        """
        self._rlix_require_onloaded("prepare_refit_info")
        base = cast(_Worker, super())
        info = base.prepare_refit_info()
        self._rlix_specs = specs_of_info(info)
        return info

    # Weight cache

    def build_cpu_weight_cache(
        self,
        step: int,
        slot: int,
        timeout_s: float,
        kv_scales: dict[str, float] | None = None,
    ) -> CacheHandle | None:
        """Snapshot the weights; all ranks call it, the owner stores and answers.

        The owner is the rank that is first in every direction of parallelism.

        Args:
            step: Version of the weights.
            slot: Slot to store them in.
            timeout_s: Deadline in seconds.
            kv_scales: Scales of an fp8 KV cache, if calibrated.

        Returns:
            The handle, not published yet; ``None`` on ranks that do not own the cache.

        Raises:
            CacheBuildError: The export is not what was planned; the slot is invalid.
            DeadlineExceededError: It took too long; the slot is invalid.
            HostMemoryError: The host cannot hold the cache.
            TrainerOffloadedError: The weights are not on the device.
        """
        self._rlix_require_onloaded("build_cpu_weight_cache")
        worker = cast(_Worker, self)
        deadline = Deadline(f"weight cache of version {step}", timeout_s)
        if self._rlix_specs is None or worker.refit_conversion_tasks is None:
            self.prepare_refit_info()
        problem: RLixError | None = None
        cache = None
        try:
            cache = self._rlix_planned_cache()
        except RLixError as error:
            problem = error  # raised after the export, which the other ranks are in
        with torch.no_grad():
            handle = build_from_export(
                lambda: worker._iter_params_with_optional_kv_scales(kv_scales=kv_scales),
                cache,
                step=step,
                slot=slot,
                timeout_s=deadline.left(timeout_s),
            )
        if problem is not None:
            raise problem
        return handle

    def build_cpu_buffer_cache(
        self, step: int, slot: int = 0, timeout_s: float = 300.0
    ) -> CacheHandle | None:
        """Another name of :meth:`build_cpu_weight_cache`."""
        return self.build_cpu_weight_cache(step, slot, timeout_s)

    # Device memory

    def offload_training_gpu(self, *, budget_bytes: int = RESIDUE_MIB * MIB) -> OffloadReport:
        """Move parameters, optimizer state and caches to the host, and prove it.

        Mixed-precision copies and frozen parameters are included, which the base
        class leaves on the device. Values of gradients are dropped.

        Args:
            budget_bytes: Bytes that may stay allocated on the device.

        Raises:
            HostMemoryError: The host cannot hold it; nothing was moved.
            OffloadIncompleteError: Names the tensors that stayed.
            TrainerBusyError: A training step or a save is in progress.
        """
        offloader = self._rlix_get_offloader()
        if offloader.is_offloaded:
            return offloader.offload({})
        if vars(self).get("_train_step_state") is not None:
            raise TrainerBusyError(
                "a training step is open and its gradients would be lost; finish or abort it first"
            )
        self._rlix_finalize_saves()
        clear_training_caches(self._rlix_models())
        roots = self._rlix_roots()
        report = offloader.offload(roots)
        offloader.check(roots, budget_bytes=budget_bytes)
        logger.info(
            "rank %d: offloaded %.2f GiB and dropped %.2f GiB of gradients in %.2f s",
            dist.get_rank(),
            report.moved_bytes / 2**30,
            report.dropped_bytes / 2**30,
            report.seconds,
        )
        return report

    def onload_training_gpu(self) -> OffloadReport:
        """Bring everything back to the device; a no-op when it is there."""
        return self._rlix_get_offloader().onload()

    def move_model(self, model: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        """As the base class, which must not meddle with memory that is offloaded.

        It would take the emptied buffers for its own and fill them with old weights.
        """
        self._rlix_require_onloaded("move_model")
        return cast(Any, super()).move_model(model, *args, **kwargs)

    def move_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """As the base class; refused while offloaded."""
        self._rlix_require_onloaded("move_optimizer")
        return cast(Any, super()).move_optimizer(*args, **kwargs)

    # Communicators

    def destroy_nccl_groups(self, timeout_s: float) -> CycleReport:
        """See :func:`~.nccl_offload.destroy_megatron_nccl_groups`."""
        return destroy_megatron_nccl_groups(
            timeout_s=timeout_s, kinds=self.rlix_group_kinds, concurrently=True
        )

    def reinit_nccl_groups(self, timeout_s: float) -> CycleReport:
        """See :func:`~.nccl_offload.reinit_megatron_nccl_groups`; before the onload."""
        return reinit_megatron_nccl_groups(timeout_s=timeout_s, kinds=self.rlix_group_kinds)

    def _rlix_require_onloaded(self, call: str) -> None:
        if self._rlix_offloader is not None and self._rlix_offloader.is_offloaded:
            raise TrainerOffloadedError(call, dist.get_rank())

    def _rlix_planned_cache(self) -> CpuWeightCache | None:
        if not read_coordinates().owns_cache:
            return None
        if self._rlix_cache is None:
            pipeline_id, node_id = self._rlix_pipeline
            self._rlix_cache = CpuWeightCache(
                pipeline_id, self._rlix_settings.weight_cache, node_id
            )
        specs = self._rlix_specs or ()
        ties = find_ties((spec.name for spec in specs), tied=self._rlix_is_tied())
        self._rlix_cache.plan(specs, ties)
        return self._rlix_cache

    def _rlix_is_tied(self) -> bool:
        """Whether the output layer is the embedding; the same on all pipeline stages."""
        return any(
            bool(vars(module).get("share_embeddings_and_output_weights", False))
            for model in self._rlix_models()
            for module in model.modules()
        )

    def _rlix_get_offloader(self) -> DeviceOffloader:
        if self._rlix_offloader is None:
            self._rlix_offloader = DeviceOffloader(
                self.rlix_device_type,
                host_memory_fraction=self._rlix_settings.weight_cache.host_memory_fraction,
            )
        return self._rlix_offloader

    def _rlix_finalize_saves(self) -> None:
        """An asynchronous save reads the tensors that are about to move.

        NeMo RL 0.7.0 saves synchronously and has no such method.
        """
        finalize = getattr(self, "finalize_async_save", None)
        if finalize is not None:
            finalize()

    def _rlix_models(self) -> list[torch.nn.Module]:
        return [value for value in vars(self).values() if isinstance(value, torch.nn.Module)]

    def _rlix_roots(self) -> dict[str, object]:
        """Everything that this worker holds, except what this mixin added."""
        own = {name: value for name, value in vars(self).items() if not name.startswith("_rlix_")}
        return {**own, **library_globals()}
