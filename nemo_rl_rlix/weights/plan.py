"""Which way the weights take to each device. Pure: facts in, transfers out.

The default is that a receiver reads host memory of its own node and copies to its
own, granted GPU. The trainer's GPUs, which may belong to another pipeline by
then, are used only where that cannot be and only while they are granted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.weights.errors import NoTransportError

_MUST_AGREE = ("NCCL_CUMEM_ENABLE",)


class Transport(StrEnum):
    """How bytes get from the cache to where they are needed."""

    HOST_SHM = "host_shm"
    """The receiver maps host memory of its node and copies to its device."""
    REPLICA = "replica"
    """Host to host, once for each node other than the owner's."""
    CUDA_IPC = "cuda_ipc"
    """Through a buffer on the GPU that sender and receiver share."""
    NCCL = "nccl"
    """A temporary group of the sender and receivers on other GPUs."""


@dataclass(frozen=True)
class Device:
    """One GPU.

    Attributes:
        gpu: Logical id.
        node: Node that it is in.
        uuid: Identity of the physical device (or MIG slice); two logical ids
            may share one.
    """

    gpu: int
    node: str
    uuid: str

    @property
    def physical(self) -> tuple[str, str]:
        """What must not be in one NCCL group twice."""
        return (self.node, self.uuid)


@dataclass(frozen=True)
class Receiver:
    """A shard that needs the weights.

    Attributes:
        dp_rank: Its rank.
        devices: Its devices, in rank order.
    """

    dp_rank: int
    devices: tuple[Device, ...]


@dataclass(frozen=True)
class Sender:
    """A training rank that could send from its GPU.

    Attributes:
        device: Its device.
        granted: Whether the scheduler grants that device to the trainer now.
    """

    device: Device
    granted: bool


@dataclass(frozen=True)
class Transfer:
    """One movement of a complete set of weights.

    Attributes:
        transport: How.
        node: Node that the bytes arrive on.
        dp_rank: Shard they are for; -1 for a replica, which is for a whole node.
        device: Device they arrive on; ``None`` for a replica.
        sender: Device they come from; ``None`` when they come from host memory.
        group: NCCL group, counted from 0; -1 for other transports.
    """

    transport: Transport
    node: str
    dp_rank: int = -1
    device: Device | None = None
    sender: Device | None = None
    group: int = -1


def plan_transfers(
    receivers: Iterable[Receiver],
    *,
    owner_node: str,
    shm_mappable: Mapping[str, bool],
    senders: Sequence[Sender] = (),
    nccl_side_group: bool = False,
) -> tuple[Transfer, ...]:
    """Choose a transport for every device of every receiver.

    Args:
        receivers: Shards to be synced.
        owner_node: Node whose host memory holds the cache.
        shm_mappable: Node -> whether its shards can map shared memory made there;
            a node that is not named cannot.
        senders: Training ranks and whether their GPUs are granted.
        nccl_side_group: Whether a temporary NCCL group can be made, see
            :func:`side_group_is_safe`.

    Returns:
        Replicas first, then the devices in the order of the receivers.

    Raises:
        NoTransportError: A device cannot be reached legally.
    """
    replicas: dict[str, Transfer] = {}
    direct: list[Transfer] = []
    groups: list[tuple[Device, set[tuple[str, str]]]] = []
    for receiver in receivers:
        for device in receiver.devices:
            if shm_mappable.get(device.node, False):
                if device.node != owner_node:
                    replicas.setdefault(device.node, Transfer(Transport.REPLICA, device.node))
                direct.append(Transfer(Transport.HOST_SHM, device.node, receiver.dp_rank, device))
                continue
            reasons = [f"host_shm: node {device.node} cannot map shared memory"]
            direct.append(
                _from_sender(receiver.dp_rank, device, senders, nccl_side_group, groups, reasons)
            )
    return (*replicas.values(), *direct)


def nccl_groups(transfers: Iterable[Transfer]) -> dict[int, tuple[Device, ...]]:
    """Members of each NCCL group of a plan, the sender first."""
    groups: dict[int, list[Device]] = {}
    for transfer in transfers:
        if transfer.sender is None or transfer.device is None or transfer.group < 0:
            continue
        groups.setdefault(transfer.group, [transfer.sender]).append(transfer.device)
    return {group: tuple(members) for group, members in groups.items()}


def side_group_is_safe(
    *, default_group_exists: bool, default_group_bound_to_device: bool, stateless: bool
) -> bool:
    """Whether a temporary NCCL group can be made beside the default group.

    A default group that was bound to a device makes ``new_group`` split the
    parent communicator, for which every rank of the parent has to call: ranks
    outside the new group never do and it hangs (NVIDIA-NeMo/RL#3190).

    Args:
        default_group_exists: Whether ``torch.distributed`` is initialised.
        default_group_bound_to_device: Whether ``init_process_group`` got a ``device_id``.
        stateless: Whether the group is made with a store of its own, past the
            default group.
    """
    return stateless or not (default_group_exists and default_group_bound_to_device)


def check_nccl_environment(sender: Mapping[str, str], receiver: Mapping[str, str]) -> None:
    """Refuse a group whose sides allocate NCCL's buffers in different ways.

    Raises:
        SettingError: Names the variable that differs.
    """
    for name in _MUST_AGREE:
        if sender.get(name) != receiver.get(name):
            raise SettingError(
                name,
                receiver.get(name),
                f"the trainer's processes have {sender.get(name)!r}; a group of both would hang",
                f"Set {name} to one value for trainer and shards",
            )


def _from_sender(
    dp_rank: int,
    device: Device,
    senders: Sequence[Sender],
    nccl_side_group: bool,
    groups: list[tuple[Device, set[tuple[str, str]]]],
    reasons: list[str],
) -> Transfer:
    granted = [sender.device for sender in senders if sender.granted]
    for sender in granted:
        if sender.physical == device.physical:
            return Transfer(Transport.CUDA_IPC, device.node, dp_rank, device, sender)
    reasons.append("cuda_ipc: no granted sender on the same physical GPU")

    if not nccl_side_group:
        reasons.append("nccl: no temporary group can be made beside the default group")
        raise NoTransportError(dp_rank, f"GPU {device.gpu} of {device.node}", reasons)
    if not granted:
        reasons.append("nccl: no sender's GPU is granted")
        raise NoTransportError(dp_rank, f"GPU {device.gpu} of {device.node}", reasons)
    # No granted sender shares the GPU here, or CUDA IPC would have been taken.
    for group, (sender, members) in enumerate(groups):
        if device.physical not in members:
            members.add(device.physical)
            return Transfer(Transport.NCCL, device.node, dp_rank, device, sender, group)
    sender = granted[0]
    groups.append((sender, {sender.physical, device.physical}))
    return Transfer(Transport.NCCL, device.node, dp_rank, device, sender, len(groups) - 1)
