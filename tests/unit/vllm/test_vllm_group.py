"""A transfer over a temporary group, on gloo: one sender, two receivers, threads as ranks."""

from __future__ import annotations

import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist

from nemo_rl_rlix.vllm.group import GroupSpec, TemporaryGroup, receive_batches, send_slot
from nemo_rl_rlix.weights.dtypes import spec_of
from nemo_rl_rlix.weights.layout import extents, plan_layout
from nemo_rl_rlix.weights.slot import host_staging
from nemo_rl_rlix.weights.staging import plan_staging

CPU = torch.device("cpu")
TENSORS = {
    "small": torch.arange(7, dtype=torch.float32),
    "split": torch.arange(9000, dtype=torch.int64).to(torch.bfloat16),
    "scalar": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "last": torch.arange(2000, dtype=torch.int32),
}


def spec_for(size: int, name: str) -> GroupSpec:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    devices = tuple(f"cpu{rank}" for rank in range(size))
    return GroupSpec("127.0.0.1", port, name, size, "gloo", devices)


def test_every_receiver_gets_every_tensor_bit_for_bit() -> None:
    layout = plan_layout(
        [spec_of(name, tensor) for name, tensor in TENSORS.items()], bucket_bytes=4096, alignment=64
    )
    plan = plan_staging(layout)
    slot = torch.zeros(layout.total_nbytes, dtype=torch.uint8)
    for name, runs in extents(layout).items():
        raw, done = TENSORS[name].reshape(-1).view(torch.uint8), 0
        for run in runs:
            slot[run.offset : run.offset + run.nbytes] = raw[done : done + run.nbytes]
            done += run.nbytes

    def send(spec: GroupSpec) -> int:
        with TemporaryGroup(spec, 0, timeout_s=20) as group:
            return send_slot(group, slot, plan, CPU)

    def receive(spec: GroupSpec, rank: int) -> dict[str, torch.Tensor]:
        got: dict[str, torch.Tensor] = {}
        with TemporaryGroup(spec, rank, timeout_s=20) as group:
            for batch in receive_batches(group, plan, layout.total_nbytes, CPU, host_staging):
                got.update({name: tensor.clone() for name, tensor in batch})
        return got

    before = len(dist.distributed_c10d._world.pg_map)
    with ThreadPoolExecutor(3) as pool:
        for turn in range(2):  # a second transfer meets under another name
            spec = spec_for(3, f"sync-{turn}")
            sent = pool.submit(send, spec)
            got = [pool.submit(receive, spec, rank) for rank in (1, 2)]
            for future in got:
                answer = future.result(30)
                assert set(answer) == set(TENSORS)
                for name, tensor in TENSORS.items():
                    assert torch.equal(answer[name], tensor), name
            assert sent.result(30) >= sum(t.nbytes for t in TENSORS.values())
    # Nothing of it takes part in the process's own groups.
    assert len(dist.distributed_c10d._world.pg_map) == before
    assert not dist.is_initialized()


def test_a_rank_that_does_not_come_ends_the_wait() -> None:
    spec = spec_for(2, "alone")
    done = threading.Event()

    def alone() -> None:
        with pytest.raises(dist.DistError), TemporaryGroup(spec, 0, timeout_s=1):
            pass
        done.set()

    thread = threading.Thread(target=alone, daemon=True)
    thread.start()
    assert done.wait(20)


def test_two_ranks_of_one_gpu_are_refused() -> None:
    with pytest.raises(ValueError, match="two ranks of one GPU"):
        GroupSpec("h", 1, "n", 3, "nccl", ("a", "b", "a"))
    with pytest.raises(ValueError, match="devices"):
        GroupSpec("h", 1, "n", 3, "nccl", ("a", "b"))
