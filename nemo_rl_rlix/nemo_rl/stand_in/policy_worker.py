"""A worker actor of NeMo RL's policy with the reference trainer in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ray
import torch
from nemo_rl.distributed.batched_data_dict import BatchedDataDict
from torch import Tensor

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.nemo_rl.stand_in.config import StandIn
from nemo_rl_rlix.nemo_rl.worker_actor import worker_actor
from nemo_rl_rlix.reference.device import LogicalGpu
from nemo_rl_rlix.reference.grpo import GrpoConfig, token_logprobs
from nemo_rl_rlix.reference.guards import trainer_owner
from nemo_rl_rlix.reference.memory import DeviceAccount
from nemo_rl_rlix.reference.tokenizer import EOS_ID, decode
from nemo_rl_rlix.reference.trainer import GrpoTrainer, latest_checkpoint
from nemo_rl_rlix.reference.warmup import base_weights
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.types import CacheHandle


class AbortedTextError(RLixError):
    """A trajectory ends where nothing but an abort can have ended it."""


class NemoTrainer(GrpoTrainer):
    """The reference trainer over NeMo RL's tensors.

    Rows are ``input_ids`` [B, T]; ``logprobs[:, t]`` is that of token t, 0 at t = 0.
    """

    def logprobs(self, input_ids: Tensor) -> Tensor:
        """Log probabilities of the tokens under the weights of now."""
        self._require_loaded("compute log-probabilities")
        with torch.no_grad(), self._account.compute("log-probabilities"):
            return self._of(input_ids)

    def update(self, data: Any) -> tuple[float, float]:
        """One optimizer step.

        Args:
            data: NeMo RL's training batch.

        Returns:
            Loss and norm of the gradient.
        """
        self._require_loaded("train")
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        tokens = mask.sum().clamp(min=1.0)
        with self._account.compute("train step"):
            ratio = torch.exp(self._of(data["input_ids"]) - data["prev_logprobs"])
            gain = torch.minimum(
                ratio * data["advantages"], ratio.clamp(0.8, 1.2) * data["advantages"]
            )
            loss = -(gain * mask).sum() / tokens
            loss.backward()
            norm = self._optimizer.clip(self.config.max_grad_norm)
            self._optimizer.step(self.config.lr)
            self._optimizer.zero_gradients()
        self.next_step += 1
        return float(loss.detach()), float(norm)

    def _of(self, input_ids: Tensor) -> Tensor:
        logits = self.model(input_ids[:, :-1])
        shifted = token_logprobs(logits, input_ids, self._temperature)
        return torch.cat([torch.zeros_like(shifted[:, :1]), shifted], dim=1)


class StandInPolicyWorkerImpl:
    """Takes and gives what ``MegatronPolicyWorker`` does, for one rank."""

    def __init__(
        self, config: dict[str, Any], weights_path: str | None = None, **ignored: Any
    ) -> None:
        stand_in = StandIn.from_config(config)
        gpu = LogicalGpu(stand_in.gpu(stand_in.train_gpus[0]))
        weights = base_weights(stand_in.task, stand_in.model, stand_in.warmup, stand_in.base_path)
        self._gpu, self._stand_in = gpu, stand_in
        self._trainer = NemoTrainer(
            stand_in.model,
            GrpoConfig(lr=stand_in.lr),
            weights,
            account=DeviceAccount(gpu, trainer_owner(stand_in.name), f"{stand_in.name}-trainer"),
        )
        if weights_path is not None:
            newest = latest_checkpoint(Path(weights_path))
            if newest is None:
                raise RLixError(f"{weights_path} has no checkpoint of the stand-in trainer")
            self._trainer.load(newest)
        # As NeMo RL's worker, it is on its device when it has been built.
        self._trainer.onload()
        self._cache: CpuWeightCache | None = None

    # -- time sharing -------------------------------------------------------------

    def rlix_configure(self, pipeline_id: str, rlix_block: dict[str, Any]) -> None:
        """Make the weight cache of the pipeline."""
        settings = RLixSettings.from_recipe(rlix_block)
        node_id = ray.get_runtime_context().get_node_id()
        self._cache = CpuWeightCache(pipeline_id, settings.weight_cache, node_id)
        self._cache.plan(self._trainer.tensor_specs(), self._trainer.ties())

    def rlix_onload(self, timeout_s: float) -> None:
        """Every tensor to the device."""
        self._trainer.onload()

    def rlix_offload(self, timeout_s: float) -> None:
        """Every tensor to the host."""
        self._trainer.offload()
        self._gpu.flush()

    def build_cpu_weight_cache(self, step: int, slot: int, timeout_s: float) -> CacheHandle:
        """Snapshot the weights."""
        assert self._cache is not None, "rlix_configure comes first"
        return self._cache.build(step, slot, self._trainer.named_weights())

    def prepare_refit_info(self) -> dict[str, Any]:
        """Shape and dtype of every weight."""
        return {
            name: (weight.shape, weight.dtype) for name, weight in self._trainer.named_weights()
        }

    # -- training -----------------------------------------------------------------

    def prepare_for_lp_inference(self, **ignored: Any) -> None:
        """Nothing beyond the onload."""

    def prepare_for_training(self, **ignored: Any) -> None:
        """Nothing beyond the onload."""

    def get_logprobs(self, data: Any, **ignored: Any) -> Any:
        """Log probabilities under the policy."""
        return BatchedDataDict({"logprobs": self._trainer.logprobs(data["input_ids"])})

    def get_reference_policy_logprobs(self, data: Any, **ignored: Any) -> Any:
        """Those of the policy again: there is no second model here."""
        return BatchedDataDict({"reference_logprobs": self._trainer.logprobs(data["input_ids"])})

    def train(self, data: Any, loss_fn: Any = None, **ignored: Any) -> dict[str, Any]:
        """One step; refuses text that an abort has cut off.

        Raises:
            AbortedTextError: A response neither ends nor is as long as may be.
        """
        prompts = [self._checked_prompt(data, row) for row in range(len(data["input_ids"]))]
        step = self._trainer.next_step
        loss, norm = self._trainer.update(data)
        with Path(self._stand_in.record).open("a", encoding="utf-8") as record:
            record.write(json.dumps({"step": step, "loss": loss, "prompts": prompts}) + "\n")
        mask = data["token_mask"] * data["sample_mask"].unsqueeze(-1)
        tokens = float(mask.sum())
        difference = (data["prev_logprobs"] - data["generation_logprobs"]).abs() * mask
        return {
            "global_loss": torch.tensor(loss),
            "grad_norm": torch.tensor(norm),
            "all_mb_metrics": {
                "loss": [loss],
                "lr": [self._stand_in.lr],
                "wd": [0.0],
                "global_valid_seqs": [float(len(prompts))],
                "global_valid_toks": [tokens],
                "gen_kl_error": [float(difference.sum()) / max(tokens, 1.0)],
            },
            "gpu_name": "logical",
            "model_dtype": torch.float32,
        }

    def _checked_prompt(self, data: Any, row: int) -> str:
        length = int(data["input_lengths"][row])
        ids = data["input_ids"][row, :length]
        sampled = data["token_mask"][row, :length].bool()
        response = ids[sampled].tolist()
        whole = len(response) >= self._stand_in.max_new_tokens
        full = length >= self._stand_in.model.max_len
        if not response or not (response[-1] == EOS_ID or whole or full):
            raise AbortedTextError(f"{decode(response)!r} was cut off after {len(response)} tokens")
        return decode(ids[~sampled].tolist())

    # -- checkpoints, end ---------------------------------------------------------

    def save_checkpoint(self, weights_path: str, **ignored: Any) -> None:
        """Write policy and optimizer."""
        self._trainer.save(Path(weights_path))

    def finalize_async_save(self) -> None:
        """A save is complete when it returns."""

    def report_node_ip_and_gpu_id(self) -> tuple[str, int]:
        """Where it runs."""
        return str(ray.util.get_node_ip_address()), self._gpu.gpu_id

    def shutdown(self) -> bool:
        """The process ends with its actor."""
        return True


@worker_actor(max_restarts=0, max_task_retries=0)  # pragma: no cover
class StandInPolicyWorker(StandInPolicyWorkerImpl):
    """Actor of the worker."""
