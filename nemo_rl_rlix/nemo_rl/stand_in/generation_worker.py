"""A worker actor of NeMo RL's generation with the reference engine in it."""

from __future__ import annotations

import os
import uuid
from collections.abc import AsyncIterator
from typing import Any

import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict

from nemo_rl_rlix.nemo_rl.samples import MAX_NEW_TOKENS_KEY, SEGMENTS_KEY, stop_ids
from nemo_rl_rlix.nemo_rl.stand_in.config import StandIn, shard_worker_config
from nemo_rl_rlix.nemo_rl.worker_actor import worker_actor
from nemo_rl_rlix.reference.worker import (
    CONTROL_CONCURRENCY,
    GENERATE_CONCURRENCY,
    ShardWorker,
)
from nemo_rl_rlix.shards.requests import GenerationRequest
from nemo_rl_rlix.vllm.options import SETTINGS_KEY


class StandInGenerationWorkerImpl(ShardWorker):
    """Takes and gives what ``VllmAsyncGenerationWorker`` does, for one-GPU shards."""

    @staticmethod
    def configure_worker(
        num_gpus: int | float, bundle_indices: Any = None, num_gpus_per_node: int | None = None
    ) -> tuple[dict[str, Any], dict[str, str], dict[str, Any], dict[str, Any]]:
        """Resources, variables, further arguments and environment of a worker."""
        return {"num_gpus": num_gpus}, {}, {}, {}

    def __init__(self, config: dict[str, Any], defer_model_load: bool = False) -> None:
        self._cfg = config
        # NeMo RL numbers a group's workers so; here each is a shard.
        rank = int(os.environ["RANK"])
        pipeline_id = config[SETTINGS_KEY]["pipeline_id"]
        super().__init__(shard_worker_config(StandIn.from_config(config), pipeline_id, rank))

    async def generate_async(
        self, data: Any, greedy: bool = False
    ) -> AsyncIterator[tuple[int, Any]]:
        """One sample, as NeMo RL's worker answers it.

        Raises:
            ShardPreemptedError: The gate is closed, or the request was aborted.
        """
        length = int(data["input_lengths"][0])
        row = data["input_ids"][0, :length]
        room = max(0, int(self._cfg["vllm_cfg"]["max_model_len"]) - length)
        limits = data.get(MAX_NEW_TOKENS_KEY) or [int(self._cfg["max_new_tokens"])]
        request = GenerationRequest(
            uuid.uuid4().hex,
            tuple(row.tolist()),
            min(room, int(limits[0])),
            temperature=0.0 if greedy else float(self._cfg["temperature"]),
            stop_ids=stop_ids(self._cfg),
        )
        output = await self.generate(request)
        total = length + len(output.token_ids)
        logprobs = torch.zeros(1, total)
        logprobs[0, length:] = torch.tensor(output.logprobs)
        yield (
            0,
            BatchedDataDict(
                {
                    "output_ids": torch.cat([row, row.new_tensor(output.token_ids)])[None],
                    "logprobs": logprobs,
                    "generation_lengths": torch.tensor([len(output.token_ids)]),
                    "unpadded_sequence_lengths": torch.tensor([total]),
                    "truncated": torch.tensor([output.finish_reason == "length"]),
                    SEGMENTS_KEY: [output.segments],
                }
            ),
        )

    # -- what NeMo RL asks besides ------------------------------------------------

    async def post_init_async(self) -> None:
        """Nothing is left to do."""

    async def report_device_id_async(self) -> list[str]:
        """The logical GPU."""
        return [f"logical-{self._config.gpu.gpu_id}"]

    async def report_dp_openai_server_base_url(self) -> None:
        """There is no HTTP server."""

    async def reset_prefix_cache_async(self) -> bool:
        """Forget cached prefixes."""
        return await self.reset_prefix_cache()

    async def prepare_refit_info_async(self, state_dict_info: dict[str, Any]) -> None:
        """The engine knows its tensors."""

    async def get_vllm_logger_metrics(self) -> dict[str, Any]:
        """There is no logger."""
        return {}

    async def clear_vllm_logger_metrics(self) -> None:
        """There is no logger."""

    async def _get_raw_spec_counters(self) -> dict[str, float]:
        """There is no draft model."""
        return {}

    async def shutdown(self) -> bool:
        """The process ends with its actor."""
        return True


@worker_actor(
    concurrency_groups={"generate": GENERATE_CONCURRENCY, "control": CONTROL_CONCURRENCY},
    max_restarts=0,
    max_task_retries=0,
)  # pragma: no cover
class StandInGenerationWorker(StandInGenerationWorkerImpl):
    """Actor of the worker."""
