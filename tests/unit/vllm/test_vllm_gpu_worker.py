"""The sleep of a worker, over a stand-in for vLLM's worker and its allocator."""

from __future__ import annotations

import importlib
import sys
import types
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch


class FakeAllocator:
    pointer_to_data: ClassVar[dict[int, Any]] = {
        1: SimpleNamespace(tag="kv_cache", handle=(0, 300, 1, 0)),
    }

    @classmethod
    def hold(cls, tensor: torch.Tensor) -> None:
        address = tensor.untyped_storage().data_ptr()
        cls.pointer_to_data[address] = SimpleNamespace(tag="weights", handle=(0, 700, address, 0))

    @classmethod
    def get_instance(cls) -> FakeAllocator:
        return cls()


class FakeWorker:
    """Fails as the real one does: after everything has been unmapped."""

    failure: Exception | None = None

    def __init__(self) -> None:
        model = torch.nn.Linear(2, 2)
        model.scale = torch.tensor([3.0])
        self.model_runner = SimpleNamespace(model=model)
        FakeAllocator.hold(model.scale)
        self.slept, self.woken = [], []

    def sleep(self, level: int = 1) -> None:
        self.slept.append(level)
        self.model_runner.model.scale.fill_(-7.0)  # discarded
        if self.failure is not None:
            raise self.failure

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.woken.append(tags)


@pytest.fixture
def worker_class(monkeypatch: pytest.MonkeyPatch) -> Any:
    def module(name: str, **contents: object) -> None:
        made = types.ModuleType(name)
        vars(made).update(contents)
        monkeypatch.setitem(sys.modules, name, made)

    for package in ("vllm", "vllm.v1", "vllm.v1.worker", "vllm.device_allocator"):
        module(package)
    module("vllm.v1.worker.gpu_worker", Worker=FakeWorker)
    module("vllm.device_allocator.cumem", CuMemAllocator=FakeAllocator)
    name = "nemo_rl_rlix.vllm.gpu_worker"
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(name).ShardGpuWorker
    sys.modules.pop(name, None)


def test_a_neighbour_that_grows_does_not_fail_the_sleep(worker_class: Any) -> None:
    worker = worker_class()
    worker.failure = AssertionError("Memory usage increased after sleeping.")
    worker.sleep(2)
    assert worker.rlix_unmapped_tags == {"weights", "kv_cache"}
    worker.sleep(2)
    assert worker.slept == [2]
    worker.wake_up(["weights"])
    assert worker.rlix_unmapped_tags == {"kv_cache"}
    worker.wake_up(["kv_cache"])
    assert worker.rlix_unmapped_tags == frozenset()
    worker.sleep(1)
    assert worker.slept == [2, 1]


@pytest.mark.parametrize(
    "failure", [AssertionError("something else"), RuntimeError("CUDA error")], ids=str
)
def test_a_sleep_that_failed_half_way_is_reported(worker_class: Any, failure: Exception) -> None:
    worker = worker_class()
    worker.failure = failure
    with pytest.raises(RuntimeError):
        worker.sleep(2)
    assert worker.rlix_unmapped_tags == frozenset()


def test_what_no_sync_brings_back_is_put_back_with_the_weights(worker_class: Any) -> None:
    worker = worker_class()
    worker.sleep(2)
    assert worker.model_runner.model.scale.tolist() == [-7.0]
    worker.wake_up(["weights"])
    assert worker.model_runner.model.scale.tolist() == [3.0]
    worker.model_runner.model.scale.fill_(5.0)
    worker.wake_up(["kv_cache"])
    assert worker.model_runner.model.scale.tolist() == [5.0]
