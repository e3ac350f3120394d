"""Moving storages: host memory stands in for the device, so that the bytes really move."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import HostMemoryError
from nemo_rl_rlix.megatron import offload as offload_module
from nemo_rl_rlix.megatron.caches import clear_training_caches
from nemo_rl_rlix.megatron.errors import OffloadIncompleteError
from nemo_rl_rlix.megatron.offload import DeviceOffloader, plan_storages
from nemo_rl_rlix.megatron.walk import FoundTensor, on_device, walk_tensors
from nemo_rl_rlix.weights.budget import MemoryLevel


class Slotted:
    __slots__ = ("inside", "never")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.inside = tensor


class Trainer:
    """The kinds of places in which Megatron keeps tensors."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        self.frozen = torch.nn.Parameter(torch.ones(3), requires_grad=False)
        self.grad_data = torch.ones(16)
        for number, parameter in enumerate(self.model.parameters()):
            shard = self.grad_data[number : number + 1]
            parameter.main_grad = shard  # type: ignore[attr-defined]
            parameter.main_param = torch.full_like(parameter, 2.0)  # type: ignore[attr-defined]
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.copies = [[torch.full((5,), 3.0)], (Slotted(torch.full((2,), 4.0)),)]
        self.hook = functools.partial(print, torch.full((6,), 5.0))
        self.me = self  # a circle

    def step(self, seed: int) -> float:
        torch.manual_seed(seed)
        loss = self.model(torch.randn(8, 4)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss.item()


def trained(steps: int) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer()
    for seed in range(steps):
        trainer.step(seed)
    return trainer


def roots(trainer: Trainer) -> dict[str, object]:
    return {"trainer": trainer}


def test_everything_a_trainer_holds_is_found() -> None:
    paths = {found.path for found in walk_tensors(roots(trained(1)))}
    for expected in (
        "trainer.model.0.weight",
        "trainer.model.0.weight.grad",
        "trainer.model.0.weight.main_grad",
        "trainer.model.0.weight.main_param",
        "trainer.model.1.running_mean",
        "trainer.frozen",
        "trainer.optimizer.state[(4, 4)].exp_avg",
        "trainer.optimizer.param_groups[0].params[0]",
        "trainer.copies[0][0]",
        "trainer.copies[1][0].inside",
        "trainer.hook.args[0]",
    ):
        assert expected in paths, (expected, sorted(paths))


def test_losses_equal_a_run_that_never_offloaded() -> None:
    plain = trained(2)
    expected = [plain.step(seed) for seed in range(2, 6)]
    moved = trained(2)
    handle = moved.model[0].weight
    offloader = DeviceOffloader("cpu")
    losses = []
    for seed in range(2, 6):
        report = offloader.offload(roots(moved))
        assert report.moved_bytes > 0 and report.dropped_bytes > 0
        assert offloader.check(roots(moved), budget_bytes=0) == 0
        assert handle.untyped_storage().nbytes() == 0
        assert offloader.offload(roots(moved)).moved_bytes == 0
        offloader.onload()
        assert offloader.onload().moved_bytes == 0
        losses.append(moved.step(seed))
    assert losses == expected
    assert moved.model[0].weight is handle
    assert moved.copies[0][0].tolist() == [3.0] * 5


def test_gradients_come_back_as_zeros_and_views_still_share() -> None:
    trainer = trained(1)
    offloader = DeviceOffloader("cpu")
    offloader.offload(roots(trainer))
    offloader.onload()
    weight = trainer.model[0].weight
    assert trainer.grad_data.abs().sum() == 0
    weight.main_grad.fill_(7.0)
    assert trainer.grad_data[0] == 7.0


def test_storage_with_a_name_that_is_no_gradient_is_kept() -> None:
    class Shared:
        def __init__(self) -> None:
            self.grad_data = torch.full((4,), 6.0)
            self.param_data = self.grad_data[:2]

    shared = Shared()
    offloader = DeviceOffloader("cpu")
    report = offloader.offload({"buffer": shared})
    assert report.dropped_bytes == 0
    offloader.onload()
    assert shared.grad_data.tolist() == [6.0] * 4


def test_what_stayed_is_named() -> None:
    trainer = trained(1)
    offloader = DeviceOffloader("cpu")
    offloader.offload(roots(trainer))
    trainer.copies[0].append(torch.zeros(1024))  # type: ignore[attr-defined]
    with pytest.raises(OffloadIncompleteError, match=r"trainer\.copies\[0\]\[1\]") as caught:
        offloader.check(roots(trainer), budget_bytes=0)
    assert caught.value.nbytes == 4096


def test_memory_of_unknown_origin_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    offloader = DeviceOffloader("cpu")
    stray = torch.zeros(777, 3)
    monkeypatch.setattr(offloader, "_allocated", lambda: stray.nbytes)
    assert offloader.check({}, budget_bytes=stray.nbytes) == stray.nbytes
    with pytest.raises(OffloadIncompleteError, match=r"\(777, 3\)"):
        offloader.check({}, budget_bytes=stray.nbytes - 1)


def test_failed_onload_leaves_everything_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, trainer = trained(2), trained(2)
    offloader = DeviceOffloader("cpu")
    offloader.offload(roots(trainer))
    calls = iter(range(100))

    def full(entry: object) -> torch.Tensor:
        if next(calls) == 3:
            raise torch.OutOfMemoryError("device is full")
        return original(entry)  # type: ignore[arg-type]

    original = offload_module._bytes_of
    monkeypatch.setattr(offload_module, "_bytes_of", full)
    with pytest.raises(torch.OutOfMemoryError):
        offloader.onload()
    assert offloader.is_offloaded
    assert offloader.check(roots(trainer), budget_bytes=0) == 0
    offloader.onload()
    assert trainer.step(9) == plain.step(9)


def test_host_that_cannot_hold_it_is_refused_before_anything_moves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = trained(1)
    monkeypatch.setattr(
        offload_module, "read_memory_levels", lambda: (MemoryLevel("limit", 1000, 990),)
    )
    offloader = DeviceOffloader("cpu")
    with pytest.raises(HostMemoryError):
        offloader.offload(roots(trainer))
    assert not offloader.is_offloaded
    assert trainer.step(3) == trained(1).step(3)


def test_host_memory_is_reused_and_grows_only_when_needed() -> None:
    trainer = trained(0)
    offloader = DeviceOffloader("cpu")
    sizes = []
    for seed in range(4):
        offloader.offload(roots(trainer))
        sizes.append(offloader.host_bytes)
        offloader.onload()
        trainer.step(seed)
    assert sizes[0] < sizes[1]  # the optimizer's state came with the first step
    assert len(set(sizes[1:])) == 1
    offloader.close()
    assert offloader.host_bytes == 0


@given(st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12))
def test_each_storage_is_planned_once_without_overlap(uses: list[tuple[int, bool]]) -> None:
    storages = [torch.zeros(100 * (number + 1)) for number in range(5)]
    found = [FoundTensor("x", storages[n][n:], grad) for n, grad in uses]
    held, nbytes = plan_storages(found)
    assert len(held) == len({n for n, _ in uses})
    end = 0
    for entry in held:
        number = next(n for n, s in enumerate(storages) if s.data_ptr() == entry.storage.data_ptr())
        assert (entry.offset is None) == all(grad for n, grad in uses if n == number)
        if entry.offset is not None:
            assert entry.offset >= end
            end = entry.offset + entry.nbytes
    assert nbytes >= end


def test_tensor_without_memory_does_not_count() -> None:
    occupies = on_device("cpu")
    tensor = torch.ones(4)
    assert occupies(tensor)
    tensor.untyped_storage().resize_(0)
    assert not occupies(tensor)
    assert not occupies(torch.empty(4, device="meta"))


def test_caches_are_cleared() -> None:
    calls = []

    class Rotary(torch.nn.Module):
        @functools.lru_cache(maxsize=4)  # noqa: B019 - what Megatron does
        def forward(self, length: int) -> torch.Tensor:
            calls.append(length)
            return torch.arange(length)

    class Dispatcher:
        def __init__(self) -> None:
            self.probs = torch.ones(2)
            self.top_k = 2

    model = torch.nn.Module()
    model.rotary = Rotary()
    model._fp8_workspaces = {"w": torch.ones(3)}
    model.token_dispatcher = Dispatcher()
    model.rotary(3), model.rotary(3)
    assert calls == [3]
    assert clear_training_caches([model]) == 3
    model.rotary(3)
    assert calls == [3, 3]
    assert model._fp8_workspaces == {}
    assert vars(model.token_dispatcher) == {"probs": None, "top_k": 2}
