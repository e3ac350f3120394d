"""Measurements as JSON: one form for the demo and for every benchmark."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_rl_rlix.errors import SettingError

Scalar = bool | int | float | str
PACKAGES = ("nemo-rl-rlix", "torch", "ray", "numpy", "nemo-rl", "vllm", "megatron-core")


class Record(BaseModel):
    """One measured figure with all that is needed to judge it.

    Two records are of the same thing when ``metric`` and ``params`` are equal.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    metric: str = Field(pattern=r"^[a-z][a-z0-9_]*$", description="What was measured.")
    value: float = Field(allow_inf_nan=False, description="The figure; a median if n > 1.")
    unit: str = Field(description="Unit, e.g. s, tokens/s, ratio; count for whole numbers.")
    reference: float | None = Field(
        None, description="What it is compared with: same unit, same run; the bar of a ratio."
    )
    spread: tuple[float, float] | None = Field(
        None, description="Smallest and largest of the n values."
    )
    n: int = Field(1, ge=1, description="Number of values behind the figure.")
    params: dict[str, Scalar] = Field(default_factory=dict, description="Conditions.")
    versions: dict[str, str] = Field(default_factory=dict, description="Package -> version.")
    hardware: dict[str, Scalar] = Field(default_factory=dict, description="Machine.")
    command: str = Field("", description="What to run to measure it again.")
    date: str = Field("", description="UTC, ISO 8601, to the second.")

    @property
    def key(self) -> tuple[str, str]:
        """What it is a measurement of."""
        return self.metric, json.dumps(self.params, sort_keys=True)


_RECORDS = TypeAdapter(list[Record])


def load_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read a file of records.

    Raises:
        SettingError: The file is not a JSON list of records.
    """
    try:
        return _RECORDS.validate_json(Path(path).read_bytes())
    except ValidationError as error:
        raise SettingError(
            "records file",
            str(path),
            f"it is not a list of records: {error.errors()[0]['msg']}",
            "Name a new file, or one that this project wrote",
        ) from error


def merge_records(old: Iterable[Record], new: Iterable[Record]) -> list[Record]:
    """Put ``new`` over ``old``: a record of the same thing is replaced in its place."""
    merged = {record.key: record for record in old}
    merged.update((record.key, record) for record in new)
    return list(merged.values())


def write_records(path: str | os.PathLike[str], records: Sequence[Record]) -> None:
    """Merge ``records`` into the file at ``path``, which appears whole or not at all.

    Raises:
        SettingError: The file exists and holds something else.
    """
    target = Path(path)
    merged = merge_records(load_records(target) if target.exists() else [], records)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    scratch.write_bytes(_RECORDS.dump_json(merged, indent=1) + b"\n")
    os.replace(scratch, target)


def collect_versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, where they are installed.

    Read from the packages' metadata: nothing is imported.
    """
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


def describe_hardware() -> dict[str, Scalar]:
    """CPU model, usable cores and memory in GiB. Never a name of the machine."""
    return {
        "cpu": cpu_model(_read("/proc/cpuinfo")) or platform.machine(),
        "cores": usable_cores(
            len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
            _read("/sys/fs/cgroup/cpu.max"),
        ),
        "memory_gib": memory_gib(_read("/proc/meminfo"), _read("/sys/fs/cgroup/memory.max")),
    }


def cpu_model(cpuinfo: str) -> str:
    """Model name in the text of ``/proc/cpuinfo``, empty if there is none."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def usable_cores(affinity: int, cpu_max: str) -> float:
    """Cores that this process may use.

    Args:
        affinity: Number of cores in the affinity mask.
        cpu_max: Text of the cgroup's ``cpu.max``: quota and period in microseconds.
    """
    quota, _, period = cpu_max.strip().partition(" ")
    if quota.isdigit() and period.isdigit():
        return min(float(affinity), round(int(quota) / int(period), 2))
    return float(affinity)


def memory_gib(meminfo: str, memory_max: str) -> float:
    """Memory in GiB: the smaller of the machine's and the cgroup's limit, 0 if unknown.

    Args:
        meminfo: Text of ``/proc/meminfo`` (KiB).
        memory_max: Text of the cgroup's ``memory.max``: bytes or ``max``.
    """
    limits = []
    for line in meminfo.splitlines():
        if line.startswith("MemTotal:"):
            limits.append(int(line.split()[1]) * 1024)
    if memory_max.strip().isdigit():
        limits.append(int(memory_max))
    return round(min(limits, default=0) / 2**30, 1)


def command_line(argv: Sequence[str]) -> str:
    """The command as a user types it: the program by its name, without its folder."""
    return shlex.join([Path(argv[0]).name, *argv[1:]]) if argv else ""


def utc_now() -> str:
    """The time now in the form of :attr:`Record.date`."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
