"""NeMo RL's clusters as views of the placement group that all pipelines share."""

from __future__ import annotations

from typing import Any

from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from ray.util.placement_group import PlacementGroup

from nemo_rl_rlix.cluster.slots import GpuSlot
from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl import session as sessions
from nemo_rl_rlix.nemo_rl.bridge import port_slice
from nemo_rl_rlix.topology import Topology

RESIDENTS = 20
"""Workers, of all pipelines, that fit on a card; each is counted as that share of it."""

TRAIN, INFER, COLOCATED = "grpo_train_cluster", "grpo_inference_cluster", "grpo_policy_cluster"


class SharedVirtualCluster(RayVirtualCluster):
    """A cluster that has GPUs of the shared placement group instead of its own.

    Which, its name tells; a cluster of another name is NeMo RL's own.
    """

    # A half-built object is shut down too, by its destructor.
    _slots: tuple[GpuSlot, ...] | None = None
    _node_placement_groups: list[PlacementGroup] | None
    _sorted_bundle_indices: list[int] | None
    port_range_low: int
    port_range_high: int

    def __init__(
        self, bundle_ct_per_node_list: list[int], *args: Any, name: str = "", **kwargs: Any
    ) -> None:
        """As the base class.

        Raises:
            SettingError: Trainer and engines are colocated.
            RLixError: NeMo RL counts other GPUs than the session has.
        """
        super().__init__(bundle_ct_per_node_list, *args, name=name, **kwargs)
        if name == COLOCATED:
            raise SettingError(
                "policy.generation.colocated.enabled",
                True,
                "the scheduler decides which GPUs training and inference have in common",
                "Set it to false",
            )
        if name not in (TRAIN, INFER):
            return
        session = sessions.current()
        gpus = gpus_of(name, session.topology)
        if len(gpus) != self.world_size():
            raise SettingError(
                "cluster.gpus_per_node",
                bundle_ct_per_node_list,
                f"NeMo RL gives {name} {self.world_size()} GPUs, but it has {list(gpus)}",
                "Report this: the plan of the shared run and NeMo RL's setup do not agree",
            )
        self._slots = tuple(session.cluster.gpus[gpu] for gpu in gpus)
        # From here on NeMo RL counts each worker as this share of its card.
        self.max_colocated_worker_groups = RESIDENTS
        self.num_gpus_per_node = session.topology.inference.gpus_per_node
        self.port_range_low, self.port_range_high = port_slice(
            session.pipeline_id, self.port_range_low, self.port_range_high
        )
        # Now, since the policy reads the bundles before it asks for the groups.
        self._init_placement_groups()

    @property
    def shared(self) -> bool:
        """Whether its GPUs are those of the shared placement group."""
        return self._slots is not None

    def worker_bundles(self) -> list[tuple[int, list[int]]]:
        """``(node, [bundle])`` of a worker on each GPU, in the order of the mapping."""
        return [(slot.node_rank, [slot.bundle_index]) for slot in self._slots or ()]

    def _init_placement_groups(
        self, strategy: str | None = None, use_unified_pg: bool = False
    ) -> list[PlacementGroup]:
        if self._slots is None:
            groups: list[PlacementGroup] = super()._init_placement_groups(strategy, use_unified_pg)
            return groups
        # One group for all nodes: NeMo RL then takes the bundles that are listed, in
        # their order, which is how ranks follow the device mapping.
        self._node_placement_groups = [self._slots[0].placement_group]
        self._sorted_bundle_indices = [slot.bundle_index for slot in self._slots]
        return self._node_placement_groups

    def shutdown(self) -> bool:
        """Forget the shared group, which others use; remove groups of its own."""
        if self._slots is None:
            # An object whose constructor refused has no groups either.
            return bool(super().shutdown()) if "_node_placement_groups" in vars(self) else True
        self._node_placement_groups = None
        self._sorted_bundle_indices = None
        return True


def gpus_of(name: str, topology: Topology) -> tuple[int, ...]:
    """Logical GPU ids of the cluster of that name."""
    return topology.train_gpus if name == TRAIN else topology.inference.device_mapping
