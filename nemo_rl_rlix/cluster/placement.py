"""Placement groups that all pipelines of a Ray cluster share, one bundle per GPU."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nemo_rl_rlix.cluster.slots import (
    GpuMismatchError,
    GpuSlot,
    PhysicalGpu,
    cpu_share,
    map_explicitly,
    order_slots,
)
from nemo_rl_rlix.errors import DeadlineExceededError, RLixError, SettingError
from nemo_rl_rlix.ray_errors import Callee, unwrap

logger = logging.getLogger(__name__)

KEEPER_NAME = "rlix_embedded:placement"
KEEPER_NAMESPACE = "rlix_embedded"
CPU_ATTEMPT_S = 5.0
"""Seconds in which bundles with CPUs must come up; then they are made without."""


class PlacementKeeper:
    """Actor that owns the placement group and counts its users.

    The group lives as long as this detached actor or until its last user releases it.
    """

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._slots: tuple[GpuSlot, ...] = ()
        self._users: set[str] = set()

    def acquire(
        self, user: str, num_gpus: int | None, cpus_per_gpu: int | None, timeout_s: float
    ) -> tuple[GpuSlot, ...]:
        """Add a user; makes the group when there is none.

        Args:
            user: Name of the user; a second call of the same user counts once.
            num_gpus: Bundles; ``None``: every GPU. Only read when the group is made.
            cpus_per_gpu: CPUs of a bundle; ``None``: see ``slots.cpu_share``.
            timeout_s: Deadline in seconds.

        Raises:
            SettingError: The cluster does not have that many GPUs.
            DeadlineExceededError: The GPUs are not free.
        """
        if self._group is None:
            self._make(num_gpus, cpus_per_gpu, timeout_s)
        if num_gpus is not None and num_gpus > len(self._slots):
            raise SettingError(
                "num_gpus",
                num_gpus,
                f"the shared placement group was made with {len(self._slots)} GPUs",
                "Shut it down first, or ask for fewer",
            )
        self._users.add(user)
        return self._slots

    def release(self, user: str) -> int:
        """Remove a user; with the last one the group goes. Returns how many are left."""
        self._users.discard(user)
        if not self._users and self._group is not None:
            remove_placement_group(self._group)
            self._group, self._slots = None, ()
        return len(self._users)

    def _make(self, num_gpus: int | None, cpus_per_gpu: int | None, timeout_s: float) -> None:
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        total = int(sum(node.get("GPU", 0) for node in nodes))
        wanted = total if num_gpus is None else num_gpus
        if not 0 < wanted <= total:
            raise SettingError(
                "num_gpus", wanted, f"the Ray cluster has {total} GPUs", "Start Ray with more"
            )
        cpus = cpu_share(nodes) if cpus_per_gpu is None else cpus_per_gpu
        group = None
        if cpus:
            group = self._try(wanted, cpus, min(CPU_ATTEMPT_S, timeout_s))
        if group is None:
            group = self._try(wanted, 0, timeout_s)
        if group is None:
            raise DeadlineExceededError(
                f"placement of {wanted} GPUs", timeout_s, "something else on the cluster holds some"
            )
        try:
            self._slots = _probe(group, timeout_s)
        except (RayError, RLixError):
            remove_placement_group(group)
            raise
        self._group = group

    @staticmethod
    def _try(num_gpus: int, cpus: int, timeout_s: float) -> PlacementGroup | None:
        bundle = {"GPU": 1.0, "CPU": float(cpus)} if cpus else {"GPU": 1.0}
        group = placement_group([bundle] * num_gpus, strategy="PACK", name=KEEPER_NAME)
        if group.wait(timeout_s):
            return group
        remove_placement_group(group)
        logger.warning("bundles %s x %d did not fit within %g s", bundle, num_gpus, timeout_s)
        return None


def _probe(group: PlacementGroup, timeout_s: float) -> tuple[GpuSlot, ...]:
    """Ask every bundle which card of its node it has got."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    probe = ray.remote(_devices)
    asked = [
        probe.options(
            num_cpus=0,
            num_gpus=0.01,
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                group, placement_group_bundle_index=index
            ),
        ).remote()
        for index in range(group.bundle_count)
    ]
    answers = _get(asked, "probe of the bundles", timeout_s)
    return order_slots(
        GpuSlot(-1, nodes[index], -1, index, group, devices[0])
        for index, (_, devices) in enumerate(answers)
    )


def _devices() -> tuple[str, tuple[str, ...]]:
    context = ray.get_runtime_context()
    return context.get_node_id(), tuple(context.get_accelerator_ids().get("GPU", ()))


