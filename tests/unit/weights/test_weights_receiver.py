"""The receiving side in one process: coverage of bytes, caching of maps, torn reads."""

import os
from collections.abc import Iterable

import pytest
import torch

from nemo_rl_rlix.errors import DeadlineExceededError
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.dtypes import spec_of
from nemo_rl_rlix.weights.errors import SharedMemoryError, StaleHandleError, TornReadError
from nemo_rl_rlix.weights.transports.shm import ShmReceiver
from nemo_rl_rlix.weights.types import CacheHandle

SETTINGS = WeightCacheSettings(bucket_mib=1)


def weights(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (10, 10), "large": (600, 1000), "b": (3,), "none": (0,)}
    return {n: torch.randn(*s, generator=generator) for n, s in shapes.items()}


class Engine:
    """Loads by copying, as an engine does."""

    def __init__(self) -> None:
        self.params: dict[str, torch.Tensor] = {}
        self.calls = 0

    def load_weights(self, batch: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.calls += 1
        loaded = {name: tensor.clone() for name, tensor in batch}
        self.params |= loaded
        return set(loaded)


@pytest.fixture
def cache() -> Iterable[CpuWeightCache]:
    cache = CpuWeightCache("p", SETTINGS, "n")
    cache.plan([spec_of(name, tensor) for name, tensor in weights(0).items()])
    yield cache
    cache.close()


@pytest.fixture
def receiver() -> Iterable[ShmReceiver]:
    receiver = ShmReceiver("n")
    yield receiver
    receiver.close()


def test_a_receive_loads_every_tensor_bucket_by_bucket(
    cache: CpuWeightCache, receiver: ShmReceiver
) -> None:
    engine = Engine()
    handle = cache.build(4, 0, weights(4).items())
    received = receiver.receive(handle, engine.load_weights, timeout_s=30)
    assert received.loaded == weights(4).keys()
    assert received.nbytes == sum(t.nbytes for t in weights(4).values())
    assert received.seconds >= 0
    assert engine.calls >= 3
    for name, tensor in weights(4).items():
        assert torch.equal(engine.params[name], tensor)


def test_host_tensors_are_views_not_copies(cache: CpuWeightCache, receiver: ShmReceiver) -> None:
    handle = cache.build(0, 0, weights(0).items())
    memory = receiver.prepare(handle)
    start, end = memory.tensor.data_ptr(), memory.tensor.data_ptr() + handle.memory.nbytes
    for name, tensor in receiver.tensors(handle):
        assert tensor.numel() == 0 or start <= tensor.data_ptr() < end, name


def test_a_slot_is_mapped_once(cache: CpuWeightCache, receiver: ShmReceiver) -> None:
    handles = [cache.build(v, v % 2, weights(v).items()) for v in range(2)]
    maps = [receiver.prepare(handle) for handle in handles]
    fds = len(os.listdir("/proc/self/fd"))
    for version in range(2, 8):
        handle = cache.build(version, version % 2, weights(version).items())
        assert receiver.prepare(handle) is maps[version % 2]
        receiver.receive(handle, Engine().load_weights, timeout_s=30)
    assert len(os.listdir("/proc/self/fd")) == fds


def test_mappings_of_former_caches_are_given_up(receiver: ShmReceiver) -> None:
    fds = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        cache = CpuWeightCache("p", SETTINGS.model_copy(update={"slots": 1}), "n")
        cache.plan([spec_of("a", torch.zeros(5))])
        receiver.prepare(cache.build(0, 0, [("a", torch.zeros(5))]))
        cache.close()
    assert len(os.listdir("/proc/self/fd")) <= fds + 2
    receiver.close()
    assert len(os.listdir("/proc/self/fd")) == fds


def test_a_build_during_the_load_makes_the_receive_fail(
    cache: CpuWeightCache, receiver: ShmReceiver
) -> None:
    handle = cache.build(1, 0, weights(1).items())
    engine = Engine()

    def load(batch: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        if engine.calls == 1:
            cache.build(2, 0, weights(2).items())
        return engine.load_weights(batch)

    with pytest.raises(TornReadError):
        receiver.receive(handle, load, timeout_s=30)


def test_a_slot_that_is_being_built_is_refused_before_the_first_load(
    cache: CpuWeightCache, receiver: ShmReceiver
) -> None:
    handle = cache.build(1, 0, weights(1).items())
    cache.invalidate(0)
    engine = Engine()
    with pytest.raises(TornReadError):
        receiver.receive(handle, engine.load_weights, timeout_s=30)
    assert engine.calls == 0


def test_a_late_receive_stops_between_buckets(cache: CpuWeightCache, receiver: ShmReceiver) -> None:
    handle = cache.build(1, 0, weights(1).items())
    with pytest.raises(DeadlineExceededError, match="0 of 4 buckets"):
        receiver.receive(handle, Engine().load_weights, timeout_s=0)


def test_an_error_of_the_loader_comes_through(cache: CpuWeightCache, receiver: ShmReceiver) -> None:
    handle = cache.build(1, 0, weights(1).items())

    def load(batch: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        raise KeyError("unknown parameter")

    with pytest.raises(KeyError):
        receiver.receive(handle, load, timeout_s=30)


def test_another_node_and_a_vanished_owner_are_told_apart(cache: CpuWeightCache) -> None:
    handle: CacheHandle = cache.build(1, 0, weights(1).items())
    with pytest.raises(SharedMemoryError, match="replica"):
        ShmReceiver("elsewhere").prepare(handle)
    cache.close()
    with pytest.raises(StaleHandleError):
        ShmReceiver("n").prepare(handle)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gets_the_same_bytes_within_the_staging_bound(
    cache: CpuWeightCache, receiver: ShmReceiver
) -> None:
    source = {name: tensor.cuda() for name, tensor in weights(3).items()}
    handle = cache.build(3, 0, source.items())
    engine = Engine()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    receiver.receive(handle, engine.load_weights, "cuda", timeout_s=30)
    for name, tensor in source.items():
        assert engine.params[name].is_cuda and torch.equal(engine.params[name], tensor)
    staging = 2 * SETTINGS.bucket_mib * 2**20 + 600 * 1000 * 4
    copies = sum(tensor.nbytes for tensor in source.values()) + 2**20
    assert torch.cuda.max_memory_allocated() - before <= staging + copies
