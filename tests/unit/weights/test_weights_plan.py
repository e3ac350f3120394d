"""The transfer planner: what is chosen, and what never is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.weights.errors import NoTransportError
from nemo_rl_rlix.weights.plan import (
    Device,
    Receiver,
    Sender,
    Transport,
    check_nccl_environment,
    nccl_groups,
    plan_transfers,
    side_group_is_safe,
)


def gpu(index: int, node: str = "a", uuid: str | None = None) -> Device:
    return Device(index, node, uuid or f"{node}-GPU{index}")


def chosen(plan: tuple) -> list[tuple[str, str, int]]:
    return [(t.transport.value, t.node, t.dp_rank) for t in plan]


def test_the_owners_node_reads_host_memory_even_when_senders_are_granted() -> None:
    plan = plan_transfers(
        [Receiver(0, (gpu(0),)), Receiver(1, (gpu(1), gpu(2)))],
        owner_node="a",
        shm_mappable={"a": True},
        senders=[Sender(gpu(0), granted=True)],
        nccl_side_group=True,
    )
    assert chosen(plan) == [("host_shm", "a", 0), ("host_shm", "a", 1), ("host_shm", "a", 1)]


def test_another_node_gets_one_replica_for_all_its_devices() -> None:
    plan = plan_transfers(
        [
            Receiver(0, (gpu(0),)),
            Receiver(1, (gpu(8, "b"), gpu(9, "b"))),
            Receiver(2, (gpu(10, "b"),)),
        ],
        owner_node="a",
        shm_mappable={"a": True, "b": True},
    )
    assert chosen(plan) == [
        ("replica", "b", -1),
        ("host_shm", "a", 0),
        ("host_shm", "b", 1),
        ("host_shm", "b", 1),
        ("host_shm", "b", 2),
    ]


def test_cuda_ipc_only_from_a_granted_sender_on_the_same_physical_gpu() -> None:
    receiver = [Receiver(0, (gpu(5, uuid="X"),))]
    here = Sender(gpu(0, uuid="X"), granted=True)
    plan = plan_transfers(receiver, owner_node="a", shm_mappable={}, senders=[here])
    assert chosen(plan) == [("cuda_ipc", "a", 0)]
    assert plan[0].sender == here.device
    for sender in (
        Sender(gpu(0, uuid="X"), False),
        Sender(gpu(0, uuid="Y"), True),
        Sender(gpu(5, "b", "X"), True),
    ):
        with pytest.raises(NoTransportError) as caught:
            plan_transfers(receiver, owner_node="a", shm_mappable={"a": False}, senders=[sender])
        assert caught.value.dp_rank == 0
        assert len(caught.value.reasons) == 3
        assert "actor_train" in str(caught.value)


def test_nccl_only_while_the_sender_is_granted() -> None:
    receiver = [Receiver(3, (gpu(1),))]

    def plan(granted: bool, side_group: bool) -> list[tuple[str, str, int]]:
        return chosen(
            plan_transfers(
                receiver,
                owner_node="a",
                shm_mappable={},
                senders=[Sender(gpu(0), granted)],
                nccl_side_group=side_group,
            )
        )

    assert plan(True, True) == [("nccl", "a", 3)]
    for granted, side_group in [(False, True), (True, False), (False, False)]:
        with pytest.raises(NoTransportError, match="nccl"):
            plan(granted, side_group)


def test_two_shards_of_one_gpu_go_into_two_groups() -> None:
    # OpenRLHF/OpenRLHF#726, huggingface/trl#3158
    shared = [
        Receiver(0, (gpu(1, uuid="S"),)),
        Receiver(1, (gpu(2, uuid="S"),)),
        Receiver(2, (gpu(3),)),
    ]
    plan = plan_transfers(
        shared,
        owner_node="a",
        shm_mappable={},
        senders=[Sender(gpu(0), True)],
        nccl_side_group=True,
    )
    assert [t.group for t in plan] == [0, 1, 0]
    assert {g: len(members) for g, members in nccl_groups(plan).items()} == {0: 3, 1: 2}


nodes = st.sampled_from(["a", "b", "c"])
devices = st.builds(Device, st.integers(0, 15), nodes, st.sampled_from("UVWXYZ"))
receivers = st.lists(st.lists(devices, min_size=1, max_size=3).map(tuple), max_size=5).map(
    lambda rows: [Receiver(rank, row) for rank, row in enumerate(rows)]
)


@settings(max_examples=300, deadline=None)
@given(
    receivers,
    st.dictionaries(nodes, st.booleans()),
    st.lists(st.builds(Sender, devices, st.booleans()), max_size=4),
    st.booleans(),
)
def test_every_plan_is_legal_and_complete(
    targets: list[Receiver], mappable: dict[str, bool], senders: list[Sender], side_group: bool
) -> None:
    granted = {sender.device for sender in senders if sender.granted}
    try:
        plan = plan_transfers(
            targets,
            owner_node="a",
            shm_mappable=mappable,
            senders=senders,
            nccl_side_group=side_group,
        )
    except NoTransportError as error:
        (receiver,) = [r for r in targets if r.dp_rank == error.dp_rank]
        unmapped = [d for d in receiver.devices if not mappable.get(d.node, False)]
        assert unmapped
        assert not (granted and side_group)
        assert any(all(s.physical != d.physical for s in granted) for d in unmapped)
        return
    served = [(t.dp_rank, t.device) for t in plan if t.transport is not Transport.REPLICA]
    assert served == [(r.dp_rank, d) for r in targets for d in r.devices]
    replicas = [t.node for t in plan if t.transport is Transport.REPLICA]
    reading = {t.node for t in plan if t.transport is Transport.HOST_SHM}
    assert sorted(replicas) == sorted(reading - {"a"})
    for transfer in plan:
        if transfer.transport is Transport.HOST_SHM:
            assert mappable[transfer.node] and transfer.sender is None
        if transfer.transport in (Transport.CUDA_IPC, Transport.NCCL):
            assert transfer.sender in granted
            assert not mappable.get(transfer.node, False)
            assert transfer.device is not None
            same = transfer.sender.physical == transfer.device.physical
            assert same is (transfer.transport is Transport.CUDA_IPC)
        assert (transfer.group >= 0) is (transfer.transport is Transport.NCCL)
    for members in nccl_groups(plan).values():
        physical = [member.physical for member in members]
        assert len(physical) == len(set(physical)) >= 2
    if not side_group:
        assert not nccl_groups(plan)


@pytest.mark.parametrize(
    ("exists", "bound", "stateless", "safe"),
    [
        (False, False, False, True),
        (True, False, False, True),
        (True, True, False, False),  # NVIDIA-NeMo/RL#3190
        (True, True, True, True),
    ],
)
def test_a_side_group_beside_a_bound_default_group_is_not_safe(
    exists: bool, bound: bool, stateless: bool, safe: bool
) -> None:
    assert safe is side_group_is_safe(
        default_group_exists=exists, default_group_bound_to_device=bound, stateless=stateless
    )


def test_a_disagreement_about_cumem_names_the_variable() -> None:
    # NovaSky-AI/SkyRL#143
    check_nccl_environment({"NCCL_CUMEM_ENABLE": "0"}, {"NCCL_CUMEM_ENABLE": "0", "OTHER": "1"})
    check_nccl_environment({}, {})
    with pytest.raises(SettingError, match="NCCL_CUMEM_ENABLE"):
        check_nccl_environment({"NCCL_CUMEM_ENABLE": "0"}, {})
