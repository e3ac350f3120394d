from __future__ import annotations

import math
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trajectories import group, trajectory

from nemo_rl_rlix.errors import GrantRequiredError
from nemo_rl_rlix.reference.device import DeviceOutOfMemoryError, LogicalGpu, create_logical_gpus
from nemo_rl_rlix.reference.grpo import GrpoConfig
from nemo_rl_rlix.reference.memory import DeviceAccount
from nemo_rl_rlix.reference.model import ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.tokenizer import VOCAB_SIZE
from nemo_rl_rlix.reference.trainer import (
    CheckpointError,
    GrpoTrainer,
    OffloadError,
    latest_checkpoint,
)
from nemo_rl_rlix.reference.trajectory import PromptGroup, UnfinishedTrajectoryError

MODEL = ModelConfig(vocab_size=VOCAB_SIZE, width=16, layers=2, heads=2, hidden=32, max_len=16)
OWNER = "p0_actor_train"


def weights() -> dict[str, Tensor]:
    return ReferenceModel(MODEL, seed=3).state_dict()


def trainer(gpu: LogicalGpu | None = None, config: GrpoConfig | None = None) -> GrpoTrainer:
    account = DeviceAccount(gpu, OWNER, "p0-trainer")
    return GrpoTrainer(MODEL, config or GrpoConfig(lr=1e-2), weights(), account=account)


def make_gpu(tmp_path: Path, budget: int = 1 << 20) -> LogicalGpu:
    return LogicalGpu(create_logical_gpus(tmp_path / "gpus", 1, budget)[0])


def groups_of(step: int) -> list[PromptGroup]:
    """Two groups whose rewards differ and whose log-probabilities are about right."""
    lp = -math.log(VOCAB_SIZE)
    return [
        PromptGroup(
            f"v{step}-g{index}",
            step,
            tuple(
                trajectory(f"t{i}", float(i % 2), tokens=(20 + i, 30 + step, 96), logprobs=[lp] * 3)
                for i in range(4)
            ),
        )
        for index in range(2)
    ]


def run(subject: GrpoTrainer, steps: range, *, offload: bool) -> list[tuple[float, float, float]]:
    figures = []
    for step in steps:
        subject.onload()
        metrics = subject.train(step, groups_of(step))
        figures.append((metrics.loss, metrics.grad_norm, metrics.kl))
        if offload:
            subject.offload()
    return figures


def test_offloading_changes_no_figure() -> None:
    moved, stayed = trainer(), trainer()
    expected = run(stayed, range(5), offload=False)
    assert run(moved, range(5), offload=True) == expected
    assert len({loss for loss, *_ in expected}) == 5  # it does move
    moved.onload()
    for (name, one), (_, two) in zip(moved.named_weights(), stayed.named_weights(), strict=True):
        assert torch.equal(one, two), name


def test_offload_leaves_nothing_on_the_device(tmp_path: Path) -> None:
    gpu = make_gpu(tmp_path)
    subject = trainer(gpu)
    assert not subject.loaded and sum(subject.device_bytes().values()) == 0
    gpu.grant(OWNER)
    subject.onload()
    subject.onload()
    held = subject.device_bytes()
    parameters = sum(p.numel() * 4 for p in subject.model.parameters())
    assert held["gradients"] == parameters
    assert held["optimizer"] >= 2 * parameters
    assert gpu.held_bytes("p0-trainer") == sum(held.values())
    subject.train(0, groups_of(0))
    assert subject.device_bytes() == held  # memory does not grow with the first step
    for _ in range(2):
        report = subject.offload()
        assert (report.held_bytes, report.within_budget) == (0, True)
        assert all(t.untyped_storage().nbytes() == 0 for _, _, t in subject.device_tensors())
    assert gpu.residents() == {}


def test_a_tensor_that_stays_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = make_gpu(tmp_path)
    gpu.grant(OWNER)
    subject = trainer(gpu)
    subject.onload()
    leak = torch.zeros(8)
    found = list(subject.device_tensors())
    calls = iter([found, [*found, ("optimizer", "forgotten.exp_avg", leak)]])
    monkeypatch.setattr(subject, "device_tensors", lambda: next(calls))
    with pytest.raises(OffloadError, match="forgotten"):
        subject.offload()
    assert gpu.held_bytes("p0-trainer") > 0  # not handed over


