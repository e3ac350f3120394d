"""One pipeline: NeMo RL's own setup and asynchronous loop over the stand-ins."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import nemo_rl.algorithms.grpo as grpo
import ray
from nemo_rl.distributed.ray_actor_environment_registry import ACTOR_ENVIRONMENT_REGISTRY
from nemo_rl.distributed.virtual_cluster import PY_EXECUTABLES
from nemo_rl.models.generation import configure_generation_config
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from omegaconf import OmegaConf

from nemo_rl_rlix.nemo_rl import registration
from nemo_rl_rlix.nemo_rl.stand_in.config import KEY, StandIn
from nemo_rl_rlix.nemo_rl.stand_in.job import Job
from nemo_rl_rlix.nemo_rl.stand_in.swaps import stand_in_swaps
from nemo_rl_rlix.nemo_rl.stand_in.task import (
    TASK,
    CountingData,
    make_environment,
    make_tokenizer,
    write_model_folder,
)


def recipe(job: Job, stand_in: StandIn) -> Any:
    """NeMo RL's exemplar recipe, made small."""
    register_omegaconf_resolvers()
    examples = Path(grpo.__file__).parents[2] / "examples" / "configs"
    config = load_config(str(examples / "grpo_math_1B.yaml"))
    data: Any = OmegaConf.to_container(
        OmegaConf.merge(config, OmegaConf.create(_changes(job, stand_in))), resolve=True
    )
    data["rlix"] = job.rlix
    data["policy"][KEY] = stand_in.to_config()
    data["policy"]["generation"][KEY] = stand_in.to_config()
    return grpo.MasterConfig(**data)


def _changes(job: Job, stand_in: StandIn) -> dict[str, Any]:
    folder = Path(job.folder)
    batch = stand_in.prompts_per_step * stand_in.generations_per_prompt
    longest = stand_in.model.max_len
    return {
        "grpo": {
            "num_prompts_per_step": stand_in.prompts_per_step,
            "num_generations_per_prompt": stand_in.generations_per_prompt,
            "max_num_steps": job.steps,
            "max_num_epochs": 1,
            "val_period": job.val_period,
            "val_at_start": False,
            "max_val_samples": 4,
            "val_batch_size": 4,
            "seed": stand_in.seed,
            "async_grpo": {"enabled": True, "max_trajectory_age_steps": 1},
        },
        "loss_fn": {"use_importance_sampling_correction": True},
        "checkpointing": {
            "enabled": True,
            "checkpoint_dir": str(folder / "checkpoints"),
            "metric_name": None,
            "save_period": job.save_period,
            "keep_top_k": 2,
            "model_save_format": None,
        },
        "policy": {
            "model_name": str(folder / "model"),
            "train_global_batch_size": batch,
            "train_micro_batch_size": batch,
            "logprob_batch_size": batch,
            "max_total_sequence_length": longest,
            "make_sequence_length_divisible_by": 1,
            "dtensor_cfg": {"enabled": False},
            "megatron_cfg": {"enabled": True},
            "sequence_packing": {"enabled": False},
            "dynamic_batching": {"enabled": False},
            "generation": {
                "max_new_tokens": stand_in.max_new_tokens,
                "vllm_cfg": {
                    "async_engine": True,
                    "max_model_len": longest,
                    "enable_vllm_metrics_logger": False,
                },
                "colocated": {
                    "enabled": False,
                    "resources": {"gpus_per_node": job.infer_gpus, "num_nodes": None},
                },
            },
        },
        "data": {"shuffle": False, "num_workers": 0},
        "logger": {"log_dir": str(folder / "logs"), "monitor_gpus": False},
        "cluster": {"gpus_per_node": job.gpus, "num_nodes": 1},
    }


def run(job: Job) -> None:
    """Run to the end; what the trainer was trained on is in the record of the stand-in."""
    stand_in = StandIn.from_config({KEY: job.stand_in})
    folder = Path(job.folder)
    write_model_folder(folder / "model")
    # The import of NeMo RL has registered the real workers where the variable is set.
    registration.unregister()
    registration.register(stand_in_swaps(stand_in))
    # NEMO_RL_PY_EXECUTABLES_SYSTEM does not reach these two, and nothing is to be fetched.
    for name in ("AsyncTrajectoryCollector", "ReplayBuffer"):
        actor = f"nemo_rl.algorithms.async_utils.{name}"
        ACTOR_ENVIRONMENT_REGISTRY[actor] = PY_EXECUTABLES.SYSTEM
    ray.init(
        address=job.address, log_to_driver=False, runtime_env={"env_vars": _variables(os.environ)}
    )
    config = recipe(job, stand_in)
    tokenizer = make_tokenizer()
    config.policy["generation"] = configure_generation_config(
        config.policy["generation"], tokenizer
    )
    environment = {TASK: make_environment()}
    data = CountingData(stand_in, count=(job.steps + 4) * stand_in.prompts_per_step)
    validation = CountingData(stand_in, count=4, first=10_000)
    (
        policy, generation, _, _, dataloader, val_dataloader, loss_fn, logger, checkpointer, state,
        master_config, *_,
    ) = grpo.setup(config, tokenizer, data, validation)  # fmt: skip
    grpo.async_grpo_train(
        policy=policy,
        policy_generation=generation,
        dataloader=dataloader,
        val_dataloader=val_dataloader,
        tokenizer=tokenizer,
        loss_fn=loss_fn,
        task_to_env=environment,
        val_task_to_env=environment,
        logger=logger,
        checkpointer=checkpointer,
        grpo_save_state=state,
        master_config=master_config,
        max_trajectory_age_steps=1,
    )


def _variables(environment: Mapping[str, str]) -> dict[str, str]:
    """As NeMo RL's ``init_ray`` hands them on, without Ray's own."""
    return {key: value for key, value in environment.items() if not key.startswith("RAY_")}


def main() -> None:
    """Run the job whose file is the argument."""
    run(Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
