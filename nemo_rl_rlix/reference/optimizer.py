"""AdamW (Loshchilov and Hutter 2019) whose whole state is open to offloading.

``torch.optim`` would do, but importing it costs every trainer process some seconds
of ``torch._dynamo``, which nothing here uses.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

EPS = 1e-8


class AdamW:
    """Decoupled weight decay, bias-corrected moments, float32.

    Args:
        parameters: What is trained; each gets two moments of its size.
        betas: Decay of the first and the second moment.
        weight_decay: Share of a parameter, times the learning rate, taken off a step.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], betas: tuple[float, float], weight_decay: float
    ) -> None:
        self._parameters = list(parameters)
        self._tensors: list[Tensor] = [*parameters]
        self._betas, self._weight_decay = betas, weight_decay
        self.steps = 0
        self.first = [torch.zeros_like(parameter) for parameter in parameters]
        self.second = [torch.zeros_like(parameter) for parameter in parameters]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Update the parameters from their gradients."""
        self.steps += 1
        beta1, beta2 = self._betas
        gradients = self._gradients()
        torch._foreach_lerp_(self.first, gradients, 1 - beta1)
        torch._foreach_mul_(self.second, beta2)
        torch._foreach_addcmul_(self.second, gradients, gradients, 1 - beta2)
        scale = torch._foreach_sqrt(self.second)
        torch._foreach_div_(scale, (1 - beta2**self.steps) ** 0.5)
        torch._foreach_add_(scale, EPS)
        torch._foreach_mul_(self._tensors, 1 - lr * self._weight_decay)
        torch._foreach_addcdiv_(self._tensors, self.first, scale, -lr / (1 - beta1**self.steps))

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale the gradients down to ``max_norm``; returns their norm before."""
        gradients = self._gradients()
        norm = float(torch.stack(torch._foreach_norm(gradients)).norm())
        if norm > max_norm:
            torch._foreach_mul_(gradients, max_norm / norm)
        return norm

    @torch.no_grad()
    def zero_gradients(self) -> None:
        """Set the gradients to zero and keep their memory."""
        torch._foreach_zero_(self._gradients())

    def _gradients(self) -> list[Tensor]:
        gradients = []
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradients.append(parameter.grad)
        return gradients
