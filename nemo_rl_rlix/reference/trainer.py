"""The GRPO trainer of the reference pipeline: one rank, plain torch.

Everything it keeps on its logical GPU (parameters, buffers, gradients, optimizer
state) is charged there while it is loaded, and its storages are empty while it is
not: a tensor that is used then has nothing behind it, as on a device.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nemo_rl_rlix.errors import GrantRequiredError, RLixError
from nemo_rl_rlix.reference.device import tensor_bytes
from nemo_rl_rlix.reference.grpo import (
    Batch,
    GrpoConfig,
    LossParts,
    collate,
    policy_loss,
    token_logprobs,
)
from nemo_rl_rlix.reference.memory import DeviceAccount
from nemo_rl_rlix.reference.model import ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.optimizer import AdamW
from nemo_rl_rlix.reference.trajectory import PromptGroup
from nemo_rl_rlix.shards.protocol import MemoryReport
from nemo_rl_rlix.weights.types import TensorSpec

CHECKPOINT_FORMAT = 1


class OffloadError(RLixError):
    """Tensors stayed on the device after an offload."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(
            f"{len(names)} tensors stayed on the device after the offload: {names[:8]}."
            " The GPU must not be released"
        )
        self.names = names


class CheckpointError(RLixError):
    """A checkpoint cannot be used."""


@dataclass(frozen=True)
class TrainMetrics:
    """What one training step did.

    Attributes:
        step: Number of the step, from 0.
        loss: Loss, averaged over the updates.
        reward_mean: Mean reward of the trajectories.
        reward_std: Their standard deviation.
        kl: Mean per token of KL(sampling policy, policy), estimated at the last update.
        ratio_mean: Mean ratio of the policy before the step to the sampling policy.
        ratio_max: Largest such ratio.
        capped_share: Share of tokens whose ratio was truncated.
        clipped_share: Share of tokens whose loss was clipped at the last update.
        grad_norm: Norm of the gradient before it was scaled, last update.
        trajectories: Trajectories trained on.
        tokens: Response tokens trained on.
        oldest_version: Oldest weight version among the tokens.
        seconds: Time it took.
    """

    step: int
    loss: float
    reward_mean: float
    reward_std: float
    kl: float
    ratio_mean: float
    ratio_max: float
    capped_share: float
    clipped_share: float
    grad_norm: float
    trajectories: int
    tokens: int
    oldest_version: int
    seconds: float


