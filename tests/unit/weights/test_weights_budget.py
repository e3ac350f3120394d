"""Host memory limits, read from a tree of files, and the refusal."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import HostMemoryError
from nemo_rl_rlix.weights.budget import (
    MemoryLevel,
    check_host_budget,
    read_memory_levels,
    tightest,
)

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


MEMINFO = "MemTotal:       65536 kB\nMemFree: 1 kB\nMemAvailable:   16384 kB\n"


def test_v2_takes_every_level_up_to_the_root(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "0::/pod/box\n",
            "proc/meminfo": MEMINFO,
            "cg/cgroup.controllers": "memory",
            "cg/pod/memory.max": "4000\n",
            "cg/pod/memory.current": "3000\n",
            "cg/pod/memory.stat": "anon 1\ninactive_file 500\n",
            "cg/pod/box/memory.max": "max\n",
            "cg/pod/box/memory.current": "10\n",
        },
    )
    levels = read_memory_levels(tmp_path / "cg", tmp_path / "proc")
    assert [(level.limit, level.in_use) for level in levels] == [
        (4000, 2500),
        (65536 * 1024, 49152 * 1024),
    ]


@pytest.mark.parametrize("path", ["/", "/host/only/path", "/../../outside"])
def test_v2_in_a_namespace_reads_the_mounted_root(tmp_path: Path, path: str) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": f"0::{path}\n",
            "cg/cgroup.controllers": "",
            "cg/memory.max": "8000",
            "cg/memory.current": "100",
        },
    )
    levels = read_memory_levels(tmp_path / "cg", tmp_path / "proc")
    assert [(level.limit, level.in_use) for level in levels] == [(8000, 100)]


def test_v1_limit_and_its_way_to_say_unlimited(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "9:cpu,cpuacct:/x\n5:memory:/docker/abc\n",
            "proc/meminfo": MEMINFO,
            "cg/memory/memory.limit_in_bytes": "9223372036854771712",
            "cg/memory/memory.usage_in_bytes": "1",
            "cg/memory/docker/abc/memory.limit_in_bytes": "7000",
            "cg/memory/docker/abc/memory.usage_in_bytes": "1000",
            "cg/memory/docker/abc/memory.stat": "total_inactive_file 400\ninactive_file 3\n",
        },
    )
    levels = read_memory_levels(tmp_path / "cg", tmp_path / "proc")
    assert [(level.limit, level.in_use) for level in levels] == [
        (7000, 600),
        (65536 * 1024, 49152 * 1024),
    ]


def test_without_a_cgroup_limit_the_host_counts(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": MEMINFO})
    (level,) = read_memory_levels(tmp_path / "cg", tmp_path / "proc")
    assert level.limit == 65536 * 1024
    assert tightest([], 0.8) is None


def test_the_level_with_least_room_decides() -> None:
    roomy = MemoryLevel("host", 1000, 100)
    tight = MemoryLevel("pod", 600, 10)
    full = MemoryLevel("box", 900, 700)
    assert tightest([roomy, tight, full], 0.8) is full
    assert tightest([roomy, tight], 0.8) is tight


def test_this_machine_has_a_limit_that_can_be_read() -> None:
    assert read_memory_levels()


def test_ten_gib_of_cache_under_a_limit_of_eight_are_refused() -> None:
    # sgl-project/sglang#35641
    with pytest.raises(HostMemoryError) as caught:
        check_host_budget(10 * GIB, fraction=0.8, limit=8 * GIB, in_use=0)
    assert caught.value.setting == "rlix.weight_cache.host_memory_fraction"
    assert "10.00 GiB" in str(caught.value) and "8.00 GiB" in str(caught.value)
    assert "12.50 GiB" in caught.value.remedy


def test_two_slots_that_do_not_fit_where_one_does_name_the_slots() -> None:
    with pytest.raises(HostMemoryError) as caught:
        check_host_budget(10 * GIB, fraction=0.8, limit=8 * GIB, in_use=0, slots=2)
    assert (caught.value.setting, caught.value.value) == ("rlix.weight_cache.slots", 2)
    assert "slots=1" in caught.value.remedy


@given(
    st.integers(0, 2**40),
    st.floats(0.01, 1.0),
    st.integers(1, 2**40),
    st.integers(0, 2**40),
    st.integers(1, 2),
)
def test_accepted_exactly_when_it_stays_below_the_fraction(
    needed: int, fraction: float, limit: int, in_use: int, slots: int
) -> None:
    fits = in_use + needed <= int(limit * fraction)
    try:
        check_host_budget(needed, fraction=fraction, limit=limit, in_use=in_use, slots=slots)
    except HostMemoryError:
        assert not fits
    else:
        assert fits
