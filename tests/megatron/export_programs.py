"""Weight caches of tiny Hugging Face models that Megatron Bridge has cut up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from training_programs import GLOO, WAIT_S, Parallel, start

from nemo_rl_rlix.errors import HostMemoryError
from nemo_rl_rlix.megatron.errors import TrainerBusyError, TrainerOffloadedError
from nemo_rl_rlix.megatron.worker_extension import TimeSharingWorkerMixin
from nemo_rl_rlix.weights.errors import CacheBuildError
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.slot import read_tensors
from nemo_rl_rlix.weights.types import CacheHandle

BLOCK = {"weight_cache": {"bucket_mib": 1, "slots": 2}}


def save_model(folder: Path, kind: str) -> None:
    """Write a tiny model: ``dense``, ``tied`` or ``experts``."""
    import transformers

    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind == "tied",
    }
    torch.manual_seed(3)
    model: torch.nn.Module
    if kind == "experts":
        experts = {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "head_dim": 8,
        }
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**shape, **experts))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**shape))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases start out all alike
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.to(torch.bfloat16).save_pretrained(folder)


class BridgeWorker:
    """The part of NeMo RL's worker that time sharing builds on, with its ways to export."""

    def __init__(self, folder: str, kind: str, parallel: Parallel) -> None:
        from megatron.bridge import AutoBridge
        from megatron.core import parallel_state
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        self.megatron_bridge = AutoBridge.from_hf_pretrained(folder)
        provider = self.megatron_bridge.to_megatron_provider(load_weights=False)
        experts = kind == "experts"
        for name, value in {
            **{**parallel.arguments, "context_parallel_size": 1},
            "params_dtype": torch.bfloat16,
            "bf16": True,
            "use_cpu_initialization": True,
            "gradient_accumulation_fusion": False,
            "bias_activation_fusion": False,
            "bias_dropout_fusion": False,
            "masked_softmax_fusion": False,
            "persist_layer_norm": False,
            "moe_permute_fusion": False,
            "moe_router_fusion": False,
            "moe_grouped_gemm": False,
            "moe_token_dispatcher_type": "allgather",
            "transformer_layer_spec": get_gpt_layer_local_spec(
                num_experts=4 if experts else None,
                moe_grouped_gemm=False,
                qk_layernorm=experts,
                normalization="RMSNorm",
            ),
        }.items():
            setattr(provider, name, value)
        provider.finalize()
        self.model = provider.provide(
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        ).bfloat16()
        self.megatron_bridge.load_hf_weights([self.model])
        self.optimizer = None
        self.refit_conversion_tasks: list[Any] | None = None
        self._train_step_state: object | None = None

    def prepare_refit_info(self) -> dict[str, Any]:
        self.refit_conversion_tasks = [
            task
            for task in self.megatron_bridge.get_conversion_tasks([self.model])
            if task is not None
        ]
        exported = self._iter_params_with_optional_kv_scales()
        return {name: (tensor.shape, tensor.dtype) for name, tensor in exported}

    def _iter_params_with_optional_kv_scales(
        self, kv_scales: dict[str, float] | None = None
    ) -> Any:
        yield from self.megatron_bridge.export_hf_weights(
            [self.model], show_progress=False, conversion_tasks=self.refit_conversion_tasks
        )
        for name, value in (kv_scales or {}).items():
            yield name, torch.tensor([value])


class Worker(TimeSharingWorkerMixin, BridgeWorker):
    rlix_device_type = "cpu"
    rlix_group_kinds = GLOO

    def _rlix_roots(self) -> dict[str, object]:
        return {"model": self.model}


def open_worker(
    rank: int, world_size: int, parallel: Parallel, kind: str, folder: str, tag: str
) -> Worker:
    start(rank, world_size, parallel)
    target = Path(folder) / kind
    if rank == 0 and not target.exists():
        save_model(target, kind)
    dist.barrier()
    worker = Worker(str(target), kind, parallel)
    worker.configure_time_sharing(f"pipeline-{tag}", "node", BLOCK)
    return worker


def shared_handle(handle: CacheHandle | None) -> tuple[list[int], CacheHandle]:
    """The owner's handle on every rank, and who has one."""
    found: list[CacheHandle | None] = [None] * dist.get_world_size()
    dist.all_gather_object(found, handle)
    owners = [rank for rank, one in enumerate(found) if one is not None]
    return owners, next(one for one in found if one is not None)


