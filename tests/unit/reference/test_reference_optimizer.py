from __future__ import annotations

import subprocess
import sys

import torch
from torch import nn

from nemo_rl_rlix.reference.optimizer import AdamW


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 4), (5,))]


def test_it_does_what_torch_does() -> None:
    ours, theirs = parameters(), parameters()
    subject = AdamW(ours, (0.9, 0.98), 0.1)
    model = torch.optim.AdamW(theirs, lr=1e-2, betas=(0.9, 0.98), weight_decay=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(20):
        for one, two in zip(ours, theirs, strict=True):
            gradient = torch.randn(one.shape, generator=generator) * 10 ** (step % 3)
            one.grad, two.grad = gradient.clone(), gradient.clone()
        expected = float(nn.utils.clip_grad_norm_(theirs, 1.0))
        assert abs(subject.clip(1.0) - expected) < 1e-3 * expected
        subject.step(1e-2)
        model.step()
    for one, two in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-6)


def test_gradients_keep_their_memory() -> None:
    ours = parameters()
    subject = AdamW(ours, (0.9, 0.98), 0.0)
    subject.zero_gradients()
    places = [p.grad.data_ptr() for p in ours if p.grad is not None]
    ours[0].sum().backward()
    subject.step(1e-2)
    subject.zero_gradients()
    assert [p.grad.data_ptr() for p in ours if p.grad is not None] == places
    assert not any(p.grad.any() for p in ours if p.grad is not None)


def test_a_trainer_process_never_imports_the_compiler() -> None:
    code = (
        "import sys, torch; from nemo_rl_rlix.reference.trainer import *;"
        "c = ModelConfig(width=16, layers=1, hidden=16, max_len=8);"
        "t = GrpoTrainer(c, GrpoConfig(), ReferenceModel(c).state_dict()); t.onload();"
        "t.model(torch.zeros(1, 4, dtype=torch.int64)).sum().backward();"
        "t._optimizer.clip(1.0); t._optimizer.step(1e-3); t.offload();"
        "sys.exit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=100, check=False).returncode == 0
