"""The policy learns by its rewards, and by nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nemo_rl_rlix.reference.engine import ContinuousBatchingEngine, EngineConfig, EngineOutput
from nemo_rl_rlix.reference.grpo import GrpoConfig
from nemo_rl_rlix.reference.task import CountingTask, Workload, reward
from nemo_rl_rlix.reference.tokenizer import EOS_ID, decode, encode
from nemo_rl_rlix.reference.trainer import GrpoTrainer
from nemo_rl_rlix.reference.trajectory import PromptGroup, Trajectory
from nemo_rl_rlix.reference.warmup import WarmupConfig, base_weights, model_config
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest

STEPS = 28
DEFAULT = Workload()


def generate(
    engine: ContinuousBatchingEngine, requests: list[GenerationRequest]
) -> dict[str, GenerationOutput]:
    for request in requests:
        engine.add(request)
    while engine.step():
        pass
    outputs = {}
    for output in engine.take_outputs():
        assert isinstance(output, EngineOutput)
        part = output.generation
        outputs[output.request_id] = GenerationOutput(
            output.request_id,
            part.token_ids,
            part.logprobs,
            part.segments,
            output.finish_reason,
            dp_rank=0,
        )
    return outputs


def collect(
    engine: ContinuousBatchingEngine, task: CountingTask, workload: Workload, step: int, seed: int
) -> list[PromptGroup]:
    problems = [task.problem(step, index) for index in range(workload.prompts_per_step)]
    requests = [
        GenerationRequest(
            request_id=f"v{step}-g{index}-t{number}",
            prompt_ids=encode(problem.prompt),
            max_new_tokens=workload.max_new_tokens,
            stop_ids=(EOS_ID,),
            seed=hash((seed, step, index, number)),
        )
        for index, problem in enumerate(problems)
        for number in range(workload.generations_per_prompt)
    ]
    outputs = generate(engine, requests)
    size = workload.generations_per_prompt
    return [
        PromptGroup(
            f"v{step}-g{index}",
            step,
            tuple(
                Trajectory.from_output(
                    request.prompt_ids,
                    outputs[request.request_id],
                    reward(
                        problem,
                        decode(outputs[request.request_id].token_ids),
                        finished=outputs[request.request_id].finish_reason == "stop",
                    ),
                )
                for request in requests[index * size : (index + 1) * size]
            ),
        )
        for index, problem in enumerate(problems)
    ]


def quarters(
    base_dir: Path, *, seed: int, lag: int, config: GrpoConfig, workload: Workload = DEFAULT
) -> tuple[float, float]:
    """Mean reward of the first and of the last quarter of a run.

    Args:
        base_dir: Folder of base models.
        seed: Seed of everything.
        lag: Versions by which generation is behind training.
        config: How the policy is updated.
        workload: What one step asks for.
    """
    task = CountingTask(workload, seed)
    size = model_config(task, workload)
    base = base_weights(task, size, WarmupConfig(seed=seed), base_dir)
    trainer = GrpoTrainer(size, config, base)
    trainer.onload()
    engine = ContinuousBatchingEngine(EngineConfig(model=size, max_num_seqs=64))
    versions = [{name: tensor.clone() for name, tensor in trainer.named_weights()}]
    rewards = []
    for step in range(STEPS):
        engine.weights_version = max(0, step - lag)
        engine.load_weights(versions[engine.weights_version].items())
        assert engine.reset_prefix_cache()
        metrics = trainer.train(step, collect(engine, task, workload, step, seed))
        assert metrics.oldest_version == max(0, step - lag)
        rewards.append(metrics.reward_mean)
        versions.append({name: tensor.clone() for name, tensor in trainer.named_weights()})
    quarter = STEPS // 4
    return sum(rewards[:quarter]) / quarter, sum(rewards[-quarter:]) / quarter


@pytest.fixture(scope="module")
def base_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return tmp_path_factory.mktemp("base")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "lag"), [(0, 1), (1, 2), (2, 1)])
def test_reward_rises(base_dir: Path, seed: int, lag: int) -> None:
    first, last = quarters(base_dir, seed=seed, lag=lag, config=GrpoConfig())
    assert 0.2 <= first <= 0.55  # a base model that has much to learn, and knows something
    assert last - first >= 0.15, (first, last)


@pytest.mark.slow
def test_without_advantages_nothing_is_learnt(base_dir: Path) -> None:
    # Many prompts, since the bar is narrower than the noise of the default workload.
    first, last = quarters(
        base_dir,
        seed=0,
        lag=1,
        config=GrpoConfig(advantage_scale=0.0),
        workload=Workload(prompts_per_step=64, generations_per_prompt=2),
    )
    assert abs(last - first) <= 0.05, (first, last)


def test_a_base_model_is_trained_once(base_dir: Path) -> None:
    task = CountingTask(DEFAULT, 0)
    size, config = model_config(task, DEFAULT), WarmupConfig(seed=0, steps=3)
    one = base_weights(task, size, config, base_dir)
    files = set(base_dir.iterdir())
    two = base_weights(task, size, config, base_dir)
    assert set(base_dir.iterdir()) == files
    assert all(torch.equal(one[name], two[name]) for name in one)
    other = base_weights(task, size, WarmupConfig(seed=1, steps=3), base_dir)
    assert len(set(base_dir.iterdir())) == len(files) + 1
    assert not torch.equal(one["embed_tokens"], other["embed_tokens"])
