"""What counts as memory of a shard."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.vllm.accounting import (
    ProcessMemory,
    charged_to,
    held_bytes,
    nvml_charged_bytes,
    shard_report,
)

GIB = 1 << 30
BOTH = frozenset({"weights", "kv_cache"})


def reading(
    *, unmapped: frozenset[str] = BOTH, charged: int | None = None, used: int = 30 * GIB
) -> ProcessMemory:
    pool = {"weights": 14 * GIB, "kv_cache": 8 * GIB}
    return ProcessMemory(pool, unmapped, 22 * GIB + (100 << 20), charged, used)


@pytest.mark.parametrize(
    ("process", "expected"),
    [
        # Torch still counts the unmapped pool; what is left is its remains and the context.
        (reading(), (100 << 20) + (640 << 20)),
        # A sleep that freed the KV cache only.
        (reading(unmapped=frozenset({"kv_cache"})), 14 * GIB + (740 << 20)),
        (reading(unmapped=frozenset()), 22 * GIB + (740 << 20)),
        # NVML knows better, whatever the process thinks.
        (reading(charged=953 << 20), 953 << 20),
        # No more than the card has in use.
        (reading(used=300 << 20), 300 << 20),
    ],
)
def test_held_bytes(process: ProcessMemory, expected: int) -> None:
    assert held_bytes(process, 640 << 20) == expected


@given(
    st.dictionaries(st.sampled_from(["weights", "kv_cache", "default"]), st.integers(0, GIB)),
    st.sets(st.sampled_from(["weights", "kv_cache", "default"])),
    st.integers(0, GIB),
    st.integers(0, 4 * GIB),
)
def test_a_smaller_unmapping_never_counts_less(
    pool: dict[str, int], unmapped: set[str], outside: int, used: int
) -> None:
    def held(tags: set[str]) -> int:
        reserved = sum(pool.values()) + outside
        return held_bytes(ProcessMemory(pool, frozenset(tags), reserved, None, used), 1000)

    for tag in unmapped:
        assert held(unmapped - {tag}) >= held(unmapped)


def test_a_neighbour_is_not_charged_to_the_shard() -> None:
    report = shard_report([reading(used=139 * GIB)] * 2, 1 * GIB, 640 << 20)
    assert report.held_bytes == 2 * (740 << 20)
    assert report.budget_bytes == 2 * GIB
    assert report.within_budget


@pytest.mark.parametrize(
    ("entries", "expected"),
    [
        ([(7, 100), (8, 5)], 100),
        ([(7, 100), (7, 1)], 101),
        ([(8, 5)], None),  # our pid is another one outside of the container
        ([(7, None)], None),
        ([], None),
    ],
)
def test_charged_to(entries: list[tuple[int, int | None]], expected: int | None) -> None:
    assert charged_to(7, entries) == expected


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, entries: list[tuple[int, int]] | None) -> None:
        self.entries, self.open = entries, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[object]:
        if self.entries is None:
            raise self.NVMLError
        from types import SimpleNamespace

        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in self.entries]


@pytest.mark.parametrize(("entries", "expected"), [([(3, 9)], 9), ([], None), (None, None)])
def test_nvml_is_asked_and_let_go(
    entries: list[tuple[int, int]] | None, expected: int | None
) -> None:
    nvml = FakeNvml(entries)
    assert nvml_charged_bytes(nvml, "GPU-0", 3) == expected
    assert nvml.open == 0
