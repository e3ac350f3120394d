"""The trainer's process: grants, memory, the weight cache and a checkpoint, over Ray."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
import torch

from nemo_rl_rlix.errors import GrantRequiredError, Segment
from nemo_rl_rlix.reference.device import LogicalGpu, create_logical_gpus
from nemo_rl_rlix.reference.engine import ContinuousBatchingEngine, EngineConfig
from nemo_rl_rlix.reference.task import CountingTask, Workload
from nemo_rl_rlix.reference.tokenizer import EOS_ID, encode
from nemo_rl_rlix.reference.trainer import TrainMetrics
from nemo_rl_rlix.reference.trainer_worker import (
    ReferenceTrainer,
    TrainerLostError,
    TrainerWorkerConfig,
)
from nemo_rl_rlix.reference.trajectory import PromptGroup, Trajectory
from nemo_rl_rlix.reference.warmup import WarmupConfig, model_config
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.training.protocol import Trainer
from nemo_rl_rlix.weights.transports.shm import ShmReceiver

pytestmark = pytest.mark.ray
WORKLOAD = Workload(prompts_per_step=2, generations_per_prompt=2)
TASK = CountingTask(WORKLOAD, 0)
LIMIT_S = 60.0


def groups(step: int) -> list[PromptGroup]:
    made = []
    for index in range(2):
        problem = TASK.problem(step, index)
        tokens = (*encode(problem.answer), EOS_ID)
        made.append(
            PromptGroup(
                f"v{step}-g{index}",
                step,
                tuple(
                    Trajectory(
                        f"v{step}-g{index}-t{number}",
                        encode(problem.prompt),
                        tokens,
                        (-2.0,) * len(tokens),
                        (Segment(step, len(tokens)),),
                        "stop",
                        float(number),
                    )
                    for number in range(2)
                ),
            )
        )
    return made


@pytest.fixture
def trainer(
    ray_cluster: str, tmp_path: Path
) -> Iterator[tuple[ReferenceTrainer, LogicalGpu, TrainerWorkerConfig]]:
    spec = create_logical_gpus(tmp_path / "gpus", 1, 8 << 20)[0]
    config = TrainerWorkerConfig(
        pipeline_id=f"p{os.urandom(4).hex()}",
        owner="p_actor_train",
        gpu=spec,
        base_dir=tmp_path / "base",
        workload=WORKLOAD,
        warmup=WarmupConfig(steps=2),
        weight_cache=WeightCacheSettings(bucket_mib=1),
        pin=False,
    )
    subject = ReferenceTrainer(config, {"num_cpus": 0})
    assert subject.wait_ready(timeout_s=LIMIT_S) == 0
    yield subject, LogicalGpu(spec), config
    with contextlib.suppress(TrainerLostError):
        subject.close(timeout_s=LIMIT_S)


def test_one_step_between_two_grants(
    trainer: tuple[ReferenceTrainer, LogicalGpu, TrainerWorkerConfig], tmp_path: Path
) -> None:
    subject, gpu, config = trainer
    as_protocol: Trainer = subject
    with pytest.raises(GrantRequiredError):
        as_protocol.onload(timeout_s=LIMIT_S)

    def step(number: int) -> TrainMetrics:
        gpu.grant(config.owner)
        as_protocol.onload(timeout_s=LIMIT_S)
        assert gpu.held_bytes(config.resident) > 0
        return subject.train(number, groups(number), timeout_s=LIMIT_S)

    first = step(0)
    assert first.trajectories == 4 and first.grad_norm > 0
    handle = as_protocol.build_cpu_weight_cache(1, slot=0, timeout_s=LIMIT_S)
    report = as_protocol.offload(timeout_s=LIMIT_S)
    assert (report.held_bytes, gpu.residents()) == (0, {})
    gpu.revoke(config.owner)
    with pytest.raises(GrantRequiredError):
        subject.train(1, groups(1), timeout_s=LIMIT_S)

    # What an engine reads from the cache is what the trainer's next step starts from.
    assert handle.weights_version == 1
    engine = ContinuousBatchingEngine(EngineConfig(model=model_config(TASK, WORKLOAD)))
    ShmReceiver(ray.get_runtime_context().get_node_id()).receive(
        handle, engine.load_weights, "cpu", timeout_s=LIMIT_S
    )
    assert engine.expected_names() == {spec.name for spec in handle.layout.tensors}
    assert dict(handle.layout.ties) == {"lm_head": "embed_tokens"}
    path = subject.save(tmp_path / "checkpoints", b"extra", timeout_s=LIMIT_S)
    saved = torch.load(path, weights_only=True)["tensors"]
    for name, tensor in engine.memory.model.named_parameters():
        assert torch.equal(tensor, saved[name]), name

    second = step(1)
    subject.offload(timeout_s=LIMIT_S)
    assert subject.load(path, timeout_s=LIMIT_S) == b"extra"
    assert subject.wait_ready(timeout_s=LIMIT_S) == 1
    again = step(1)
    assert (again.loss, again.grad_norm) == (second.loss, second.grad_norm)
    assert gpu.violations()[0].owner == config.owner  # the refused onload, and no other use
    assert len(gpu.violations()) == 1


def test_a_trainer_that_died_is_named(
    trainer: tuple[ReferenceTrainer, LogicalGpu, TrainerWorkerConfig],
) -> None:
    subject, gpu, config = trainer
    gpu.grant(config.owner)
    subject.onload(timeout_s=LIMIT_S)
    (pid,) = gpu.processes(config.resident)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(TrainerLostError, match="checkpoint"):
        subject.offload(timeout_s=LIMIT_S)
    assert gpu.held_bytes(config.resident) == 0
