"""Whether the host can hold the weight cache: decided at start, not by the OOM killer.

The memory that counts is the tightest of the cgroup's limits and the host's own
(sgl-project/sglang#35641: the host's alone says nothing inside a container).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from nemo_rl_rlix.errors import HostMemoryError

_V1_UNLIMITED = 1 << 60  # v1 says "no limit" by a huge number


@dataclass(frozen=True)
class MemoryLevel:
    """One limit on host memory.

    Attributes:
        source: Where it was read.
        limit: Bytes that may be in use.
        in_use: Bytes in use that cannot be reclaimed.
    """

    source: str
    limit: int
    in_use: int


def read_memory_levels(
    cgroup_root: Path = Path("/sys/fs/cgroup"), proc_root: Path = Path("/proc")
) -> tuple[MemoryLevel, ...]:
    """Read every limit that applies to this process, cgroup v1 or v2, and the host.

    Args:
        cgroup_root: Where the cgroup file systems are mounted.
        proc_root: Where proc is mounted.
    """
    levels = list(_cgroup_levels(cgroup_root, proc_root))
    host = _host_level(proc_root)
    return tuple([*levels, host] if host else levels)


def tightest(levels: Iterable[MemoryLevel], fraction: float) -> MemoryLevel | None:
    """The level with the fewest bytes left below ``fraction`` of its limit."""
    return min(levels, key=lambda level: level.limit * fraction - level.in_use, default=None)


def check_host_budget(
    needed_bytes: int, *, fraction: float, limit: int, in_use: int, slots: int = 1
) -> None:
    """Refuse a cache that the host cannot hold.

    Args:
        needed_bytes: Bytes that the cache is about to take, all slots together.
        fraction: Share of ``limit`` that may be in use (``host_memory_fraction``).
        limit: Memory limit in bytes.
        in_use: Bytes that are in use already.
        slots: Slots among ``needed_bytes``.

    Raises:
        HostMemoryError: Names the setting to change.
    """
    room = int(limit * fraction) - in_use
    if needed_bytes <= room:
        return
    reason = (
        f"the weight cache needs {_gib(needed_bytes)}, of a limit of {_gib(limit)} "
        f"{_gib(in_use)} are in use and {_gib(max(room, 0))} may still be taken"
    )
    if slots > 1 and needed_bytes // slots <= room:
        raise HostMemoryError(
            "rlix.weight_cache.slots",
            slots,
            reason,
            "Set rlix.weight_cache.slots=1 (a build then waits for readers)",
        )
    wanted = _gib(int((in_use + needed_bytes // slots) / fraction) + 1)
    raise HostMemoryError(
        "rlix.weight_cache.host_memory_fraction",
        fraction,
        reason,
        f"Raise the memory limit of the container to at least {wanted} (with "
        "rlix.weight_cache.slots=1), or this fraction",
    )


def _cgroup_levels(root: Path, proc_root: Path) -> Iterator[MemoryLevel]:
    try:
        lines = (proc_root / "self" / "cgroup").read_text().splitlines()
    except OSError:
        lines = []
    entries = [parts for line in lines if len(parts := line.split(":", 2)) == 3]
    unified = next((path for number, _, path in entries if number == "0"), "/")
    legacy = next((path for _, names, path in entries if "memory" in names.split(",")), "/")
    if (root / "cgroup.controllers").exists():
        yield from _walk(root, unified, "memory.max", "memory.current", "inactive_file")
    if (root / "memory").is_dir():
        yield from _walk(
            root / "memory",
            legacy,
            "memory.limit_in_bytes",
            "memory.usage_in_bytes",
            "total_inactive_file",
        )


def _walk(
    root: Path, path: str, limit_name: str, usage_name: str, cache_key: str
) -> Iterator[MemoryLevel]:
    """Yield the limit of each group from the process's own up to the root.

    Inside a cgroup namespace the path may name groups that are not mounted
    here; the ones that are still apply.
    """
    parts = [part for part in PurePosixPath(path).parts if part not in ("/", "..")]
    for depth in range(len(parts), -1, -1):
        group = root.joinpath(*parts[:depth])
        limit = _number(group / limit_name)
        usage = _number(group / usage_name)
        if limit is None or usage is None or limit >= _V1_UNLIMITED:
            continue
        reclaimable = _field(group / "memory.stat", cache_key) or 0
        yield MemoryLevel(str(group / limit_name), limit, max(usage - reclaimable, 0))


def _host_level(proc_root: Path) -> MemoryLevel | None:
    source = proc_root / "meminfo"
    total = _field(source, "MemTotal:")
    available = _field(source, "MemAvailable:")
    if total is None or available is None:
        return None
    return MemoryLevel(str(source), total * 1024, (total - available) * 1024)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None  # "max": no limit


def _field(path: Path, key: str) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        words = line.split()
        if len(words) >= 2 and words[0] == key and words[1].isdigit():
            return int(words[1])
    return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB"
