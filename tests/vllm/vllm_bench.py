"""What the tests of a real engine share: an event loop in a thread, tiny checkpoints."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DIMENSIONS = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,  # head size 64: smaller ones are refused on the CPU
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 4096,
    "initializer_range": 0.3,  # so that greedy answers do not repeat one token
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class LoopThread:
    """An event loop in a thread of its own, as a worker actor has one."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, Any], timeout_s: float = 60.0) -> Any:
        future = asyncio.run_coroutine_threadsafe(coroutine, self.loop)
        return future.result(timeout_s)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


@dataclass
class Checkpoint:
    """Weights of one version as a trainer exports them, and as files."""

    version: int
    folder: Path
    weights: list[tuple[str, Any]] = field(default_factory=list)


def engine_arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    return {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 2048,
        "max_num_seqs": 8,
        "dtype": "float32",
        "gpu_memory_utilization": 0.1,
        "disable_log_stats": True,
        "worker_extension_cls": "cpu_extension.CpuExtension",
        **changes,
    }
