"""How much device memory a shard's own processes hold. Pure, but for the reading of NVML.

The card's own figure counts neighbours, which sharing makes ordinary; so a process is
asked what it has, and NVML what it charges to that process, where it says.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_rl_rlix.shards.protocol import MemoryReport

MIB = 1024 * 1024
CONTEXT_BYTES = 640 * MIB
"""Device memory of a CUDA context with vLLM's kernels loaded, where NVML does not tell."""


@dataclass(frozen=True)
class ProcessMemory:
    """Device memory of one process on one GPU, as that process sees it.

    Attributes:
        pool_bytes: Tag -> bytes of the sleep-mode allocator, mapped or not.
        unmapped_tags: Tags whose physical memory has been given back.
        reserved_bytes: Bytes reserved by torch's allocator. It counts the memory of the
            sleep-mode allocator too, and does not know when that is unmapped.
        charged_bytes: Bytes that NVML charges to the process; ``None`` where it does not
            say (in many containers it cannot).
        device_used_bytes: Bytes in use on the whole card, neighbours included.
        node: Node of the process.
        device: UUID or index of the card.
    """

    pool_bytes: Mapping[str, int]
    unmapped_tags: frozenset[str]
    reserved_bytes: int
    charged_bytes: int | None
    device_used_bytes: int
    node: str = ""
    device: str = ""

    @property
    def unmapped_bytes(self) -> int:
        """Bytes that torch counts and that are not there."""
        return sum(size for tag, size in self.pool_bytes.items() if tag in self.unmapped_tags)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of the sleep-mode allocator that are there."""
        return sum(self.pool_bytes.values()) - self.unmapped_bytes


def held_bytes(process: ProcessMemory, context_bytes: int = CONTEXT_BYTES) -> int:
    """Device memory of one process.

    Args:
        process: What was read.
        context_bytes: Bytes of its CUDA context, which only NVML could tell.
    """
    if process.charged_bytes is not None:
        return process.charged_bytes
    own = max(process.reserved_bytes - process.unmapped_bytes, process.mapped_bytes)
    # What a process has cannot be more than what the whole card has in use.
    return min(own + context_bytes, max(process.device_used_bytes, own))


def shard_report(
    processes: Iterable[ProcessMemory], budget_per_gpu_bytes: int, context_bytes: int
) -> MemoryReport:
    """Sum over the GPUs of a shard.

    Args:
        processes: One entry for each worker process.
        budget_per_gpu_bytes: Bytes that a sleeping shard may keep on each GPU.
        context_bytes: See :func:`held_bytes`.
    """
    readings = list(processes)
    return MemoryReport(
        held_bytes=sum(held_bytes(reading, context_bytes) for reading in readings),
        budget_bytes=budget_per_gpu_bytes * len(readings),
    )


def charged_to(pid: int, entries: Iterable[tuple[int, int | None]]) -> int | None:
    """Bytes charged to a process in a list of ``(pid, bytes)``.

    ``None`` when the process is not listed (its pid is another one outside of its
    container) or is listed without a figure.
    """
    charged = [used for listed, used in entries if listed == pid]
    if not charged or any(used is None for used in charged):
        return None
    return sum(used for used in charged if used is not None)


def nvml_charged_bytes(nvml: Any, device_uuid: str, pid: int | None = None) -> int | None:
    """What NVML charges to a process.

    Args:
        nvml: The ``pynvml`` module.
        device_uuid: UUID of the card, e.g. ``GPU-...``.
        pid: The process; this one when left out.
    """
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device_uuid)
        entries = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:
        return None
    finally:
        nvml.nvmlShutdown()
    return charged_to(
        os.getpid() if pid is None else pid, [(entry.pid, entry.usedGpuMemory) for entry in entries]
    )