@dataclass(frozen=True)
class SharedCluster:
    """The GPUs as one pipeline sees them. Picklable.

    Attributes:
        user: For whom they are kept.
        gpus: The slots; ``gpus[i].gpu_id == i``.
    """

    user: str
    gpus: tuple[GpuSlot, ...]

    @classmethod
    def connect(
        cls,
        user: str,
        *,
        num_gpus: int | None = None,
        cpus_per_gpu: int | None = None,
        explicit_physical_map: Mapping[int, PhysicalGpu] | None = None,
        timeout_s: float = 60.0,
    ) -> SharedCluster:
        """Join the placement group of this Ray cluster, or make it.

        Args:
            user: Name of the pipeline.
            num_gpus: Cards to reserve; ``None``: all. Counts for the first user only.
            cpus_per_gpu: CPUs in each bundle; ``None``: half of the node's share.
            explicit_physical_map: Logical id -> card, where ids should not simply
                follow nodes and cards, e.g. when one card stands for two ids.
            timeout_s: Deadline in seconds.

        Raises:
            SettingError: The cluster has fewer GPUs, or the map is wrong.
            DeadlineExceededError: The GPUs are not free.
        """
        keeper = (
            ray.remote(PlacementKeeper)
            .options(
                name=KEEPER_NAME,
                namespace=KEEPER_NAMESPACE,
                lifetime="detached",
                get_if_exists=True,
                max_restarts=0,
                num_cpus=0,
            )
            .remote()
        )
        what = "shared placement group"
        # Both attempts and the probe may use up timeout_s; the answer needs a moment more.
        limit = 3 * timeout_s + CPU_ATTEMPT_S
        slots = _get(keeper.acquire.remote(user, num_gpus, cpus_per_gpu, timeout_s), what, limit)
        if explicit_physical_map is not None:
            slots = map_explicitly(slots, explicit_physical_map)
        return cls(user, slots)

    def actor_options(
        self, gpu_ids: Sequence[int], *, gpu_fraction: float, num_cpus: float = 0
    ) -> dict[str, Any]:
        """Options that place an actor on its GPU.

        Args:
            gpu_ids: Logical ids. An actor that drives several cards of a node is
                placed in the bundle of the first.
            gpu_fraction: Share of the bundle's GPU, so that the residents of all
                pipelines fit: at most 1 / residents.
            num_cpus: CPUs of the bundle.

        Returns:
            For ``.options(**...)``.

        Raises:
            SettingError: No such id, or the ids are on several nodes.
        """
        outside = [gpu for gpu in gpu_ids if not 0 <= gpu < len(self.gpus)]
        if outside or not gpu_ids:
            raise SettingError(
                "gpu_ids", list(gpu_ids), "no such logical GPU", f"Use 0 to {len(self.gpus) - 1}"
            )
        if len({self.gpus[gpu].node_id for gpu in gpu_ids}) > 1:
            raise SettingError(
                "gpu_ids", list(gpu_ids), "on several nodes", "Create one actor on each node"
            )
        slot = self.gpus[gpu_ids[0]]
        return {
            "num_gpus": gpu_fraction,
            "num_cpus": num_cpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                slot.placement_group, placement_group_bundle_index=slot.bundle_index
            ),
        }

    def verify_worker(self, handle: Any, slot: GpuSlot, *, timeout_s: float = 30.0) -> None:
        """Check that an actor runs on the node and card of its slot.

        Raises:
            GpuMismatchError: It does not; names both.
            DeadlineExceededError: It does not answer.
            ControlPlaneLostError: It died.
        """
        answer = handle.__ray_call__.remote(lambda _: _devices())
        node_id, devices = _get(answer, f"placement check of {handle}", timeout_s)
        if node_id != slot.node_id or slot.physical_id not in devices:
            raise GpuMismatchError(
                str(handle), (slot.node_id, slot.physical_id), (node_id, devices)
            )

    def release(self, *, timeout_s: float = 30.0) -> None:
        """Stop using the GPUs; the last user's release returns them to Ray."""
        try:
            keeper = ray.get_actor(KEEPER_NAME, namespace=KEEPER_NAMESPACE)
        except ValueError:
            return  # shut down already
        _get(keeper.release.remote(self.user), "release of the placement group", timeout_s)


def shutdown_placement() -> None:
    """Return the shared GPUs to Ray, whoever uses them: their actors die."""
    try:
        keeper = ray.get_actor(KEEPER_NAME, namespace=KEEPER_NAMESPACE)
    except ValueError:
        return
    ray.kill(keeper, no_restart=True)


def _get(reference: Any, what: str, timeout_s: float) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayError as error:
        raise unwrap(error, Callee(what, timeout_s=timeout_s)) from error