class GrpoTrainer:
    """Policy, optimizer and their place on the device.

    It starts offloaded, with its tensors in host memory.

    Args:
        model: Size of the model.
        config: How the policy is updated.
        weights: State dict of the policy that the run starts from.
        temperature: Temperature at which responses are sampled.
        account: Logical GPU, owner and resident; without a GPU nothing is charged.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: GrpoConfig,
        weights: Mapping[str, Tensor],
        *,
        temperature: float = 1.0,
        account: DeviceAccount | None = None,
    ) -> None:
        self.config = config
        self.model = ReferenceModel(model)
        self.model.load_state_dict(dict(weights))
        self.next_step = 0
        self._temperature = temperature
        self._account = account or DeviceAccount(None, "", "")
        self._optimizer = AdamW(list(self.model.parameters()), config.betas, config.weight_decay)
        self._optimizer.zero_gradients()  # Their memory is taken now, not at the first step.
        self._host: dict[str, Tensor] = {}
        self._loaded = True
        self.offload()

    # -- memory ---------------------------------------------------------------

    @property
    def loaded(self) -> bool:
        """Whether the tensors are on the device."""
        return self._loaded

    def device_tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the label, name and tensor of everything that belongs on the device."""
        optimizer = self._optimizer
        for (name, parameter), first, second in zip(
            self.model.named_parameters(), optimizer.first, optimizer.second, strict=True
        ):
            yield "parameters", name, parameter.data
            if parameter.grad is not None:
                yield "gradients", f"{name}.grad", parameter.grad
            yield "optimizer", f"{name}.first", first
            yield "optimizer", f"{name}.second", second
        for name, buffer in self.model.named_buffers():
            yield "parameters", name, buffer

    def device_bytes(self) -> dict[str, int]:
        """Label -> bytes on the device, measured on the tensors themselves."""
        by_label: dict[str, list[Tensor]] = {"parameters": [], "gradients": [], "optimizer": []}
        for label, _, tensor in self.device_tensors():
            by_label[label].append(tensor)
        return {label: tensor_bytes(tensors) for label, tensors in by_label.items()}

    def offload(self) -> MemoryReport:
        """Move every tensor to host memory; a no-op when it is done already.

        Gradients are dropped: the step that made them has used them.

        Raises:
            OffloadError: A tensor stayed on the device; the trainer counts as loaded.
        """
        if self._loaded:
            for label, name, tensor in self.device_tensors():
                if label != "gradients":
                    self._host[name] = tensor.clone()
                tensor.untyped_storage().resize_(0)
            stayed = [
                name
                for _, name, tensor in self.device_tensors()
                if tensor.untyped_storage().nbytes()
            ]
            if stayed:
                raise OffloadError(stayed)
            for label in self.device_bytes():
                self._account.charge(label, 0)
            self._loaded = False
        return MemoryReport(held_bytes=self._account.held_bytes(), budget_bytes=0)

    def onload(self) -> None:
        """Bring every tensor to the device; a no-op when they are there.

        Raises:
            GrantRequiredError: The GPU is not granted.
            DeviceOutOfMemoryError: The GPU is full; nothing has been brought.
        """
        if self._loaded:
            return
        with self._account.compute("onload"):
            sizes = {"parameters": 0, "gradients": 0, "optimizer": 0}
            for label, _, tensor in self.device_tensors():
                sizes[label] += tensor.numel() * tensor.element_size()
            try:
                for label, nbytes in sizes.items():
                    self._account.charge(label, nbytes)
            except RLixError:
                for label in sizes:
                    self._account.charge(label, 0)
                raise
            for label, name, tensor in self.device_tensors():
                tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
                if label == "gradients":
                    tensor.zero_()
                else:
                    tensor.copy_(self._host[name])
            self._host.clear()
            self._loaded = True

    def _require_loaded(self, act: str) -> None:
        if not self._loaded:
            gpu = self._account.gpu
            raise GrantRequiredError(
                self._account.owner or "trainer",
                [] if gpu is None else [gpu.gpu_id],
                f"{act} while it is offloaded; call before_training first",
            )

    # -- training -------------------------------------------------------------

    def train(self, step: int, groups: Sequence[PromptGroup]) -> TrainMetrics:
        """Update the policy on the groups of one step.

        Args:
            step: Number of the step; must be the next one.
            groups: Complete groups of this step.

        Raises:
            GrantRequiredError: Offloaded, or the GPU is not granted.
            UnfinishedTrajectoryError: A trajectory was aborted.
            ValueError: It is another step's turn, or there are no groups.
        """
        started = time.perf_counter()
        self._require_loaded("train")
        if step != self.next_step:
            raise ValueError(f"step {step} is to be trained, but {self.next_step} comes next")
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        if not trajectories:
            raise ValueError(f"step {step} has no trajectories; sample its groups first")
        for trajectory in trajectories:
            trajectory.check()
        tokens = sum(len(trajectory.token_ids) for trajectory in trajectories)
        with self._account.compute("train step", self.config.token_s * tokens):
            sums, loss, grad_norm = self._update(step, groups)
        self.next_step = step + 1
        rewards = torch.tensor([trajectory.reward for trajectory in trajectories])
        return TrainMetrics(
            step=step,
            loss=loss,
            reward_mean=float(rewards.mean()),
            reward_std=float(rewards.std(correction=0)),
            kl=sum(part.kl for part in sums) / tokens,
            ratio_mean=sum(part.ratio for part in sums) / tokens,
            ratio_max=max(part.ratio_max for part in sums),
            capped_share=sum(part.capped for part in sums) / tokens,
            clipped_share=sum(part.clipped for part in sums) / tokens,
            grad_norm=grad_norm,
            trajectories=len(trajectories),
            tokens=tokens,
            oldest_version=min(
                segment.weights_version
                for trajectory in trajectories
                for segment in trajectory.segments
            ),
            seconds=time.perf_counter() - started,
        )

    def _update(
        self, step: int, groups: Sequence[PromptGroup]
    ) -> tuple[list[LossParts], float, float]:
        config = self.config
        batches = list(collate(groups, config.micro_batch))
        tokens = float(sum(batch.mask.sum() for batch in batches))
        before: list[Tensor] = []
        lr = config.lr * min(1.0, (step + 1) / max(config.lr_warmup_steps, 1))
        total, norm = 0.0, 0.0
        parts: list[LossParts] = []
        for _ in range(config.updates_per_step):
            parts = []
            for index, batch in enumerate(batches):
                current = self._logprobs(batch)
                if len(before) == index:
                    before.append(current.detach())
                part = policy_loss(current, before[index], batch, config, tokens)
                part.loss.backward()
                total += float(part.loss.detach())
                parts.append(part)
            norm = self._optimizer.clip(config.max_grad_norm)
            self._optimizer.step(lr)
            self._optimizer.zero_gradients()
        return parts, total / config.updates_per_step, norm

    def _logprobs(self, batch: Batch) -> Tensor:
        logits = self.model(batch.tokens[:, :-1])
        return token_logprobs(logits, batch.tokens, self._temperature)

    # -- export and checkpoints -----------------------------------------------

    def tensor_specs(self) -> tuple[TensorSpec, ...]:
        """Name, shape and dtype of every exported tensor, ties left out."""
        return tuple(
            TensorSpec(name, tuple(tensor.shape), "float32", tensor.numel() * tensor.element_size())
            for name, tensor in self.model.named_parameters()
        )

    def ties(self) -> tuple[tuple[str, str], ...]:
        """``(tied name, stored name)`` pairs."""
        return tuple(self.model.ties().items())

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        """Yield the weights on the device.

        Raises:
            GrantRequiredError: Offloaded, or the GPU is not granted.
        """
        self._require_loaded("export weights")
        with self._account.compute("export weights"):
            for name, parameter in self.model.named_parameters():
                yield name, parameter.data

    def save(self, directory: Path, extra: bytes = b"") -> Path:
        """Write a checkpoint, whole or not at all.

        Works loaded and offloaded alike.

        Args:
            directory: Folder of the checkpoints; created if missing.
            extra: What the rest of the pipeline wants back, as bytes.

        Returns:
            The file, ``step-<next step>.pt``.
        """
        tensors = {
            name: (tensor if self._loaded else self._host[name])
            for label, name, tensor in self.device_tensors()
            if label != "gradients"
        }
        state = {
            "format": CHECKPOINT_FORMAT,
            "next_step": self.next_step,
            "optimizer_steps": self._optimizer.steps,
            "tensors": tensors,
            "rng": torch.get_rng_state(),
            "extra": torch.frombuffer(bytearray(extra), dtype=torch.uint8) if extra else None,
        }
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / f"step-{self.next_step:06d}.pt"
        descriptor, temporary = tempfile.mkstemp(dir=directory, prefix=".unfinished-")
        try:
            with os.fdopen(descriptor, "wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return path

    def load(self, path: Path) -> bytes:
        """Continue from a checkpoint; the trainer stays loaded or offloaded as it is.

        Returns:
            What was given to :meth:`save` as ``extra``.

        Raises:
            CheckpointError: The file is of another format or model; nothing has changed.
        """
        state: dict[str, Any] = torch.load(path, weights_only=True)
        if state.get("format") != CHECKPOINT_FORMAT:
            raise CheckpointError(f"{path} has format {state.get('format')}, not 1; start anew")
        own = {name: t for label, name, t in self.device_tensors() if label != "gradients"}
        saved: dict[str, Tensor] = state["tensors"]
        if {n: t.shape for n, t in own.items()} != {n: t.shape for n, t in saved.items()}:
            raise CheckpointError(f"{path} is of another model; start anew or use its settings")
        for name, tensor in saved.items():
            if self._loaded:
                own[name].copy_(tensor)
            else:
                self._host[name] = tensor
        self.next_step = int(state["next_step"])
        self._optimizer.steps = int(state["optimizer_steps"])
        torch.set_rng_state(state["rng"])
        extra: Tensor | None = state["extra"]
        return b"" if extra is None else extra.numpy().tobytes()


def latest_checkpoint(directory: Path) -> Path | None:
    """Newest checkpoint in a folder, ``None`` if there is none."""
    return max(directory.glob("step-*.pt"), default=None)
