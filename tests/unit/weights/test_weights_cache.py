"""The CPU weight cache: complete or invalid, never half of a build."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from nemo_rl_rlix.errors import CacheNotReadyError, HostMemoryError
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.weights.budget import MemoryLevel
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.dtypes import dtype_name, dtype_of, spec_of
from nemo_rl_rlix.weights.errors import CacheBuildError, LayoutError, TornReadError
from nemo_rl_rlix.weights.header import HEADER_BYTES
from nemo_rl_rlix.weights.host_memory import SharedHostMemory
from nemo_rl_rlix.weights.layout import ITEM_BYTES

SETTINGS = WeightCacheSettings(bucket_mib=1)


def model(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "embed": random(300, 64).to(torch.bfloat16),
        "transposed": random(40, 30).t(),
        "large": random(700, 1000),  # 2.7 MiB, over three buckets
        "scale": random(1).squeeze(),
        "mask": torch.arange(7) % 2 == 0,
        "empty": torch.empty(0, 5),
        "steps": torch.tensor([2**62, -1]),
    }


def planned(
    tensors: dict[str, torch.Tensor], settings: WeightCacheSettings = SETTINGS, **kwargs: object
) -> CpuWeightCache:
    cache = CpuWeightCache("p", settings, "n", **kwargs)  # type: ignore[arg-type]
    cache.plan([spec_of(name, tensor) for name, tensor in tensors.items()])
    return cache


def assert_bit_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("checksum", [False, True])
def test_a_build_reads_back_bit_for_bit(checksum: bool) -> None:
    tensors = model()
    cache = planned(tensors, checksum=checksum)
    handle = cache.build(3, 1, tensors.items())
    assert (handle.weights_version, handle.slot, handle.pipeline_id) == (3, 1, "p")
    assert_bit_equal(dict(cache.reader(handle)), tensors)
    cache.verify(handle)
    cache.close()


def test_slots_are_independent_and_versions_replace_each_other() -> None:
    cache = planned(model())
    first = cache.build(0, 0, model(0).items())
    second = cache.build(1, 1, model(1).items())
    assert_bit_equal(dict(cache.reader(first)), model(0))
    assert_bit_equal(dict(cache.reader(second)), model(1))
    third = cache.build(2, 0, model(2).items())
    assert_bit_equal(dict(cache.reader(third)), model(2))
    with pytest.raises(TornReadError, match="holds 2"):
        dict(cache.reader(first))
    cache.close()


def test_a_read_that_a_build_overtakes_is_an_error() -> None:
    cache = planned(model())
    handle = cache.build(0, 0, model().items())
    reading = cache.reader(handle)
    next(reading)
    cache.build(0, 0, model().items())  # the same version again: only the sequence differs
    with pytest.raises(TornReadError, match="during the read"):
        list(reading)
    cache.close()


@pytest.mark.parametrize(
    ("change", "missing", "unexpected", "message"),
    [
        (lambda m: m.pop("scale"), ["scale"], [], "1 missing"),
        (lambda m: m.update(extra=torch.zeros(1)), [], ["extra"], "1 unexpected"),
        (lambda m: m.update(scale=torch.zeros(2)), [], [], r"'scale' is float32\(2,\)"),
        (lambda m: m.update(scale=torch.tensor(1.0).double()), [], [], "'scale' is float64"),
    ],
)
def test_a_snapshot_that_does_not_fit_its_plan_leaves_the_slot_invalid(
    change: object, missing: list[str], unexpected: list[str], message: str
) -> None:
    cache = planned(model())
    handle = cache.build(0, 0, model().items())
    wrong = model(1)
    change(wrong)  # type: ignore[operator]
    with pytest.raises(CacheBuildError, match=message) as caught:
        cache.build(1, 0, wrong.items())
    assert (caught.value.missing, caught.value.unexpected) == (missing, unexpected)
    with pytest.raises(TornReadError, match="build failed"):
        dict(cache.reader(handle))
    cache.build(1, 0, model(1).items())
    cache.close()


def test_a_tensor_that_comes_twice_is_refused() -> None:
    # NVIDIA-NeMo/RL#2471: two pipeline stages both export it.
    cache = planned(model())
    with pytest.raises(CacheBuildError) as caught:
        cache.build(0, 0, [*model().items(), ("scale", torch.tensor(1.0))])
    assert caught.value.unexpected == ["scale"]
    cache.close()


def test_an_export_that_breaks_leaves_the_slot_invalid() -> None:
    cache = planned(model())
    handle = cache.build(0, 0, model().items())

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        yield "embed", model()["embed"]
        raise RuntimeError("a rank died")

    with pytest.raises(RuntimeError, match="a rank died"):
        cache.build(1, 0, export())
    with pytest.raises(TornReadError):
        dict(cache.reader(handle))
    cache.close()


@pytest.mark.parametrize("fault", ["shape", "step", "slot", "memory", "unplanned"])
def test_the_export_is_consumed_to_its_end_whatever_fails(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = planned(model()) if fault != "unplanned" else CpuWeightCache("p", SETTINGS, "n")
    ended = []

    def export() -> Iterator[tuple[str, torch.Tensor]]:
        for index, (name, tensor) in enumerate(model().items()):
            yield name, tensor.flatten()[:-1] if fault == "shape" and index == 0 else tensor
        ended.append(True)

    if fault == "memory":

        def refuse(*args: object, **kwargs: object) -> SharedHostMemory:
            raise HostMemoryError("s", 1, "r", "m")

        monkeypatch.setattr(SharedHostMemory, "create", refuse)
    with pytest.raises((CacheBuildError, ValueError, HostMemoryError, LayoutError)):
        cache.build(-1 if fault == "step" else 0, 5 if fault == "slot" else 0, export())
    assert ended == [True]
    cache.close()


def test_tied_names_are_not_stored() -> None:
    weight = torch.randn(8, 4)
    cache = CpuWeightCache("p", SETTINGS, "n")
    layout = cache.plan(
        [spec_of("embed", weight), spec_of("head", weight)], ties=[("head", "embed")]
    )
    assert layout.total_nbytes == weight.nbytes
    handle = cache.build(0, 0, [("embed", weight), ("head", weight)])
    assert_bit_equal(dict(cache.reader(handle)), {"embed": weight})
    cache.build(1, 0, [("embed", weight)])
    cache.close()


def test_a_corrupted_byte_is_found_by_a_checksum_over_the_bytes() -> None:
    cache = planned(model(), checksum=True)
    handle = cache.build(0, 0, model().items())
    with SharedHostMemory.attach(handle.memory) as intruder:
        intruder.tensor[12345] ^= 1
    with pytest.raises(TornReadError, match="checksum"):
        cache.verify(handle)
    cache.close()


def test_a_cheap_checksum_still_ties_version_and_memory_together() -> None:
    cache = planned(model())
    one, other = (cache.build(0, slot, model().items()) for slot in (0, 1))
    assert one.checksum != other.checksum
    assert one.checksum.startswith("meta:")
    cache.close()


def test_a_cache_that_the_host_cannot_hold_is_refused_at_its_plan() -> None:
    # sgl-project/sglang#35641, in MiB: a limit of 8, a cache of 2 x 5.
    def limit(in_use: int) -> object:
        return lambda: (MemoryLevel("fake", 8 * 2**20, in_use),)

    specs = [spec_of("w", torch.empty(5 * 2**20, dtype=torch.uint8))]
    with pytest.raises(HostMemoryError, match=r"slots=2"):
        CpuWeightCache("p", SETTINGS, "n", read_levels=limit(0)).plan(specs)  # type: ignore[arg-type]
    with pytest.raises(HostMemoryError, match="fraction"):
        CpuWeightCache("p", SETTINGS, "n", read_levels=limit(3 * 2**20)).plan(specs)  # type: ignore[arg-type]
    one = SETTINGS.model_copy(update={"slots": 1})
    CpuWeightCache("p", one, "n", read_levels=limit(0)).plan(specs)  # type: ignore[arg-type]


def test_all_slots_are_taken_at_the_first_build_and_never_later() -> None:
    cache = planned(model())
    assert cache.allocated_bytes == 0
    cache.build(0, 0, model().items())
    both = cache.allocated_bytes
    assert both == 2 * (HEADER_BYTES + cache.layout.total_nbytes)
    cache.build(1, 1, model().items())
    assert cache.allocated_bytes == both
    cache.close()
    cache.close()
    assert cache.allocated_bytes == 0


def test_a_directory_is_used_and_left_empty(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"directory": str(tmp_path)})
    cache = planned(model(), settings)
    handle = cache.build(0, 0, model().items())
    assert Path(handle.memory.path).parent == tmp_path
    cache.close()
    assert list(tmp_path.iterdir()) == []


def test_planning_again_must_give_the_same_layout() -> None:
    cache = planned(model())
    cache.plan([spec_of(name, tensor) for name, tensor in model().items()])
    with pytest.raises(LayoutError, match="must not change"):
        cache.plan([spec_of("other", torch.zeros(1))])


def test_reading_before_the_first_build_is_refused() -> None:
    tensors = model()
    cache = planned(tensors)
    handle = cache.build(0, 0, tensors.items())
    fresh = planned(tensors)
    with pytest.raises(CacheNotReadyError):
        fresh.verify(handle)
    cache.invalidate(0)
    with pytest.raises(TornReadError):
        cache.verify(handle)
    cache.close()


def test_parameters_that_require_grad_can_be_cached() -> None:
    parameter = torch.nn.Parameter(torch.randn(3, 3))
    cache = planned({"w": parameter})
    handle = cache.build(0, 0, [("w", parameter)])
    assert not dict(cache.reader(handle))["w"].requires_grad
    cache.close()


@pytest.mark.parametrize("name", sorted(ITEM_BYTES))
def test_every_dtype_of_the_layout_exists_and_has_that_size(name: str) -> None:
    dtype = dtype_of(name)
    assert dtype.itemsize == ITEM_BYTES[name]
    assert dtype_name(dtype) == name


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(LayoutError):
        dtype_of("Tensor")
