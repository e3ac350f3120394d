"""The engines' worker group: one shard for each consecutive run of the device mapping."""

from __future__ import annotations

from typing import Any

from nemo_rl.distributed.worker_groups import RayWorkerGroup

from nemo_rl_rlix.nemo_rl.virtual_cluster import SharedVirtualCluster


class MappedWorkerGroup(RayWorkerGroup):
    """A worker group that follows the device mapping.

    Symptom: an engine on one GPU runs on bundle r of the placement group, whatever the
    mapping says.
    Cause: for groups that are not tied, ``RayWorkerGroup`` counts the bundles of the
    placement group through, which here holds GPUs of everyone.
    """

    def __init__(
        self,
        cluster: Any,
        remote_worker_builder: Any,
        workers_per_node: int | list[int] | None = None,
        name_prefix: str = "",
        bundle_indices_list: list[tuple[int, list[int]]] | None = None,
        **kwargs: Any,
    ) -> None:
        """As the base class."""
        if (
            bundle_indices_list is None
            and isinstance(cluster, SharedVirtualCluster)
            and cluster.shared
        ):
            bundle_indices_list = cluster.worker_bundles()
        super().__init__(
            cluster,
            remote_worker_builder,
            workers_per_node=workers_per_node,
            name_prefix=name_prefix,
            bundle_indices_list=bundle_indices_list,
            **kwargs,
        )
