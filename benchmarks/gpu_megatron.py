"""The Megatron rows of the GPU table: communicators, offload, and the weight cache.

    python benchmarks/gpu_megatron.py --out benchmarks/results/gpu_megatron.json
    python benchmarks/gpu_megatron.py --only nccl offload cache

One GPU that nothing else uses, and Megatron-Core. Sections: ``nccl`` (20 cycles of destroy
and re-init, one rank, all communicators at once and one after the other), ``offload`` (a 1B trainer with a distributed
optimizer in bf16; losses beside two runs that never offload), ``cache`` (8 GiB of bf16
tensors into the weight cache). About a minute each.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from nemo_rl_rlix.megatron.caches import clear_training_caches, library_globals
from nemo_rl_rlix.megatron.export import build_from_export
from nemo_rl_rlix.megatron.install import install_reloadable_groups
from nemo_rl_rlix.megatron.nccl_offload import (
    destroy_megatron_nccl_groups,
    reinit_megatron_nccl_groups,
)
from nemo_rl_rlix.megatron.offload import DeviceOffloader
from nemo_rl_rlix.observe.records import (
    Record,
    collect_versions,
    command_line,
    describe_hardware,
    utc_now,
    write_records,
)
from nemo_rl_rlix.settings import MIB, WeightCacheSettings
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.dtypes import spec_of
from nemo_rl_rlix.weights.host_memory import SharedHostMemory

logger = logging.getLogger("gpu_megatron")

CYCLES = 20
REPEATS = 7
STEPS = 6
BAR_RATIO = 0.85
MODEL_1B = {"num_layers": 16, "hidden_size": 2048, "num_attention_heads": 16}
VOCABULARY, LENGTH, BATCH = 32000, 512, 2
COPY_BYTES = 4 << 30
CACHE_BYTES = 8 << 30


class Results:
    """Collects records; writes after each, so that a run that is cut short leaves some."""

    def __init__(self, path: Path, sections: Sequence[str]) -> None:
        self._path = path
        self._command = command_line([sys.argv[0], "--only", *sections])
        self._records: list[Record] = []
        self._versions, self._hardware = collect_versions(), describe_hardware()
        self._hardware["gpu"] = torch.cuda.get_device_name()

    def add(
        self,
        metric: str,
        values: Sequence[float],
        unit: str,
        reference: float | None = None,
        **params: Any,
    ) -> None:
        record = Record(
            metric=metric,
            value=statistics.median(values),
            unit=unit,
            reference=reference,
            spread=(min(values), max(values)),
            n=len(values),
            params=params,
            versions=self._versions,
            hardware=self._hardware,
            command=self._command,
            date=utc_now(),
        )
        self._records.append(record)
        logger.info("%s %s = %.4g %s", metric, params, record.value, unit)
        write_records(self._path, self._records)


def start_world() -> None:
    """One rank, its groups reloadable, and the groups of Megatron."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK="0",
        WORLD_SIZE="1",
        LOCAL_RANK="0",
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    install_reloadable_groups()
    dist.init_process_group("nccl")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)


def used_mib() -> float:
    """Memory of the card that is in use, whoever uses it."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return (total - free) / MIB


def use_groups() -> int:
    """A collective on each group that a training step uses; how many there are."""
    from megatron.core import parallel_state as state

    groups = [
        dist.group.WORLD,
        state.get_tensor_model_parallel_group(),
        state.get_pipeline_model_parallel_group(),
        state.get_context_parallel_group(),
        state.get_data_parallel_group(),
        state.get_data_parallel_group(with_context_parallel=True),
        state.get_model_parallel_group(),
    ]
    for group in groups:
        dist.all_reduce(torch.ones(1, device="cuda"), group=group)
    torch.cuda.synchronize()
    return len(groups)


def measure_nccl(results: Results) -> None:
    """Memory and time over cycles; the groups that a trainer uses are warm in each."""
    used = use_groups()
    for concurrently in (True, False):
        down, up, destroy_s, reinit_s = [], [], [], []
        number = 0
        for cycle in range(CYCLES + 1):
            report = destroy_megatron_nccl_groups(concurrently=concurrently)
            number = len(report.groups)
            low = used_mib()
            again = reinit_megatron_nccl_groups()
            if cycle:  # before the first, only the groups that were used hold memory
                down.append(low)
                up.append(used_mib())
                destroy_s.append(report.seconds)
                reinit_s.append(again.seconds)
        params = {
            "groups": number,
            "communicators": used,
            "concurrently": concurrently,
            "cycles": CYCLES,
        }
        drift = max(max(down) - down[0], max(up) - up[0])
        results.add("nccl_cycle_slope_mib", [drift], "MiB", 64.0, **params)
        results.add("nccl_critical_path_s", destroy_s, "s", 1.0, **params)
        results.add("nccl_reinit_s", reinit_s, "s", **params)
        freed = [high - low for high, low in zip(up, down, strict=True)]
        results.add("nccl_freed_mib", freed, "MiB", **params)


class Trainer:
    """A GPT with a distributed optimizer; bf16 parameters, fp32 copies and Adam states."""

    def __init__(self) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        torch.manual_seed(5)
        model_parallel_cuda_manual_seed(5)
        config = TransformerConfig(
            **MODEL_1B,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_dropout_fusion=False,
        )
        gpt = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=VOCABULARY,
            max_sequence_length=LENGTH,
            position_embedding_type="rope",
        ).cuda()
        self.model = DistributedDataParallel(
            config,
            DistributedDataParallelConfig(use_distributed_optimizer=True),
            Float16Module(config, gpt),
        )
        self.optimizer = get_megatron_optimizer(
            OptimizerConfig(
                optimizer="adam",
                lr=1e-4,
                bf16=True,
                params_dtype=torch.bfloat16,
                use_distributed_optimizer=True,
            ),
            [self.model],
        )

    def step(self, number: int) -> float:
        """One step on tokens that its number determines."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        generator = torch.Generator("cuda").manual_seed(number)
        tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator, device="cuda")
        mask = torch.ones(1, 1, LENGTH, LENGTH, device="cuda").triu(1) > 0.5
        positions = torch.arange(LENGTH, device="cuda").expand(BATCH, -1)
        loss = self.model(tokens[:, :-1], positions, mask, labels=tokens[:, 1:]).float().mean()
        loss.backward()
        self.model.finish_grad_sync()
        self.optimizer.step()
        return float(loss)