def test_no_use_outside_a_grant(tmp_path: Path) -> None:
    gpu = make_gpu(tmp_path)
    subject = trainer(gpu)
    with pytest.raises(GrantRequiredError):
        subject.onload()
    with pytest.raises(GrantRequiredError, match="offloaded"):
        subject.train(0, groups_of(0))
    gpu.grant(OWNER)
    subject.onload()
    gpu.revoke(OWNER)
    gpu.grant("another")
    with pytest.raises(GrantRequiredError):
        subject.train(0, groups_of(0))
    with pytest.raises(GrantRequiredError):
        list(subject.named_weights())
    assert subject.next_step == 0
    subject.offload()  # giving memory back needs no grant
    with pytest.raises(GrantRequiredError, match="offloaded"):
        list(subject.named_weights())


def test_a_full_device_refuses_the_whole_onload(tmp_path: Path) -> None:
    gpu = make_gpu(tmp_path, budget=60_000)
    gpu.grant(OWNER)
    subject = trainer(gpu)
    with pytest.raises(DeviceOutOfMemoryError):
        subject.onload()
    assert not subject.loaded and gpu.residents() == {}


def test_only_finished_trajectories_of_the_next_step_are_trained() -> None:
    subject = trainer()
    subject.onload()
    before = [tensor.clone() for _, tensor in subject.named_weights()]
    with pytest.raises(UnfinishedTrajectoryError):
        subject.train(0, [*groups_of(0), group("v0-g9", 0, finish="abort")])
    for step, batch in ((1, groups_of(1)), (0, [])):
        with pytest.raises(ValueError, match="step"):
            subject.train(step, batch)
    after = [tensor for _, tensor in subject.named_weights()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_zero_advantages_move_nothing() -> None:
    subject = trainer(config=GrpoConfig(lr=1e-2, advantage_scale=0.0))
    subject.onload()
    before = [tensor.clone() for _, tensor in subject.named_weights()]
    metrics = subject.train(0, groups_of(0))
    assert metrics.grad_norm == 0
    after = [tensor for _, tensor in subject.named_weights()]
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))


def test_metrics_say_how_far_off_policy_the_tokens_are() -> None:
    subject = trainer()
    subject.onload()
    first = subject.train(0, groups_of(0))
    assert first.ratio_mean == pytest.approx(1.0, abs=0.1)
    assert (first.tokens, first.trajectories) == (24, 8)
    assert (first.reward_mean, first.reward_std) == (0.5, 0.5)
    old = [
        PromptGroup(
            "g", 1, tuple(trajectory(f"t{i}", float(i), logprobs=[-9.0] * 3) for i in (0, 1))
        )
    ]
    metrics = subject.train(1, old)
    assert metrics.capped_share == 1.0 and metrics.ratio_max > 2.0
    assert metrics.oldest_version == 0


# -- checkpoints ------------------------------------------------------------------------


@pytest.mark.parametrize("offloaded", [True, False])
def test_a_resumed_run_goes_on_as_if_never_ended(tmp_path: Path, offloaded: bool) -> None:
    straight = trainer()
    expected = run(straight, range(6), offload=True)
    first = trainer()
    assert run(first, range(3), offload=offloaded) == expected[:3]
    path = first.save(tmp_path, b"buffer")
    assert latest_checkpoint(tmp_path) == path
    second = trainer()
    if not offloaded:
        second.onload()
    assert second.load(path) == b"buffer"
    assert second.next_step == 3
    assert run(second, range(3, 6), offload=True) == expected[3:]


def test_a_checkpoint_is_whole_or_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = trainer()
    good = subject.save(tmp_path).read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="no space"):
        subject.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000.pt"]
    assert (tmp_path / "step-000000.pt").read_bytes() == good


def test_the_newest_checkpoint_is_found(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "none") is None
    for step in (2, 10, 9):
        (tmp_path / f"step-{step:06d}.pt").touch()
    (tmp_path / ".unfinished-x").touch()
    found = latest_checkpoint(tmp_path)
    assert found is not None and found.name == "step-000010.pt"


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    path = trainer().save(tmp_path)
    other = ModelConfig(vocab_size=VOCAB_SIZE, width=32, layers=2, heads=2, hidden=32, max_len=16)
    subject = GrpoTrainer(other, GrpoConfig(), ReferenceModel(other).state_dict())
    with pytest.raises(CheckpointError, match="another model"):
        subject.load(path)
