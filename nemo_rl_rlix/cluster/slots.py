"""Logical GPUs: which bundle on which node each id stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from nemo_rl_rlix.errors import RLixError, SettingError


class PhysicalGpu(NamedTuple):
    """A card: rank of its node among the GPU nodes, and its accelerator id there."""

    node_rank: int
    device: str


@dataclass(frozen=True)
class GpuSlot:
    """One logical GPU.

    Attributes:
        gpu_id: Logical id, as in device mappings.
        node_id: Ray node id.
        node_rank: Rank of the node among the nodes with GPUs.
        bundle_index: Bundle of the placement group.
        placement_group: The shared ``ray.util.placement_group.PlacementGroup``.
        physical_id: Accelerator id on the node, as Ray reports it.
    """

    gpu_id: int
    node_id: str
    node_rank: int
    bundle_index: int
    placement_group: Any
    physical_id: str


class GpuMismatchError(RLixError):
    """An actor does not run on the GPU that its bundle stands for.

    Args:
        worker: The actor.
        expected: Node id and accelerator id of the slot.
        found: Node id and accelerator ids that the actor reports.
    """

    def __init__(
        self, worker: str, expected: tuple[str, str], found: tuple[str, tuple[str, ...]]
    ) -> None:
        super().__init__(
            f"{worker} should be on GPU {expected[1]} of node {expected[0]} but has GPUs"
            f" {', '.join(found[1]) or 'none'} of node {found[0]}. Create it with the options of"
            " SharedCluster.actor_options, and without other placement options"
        )
        self.worker = worker
        self.expected = expected
        self.found = found


def order_slots(bundles: Iterable[GpuSlot]) -> tuple[GpuSlot, ...]:
    """Number the bundles by node, then accelerator id, so that ids are stable.

    Ray may place bundles in any order, and hand out a node's cards in any order to
    its bundles. Nodes are ranked by their id; logical ids of a node are contiguous,
    as tensor-parallel groups need it.

    Args:
        bundles: Slots whose ``gpu_id`` and ``node_rank`` do not matter yet.
    """
    found = list(bundles)
    ranks = {node: rank for rank, node in enumerate(sorted({slot.node_id for slot in found}))}
    found.sort(
        key=lambda slot: (ranks[slot.node_id], _by_number(slot.physical_id), slot.bundle_index)
    )
    return tuple(
        replace(slot, gpu_id=gpu_id, node_rank=ranks[slot.node_id])
        for gpu_id, slot in enumerate(found)
    )


def _by_number(device: str) -> tuple[int, str]:
    return (int(device), "") if device.isdigit() else (-1, device)


def map_explicitly(
    slots: tuple[GpuSlot, ...], physical: Mapping[int, PhysicalGpu]
) -> tuple[GpuSlot, ...]:
    """Let logical ids stand for chosen cards; two ids may stand for the same one.

    Args:
        slots: Every card once, see :func:`order_slots`.
        physical: Logical id -> card; the ids are 0 to n-1.

    Raises:
        SettingError: An id is left out, or a card does not exist.
    """
    cards = {PhysicalGpu(slot.node_rank, slot.physical_id): slot for slot in slots}
    if sorted(physical) != list(range(len(physical))):
        raise SettingError(
            "explicit_physical_map", sorted(physical), "ids must be 0 to n-1", "Name each once"
        )
    mapped = []
    for gpu_id in range(len(physical)):
        card = PhysicalGpu(*physical[gpu_id])
        if card not in cards:
            known = ", ".join(f"{c.node_rank}/{c.device}" for c in cards)
            raise SettingError(
                f"explicit_physical_map[{gpu_id}]",
                tuple(card),
                "no such card",
                f"Use one of (node rank/accelerator id): {known}",
            )
        mapped.append(replace(cards[card], gpu_id=gpu_id))
    return tuple(mapped)


def cpu_share(nodes: Iterable[Mapping[str, float]]) -> int:
    """CPUs that each bundle can have beside its GPU.

    Half of a node's CPUs stay outside, for the actors that need no GPU.

    Args:
        nodes: Total resources of each node.
    """
    shares = [
        int(node.get("CPU", 0) / node["GPU"] / 2) for node in nodes if node.get("GPU", 0) >= 1
    ]
    return min(shares, default=0)