def trained(between: Callable[[Trainer], None] | None) -> list[float]:
    """Losses of a run, with an act between its steps."""
    trainer = Trainer()
    losses = []
    for number in range(STEPS):
        losses.append(trainer.step(number))
        if between is not None:
            between(trainer)
    del trainer
    gc.collect()
    torch.cuda.empty_cache()
    return losses


def copy_rates() -> tuple[float, float]:
    """Bytes a second of one large pinned copy, device to host and host to device."""
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    rates = []
    with SharedHostMemory.create(COPY_BYTES, node_id="local") as host:
        host.register_cuda()
        for target, source in ((host.tensor, device), (device, host.tensor)):
            seconds = []
            for _ in range(REPEATS):
                torch.cuda.synchronize()
                started = time.perf_counter()
                target.copy_(source, non_blocking=True)
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - started)
            rates.append(COPY_BYTES / statistics.median(seconds))
    return rates[0], rates[1]


def measure_offload(results: Results) -> None:
    """Rates against plain pinned copies, what stays, and the losses."""
    to_host, to_device = copy_rates()
    offloader = DeviceOffloader("cuda")
    off, on, left = [], [], []
    moved = 0

    def between(trainer: Trainer) -> None:
        nonlocal moved
        roots = {"model": trainer.model, "optimizer": trainer.optimizer, **library_globals()}
        clear_training_caches([trainer.model])
        report = offloader.offload(roots)
        left.append(offloader.check(roots, budget_bytes=256 * MIB) / MIB)
        destroy_megatron_nccl_groups()
        reinit_megatron_nccl_groups()
        back = offloader.onload()
        moved = report.moved_bytes
        off.append(moved / report.seconds / to_host)
        on.append(back.moved_bytes / back.seconds / to_device)

    plain, again, shared = trained(None), trained(None), trained(between)
    params = {"model": "1B", "moved_gib": round(moved / 2**30, 2)}
    # The first one takes and registers the host memory.
    results.add("offload_ratio", off[1:], "ratio", BAR_RATIO, **params)
    results.add("onload_ratio", on[1:], "ratio", BAR_RATIO, **params)
    results.add("offload_residue_mib", left, "MiB", 256.0, **params)
    noise = max(abs(a - b) for a, b in zip(plain, again, strict=True))
    change = max(abs(a - b) for a, b in zip(plain, shared, strict=True))
    results.add("offload_loss_difference", [change], "nats", noise, **params)
    offloader.close()


def measure_cache(results: Results) -> None:
    """Cache builds from tensors on the card, against a plain pinned copy."""
    to_host, _ = copy_rates()
    shape = (4096, 11008)  # a projection of a 7B model
    number = CACHE_BYTES // (2 * shape[0] * shape[1])
    tensors = {
        f"model.layers.{index}.mlp.up_proj.weight": torch.randn(
            shape, dtype=torch.bfloat16, device="cuda"
        )
        for index in range(number)
    }

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors.items():
            yield name, tensor * 1  # as an export does: a fresh tensor each

    cache = CpuWeightCache("bench", WeightCacheSettings(slots=1), "local")
    layout = cache.plan([spec_of(name, tensor) for name, tensor in tensors.items()])
    ratios = []
    for version in range(REPEATS + 1):
        torch.cuda.synchronize()
        started = time.perf_counter()
        build_from_export(export, cache, step=version, slot=0, timeout_s=120)
        ratios.append(layout.total_nbytes / (time.perf_counter() - started) / to_host)
    gib = round(layout.total_nbytes / 2**30, 2)
    results.add("cache_build_ratio", ratios[1:], "ratio", BAR_RATIO, gib=gib)
    cache.close()


SECTIONS = {"nccl": measure_nccl, "offload": measure_offload, "cache": measure_cache}


def main() -> None:
    """Measure the chosen sections; one that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("gpu_megatron.json"))
    parser.add_argument("--only", nargs="*", choices=SECTIONS, default=list(SECTIONS))
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    start_world()
    results = Results(arguments.out, arguments.only)
    failed = [name for name in arguments.only if not _ran(name, partial(SECTIONS[name], results))]
    sys.exit(1 if failed else 0)


def _ran(name: str, section: Callable[[], None]) -> bool:
    try:
        section()
    except Exception:
        logger.exception("section %s failed", name)
        return False
    return True


if __name__ == "__main__":
    main()