def differences(handle: CacheHandle, expected: dict[str, torch.Tensor]) -> list[str]:
    """Names whose bytes in the cache, as another process maps it, are not the expected."""
    wrong = []
    with SharedHostMemory.attach(handle.memory) as memory:
        found = {
            name: tensor.clone()
            for name, tensor in read_tensors(memory, handle.layout, handle.weights_version)
        }
    for name in sorted(found.keys() | expected.keys()):
        one, other = found.get(name), expected.get(name)
        same = one is not None and other is not None and one.dtype == other.dtype
        if not same or not torch.equal(one, other):  # type: ignore[arg-type]
            wrong.append(name)
    return wrong


def reference(folder: str, kind: str, factor: float) -> dict[str, torch.Tensor]:
    """The full model from its file: never cut up, never exported."""
    from safetensors.torch import load_file

    tensors = load_file(Path(folder) / kind / "model.safetensors")
    return {name: tensor * factor for name, tensor in tensors.items()}


def cache_follows_the_weights(
    rank: int, world_size: int, parallel: Parallel, kind: str, folder: str
) -> Any:
    """Three versions, with everything given up and taken back between them."""
    worker = open_worker(rank, world_size, parallel, kind, folder, "a")
    wrong: list[list[str]] = []
    owners: list[list[int]] = []
    layouts = []
    refused = ""
    for version in range(3):
        build = worker.build_cpu_buffer_cache if version == 2 else worker.build_cpu_weight_cache
        who, handle = shared_handle(build(version, version % 2, WAIT_S))
        owners.append(who)
        layouts.append(handle.layout)
        # Doubling is exact in bfloat16, element by element, whoever holds the element.
        wrong.append(differences(handle, reference(folder, kind, 2.0**version)))
        dist.barrier()
        worker.offload_training_gpu(budget_bytes=0)
        try:
            worker.build_cpu_weight_cache(version + 1, 0, WAIT_S)
        except TrainerOffloadedError as error:
            refused = str(error)
        worker.destroy_nccl_groups(WAIT_S)
        # Shards are synced from the cache while the trainer has nothing on the device.
        wrong.append(differences(handle, reference(folder, kind, 2.0**version)))
        worker.reinit_nccl_groups(WAIT_S)
        worker.onload_training_gpu()
        with torch.no_grad():
            for parameter in worker.model.parameters():
                parameter.mul_(2.0)
    return {
        "wrong": wrong,
        "owners": owners,
        "planned_once": layouts[0] == layouts[1] == layouts[2],
        "tensors": len(layouts[0].tensors),
        "refused": refused,
    }


def failures_hold_up_nobody(
    rank: int, world_size: int, parallel: Parallel, kind: str, folder: str
) -> Any:
    """The owner's build fails in three ways; the others end, and the next build works."""
    worker = open_worker(rank, world_size, parallel, kind, folder, "b")
    worker.prepare_refit_info()
    specs = worker._rlix_specs
    assert specs is not None
    kinds = []

    def attempt(version: int, **extra: Any) -> None:
        try:
            worker.build_cpu_weight_cache(version, 0, WAIT_S, **extra)
            kinds.append("")
        except (CacheBuildError, HostMemoryError) as error:
            kinds.append(type(error).__name__)

    from nemo_rl_rlix.weights.budget import MemoryLevel
    from nemo_rl_rlix.weights.cache import CpuWeightCache

    if rank == 0:
        worker._rlix_cache = CpuWeightCache(
            "b", worker._rlix_settings.weight_cache, "node",
            read_levels=lambda: (MemoryLevel("limit", 1000, 0),),
        )  # fmt: skip
    attempt(0)  # the host cannot hold it
    worker._rlix_cache = None
    attempt(1, kv_scales={"not.planned": 1.0})
    worker._rlix_cache = None
    worker._rlix_specs = (replace(specs[0], shape=(1,), nbytes=2), *specs[1:])
    attempt(2)  # a tensor of another shape than planned
    worker._rlix_specs, worker._rlix_cache = specs, None
    _, handle = shared_handle(worker.build_cpu_weight_cache(3, 0, WAIT_S))
    worker._train_step_state = {}
    busy = ""
    try:
        worker.offload_training_gpu()
    except TrainerBusyError as error:
        busy = str(error)
    return kinds, differences(handle, reference(folder, kind, 1.0)), busy
