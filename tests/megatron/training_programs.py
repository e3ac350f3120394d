"""A few steps of a tiny GPT on Megatron-Core, with and without time sharing between them."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import cpu_stack
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nemo_rl_rlix.megatron.caches import clear_training_caches
from nemo_rl_rlix.megatron.errors import GroupDownError
from nemo_rl_rlix.megatron.groups import ReloadableGroup
from nemo_rl_rlix.megatron.install import install_reloadable_groups
from nemo_rl_rlix.megatron.nccl_offload import (
    destroy_megatron_nccl_groups,
    reinit_megatron_nccl_groups,
)
from nemo_rl_rlix.megatron.offload import DeviceOffloader

GLOO = frozenset({"gloo"})
VOCABULARY, LENGTH, BATCH = 64, 8, 2
WAIT_S = 60.0


@dataclass(frozen=True)
class Parallel:
    """Sizes, as ``initialize_model_parallel`` calls them by short names."""

    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def arguments(self) -> dict[str, int]:
        return {
            "tensor_model_parallel_size": self.tp,
            "pipeline_model_parallel_size": self.pp,
            "context_parallel_size": self.cp,
            "expert_model_parallel_size": self.ep,
        }


def start(rank: int, world_size: int, parallel: Parallel) -> None:
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cpu_stack.use_host()
    install_reloadable_groups()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel(**parallel.arguments)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7)


class Run:
    """Model, data parallelism and distributed optimizer with bf16 parameters."""

    def __init__(self, parallel: Parallel) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        experts = {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather"}
        config = TransformerConfig(
            num_layers=2,
            hidden_size=32,
            num_attention_heads=4,
            use_cpu_initialization=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=parallel.tp,
            pipeline_model_parallel_size=parallel.pp,
            expert_model_parallel_size=parallel.ep,
            **(experts if parallel.ep > 1 else {}),
        )
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(
                num_experts=4 if parallel.ep > 1 else None
            ),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(),
            post_process=parallel_state.is_pipeline_last_stage(),
        )
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            Float16Module(config, gpt),
        )
        self.model.broadcast_params()
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-2,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )
        self.config = config

    def step(self, number: int) -> float:
        from megatron.core import parallel_state
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        shard = parallel_state.get_data_parallel_rank()
        generator = torch.Generator().manual_seed(100 * number + shard)
        batches = iter(
            torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1), generator=generator) for _ in range(2)
        )
        losses = get_forward_backward_func()(
            forward_step_func=_forward,
            data_iterator=batches,
            model=self.model,
            num_microbatches=2,
            seq_length=LENGTH,
            micro_batch_size=BATCH,
            forward_only=False,
        )
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self.model])
        ok, norm, _ = self.optimizer.step()
        assert ok
        total = torch.tensor([float(sum(float(x["loss"]) for x in losses)), float(norm)])
        dist.all_reduce(total)  # on the default group: it is re-created too
        return float(total.sum())


def _forward(batches: Any, model: Any) -> Any:
    tokens = next(batches)
    positions = torch.arange(LENGTH).expand(BATCH, LENGTH)
    mask = torch.ones(1, 1, LENGTH, LENGTH).tril() < 0.5
    output = model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:])
    return output, partial(_loss)


def _loss(output: torch.Tensor) -> Any:
    loss = output.float().mean()
    return loss, {"loss": loss.detach()}


def parallel_state_survives(rank: int, world_size: int, parallel: Parallel, rounds: int) -> Any:
    """Groups only: what Megatron's own tables and collections hold, over generations."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    start(rank, world_size, parallel)
    collection = ProcessGroupCollection.use_mpu_process_groups()
    held = {**_groups_in(vars(parallel_state)), **_groups_in(vars(collection))}
    expected = {name: _sum_of_ranks(group) for name, group in held.items()}
    same = []
    for _ in range(rounds):
        destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
        refused = 0
        for group in held.values():
            try:
                _sum_of_ranks(group)
            except GroupDownError:
                refused += 1
        reinit_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
        same.append(
            refused == len(held)
            and {**_groups_in(vars(parallel_state)), **_groups_in(vars(collection))} == held
            and {name: _sum_of_ranks(group) for name, group in held.items()} == expected
        )
    return {"same": same, "groups": len(held), "expected": expected}


def _groups_in(table: dict[str, Any]) -> dict[str, Any]:
    return {name: group for name, group in table.items() if isinstance(group, ReloadableGroup)}


def _sum_of_ranks(group: Any) -> float:
    own = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(own, group=group)
    return float(own)


def losses(
    rank: int, world_size: int, parallel: Parallel, steps: int, share: bool
) -> dict[str, Any]:
    start(rank, world_size, parallel)
    run = Run(parallel)
    offloader = DeviceOffloader("cpu")
    found: list[float] = []
    books: list[tuple[int, int, int]] = []
    names: tuple[str, ...] = ()
    moved = 0
    for number in range(steps):
        if share and number:
            # As between two grants: off the device, groups down, groups up, back on.
            roots = {"model": run.model, "optimizer": run.optimizer}
            clear_training_caches([run.model])
            moved = offloader.offload(roots).moved_bytes
            offloader.check(roots, budget_bytes=0)
            names = destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S).groups
            down = _settled_census()
            reinit_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
            offloader.onload()
            books.append(down)
        found.append(run.step(number))
    return {"losses": found, "books": books, "groups": names, "moved": moved}


def _settled_census() -> tuple[int, int, int]:
    """Threads, open files and groups, once threads that are about to end have ended."""
    last = (-1, -1, -1)
    for _ in range(50):
        if (now := _census()) == last:
            return now
        last = now
        time.sleep(0.05)
    return last


def _census() -> tuple[int, int, int]:
    return (
        len(os.listdir("/proc/self/task")),
        len(os.listdir("/proc/self/fd")),
        len(c10d._world.pg_map),
    )
