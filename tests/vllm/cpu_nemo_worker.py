"""NeMo RL's async worker without a GPU. Imported in the actor's process only."""

from __future__ import annotations

from typing import Any

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from nemo_rl.models.generation.vllm import vllm_worker

from nemo_rl_rlix.nemo_rl.vllm_workers import RlixVllmAsyncGenerationWorkerImpl
from nemo_rl_rlix.vllm.worker import MAX_NEW_TOKENS_KEY, SEGMENTS_KEY

# It edits vLLM's files, for executors on GPUs.
vllm_worker._apply_vllm_patches = lambda *args, **kwargs: None


class CpuNemoWorker(RlixVllmAsyncGenerationWorkerImpl):
    rlix_extension_cls = "cpu_nemo_extension.CpuNemoExtension"

    async def post_init_async(self) -> None:
        """The base class's asks for the identity of the GPU."""

    async def ask(self, tokens: list[int], limit: int | None) -> tuple[int, dict[str, Any], Any]:
        """One request as NeMo RL's generation class sends it, as plain data."""
        data = BatchedDataDict(
            {"input_ids": torch.tensor([tokens]), "input_lengths": torch.tensor([len(tokens)])}
        )
        if limit is not None:
            data[MAX_NEW_TOKENS_KEY] = [limit]
        results = [result async for result in self.generate_async(data, greedy=True)]
        ((index, batch),) = results
        names = ("output_ids", "generation_lengths", "truncated")
        return index, {name: batch[name].tolist() for name in names}, batch[SEGMENTS_KEY]
