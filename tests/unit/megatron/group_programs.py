"""What the ranks of the group tests do."""

from __future__ import annotations

import copy
import functools
import gc
import os
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from nemo_rl_rlix.megatron.groups import ReloadableGroup
from nemo_rl_rlix.megatron.install import install_reloadable_groups
from nemo_rl_rlix.megatron.nccl_offload import (
    destroy_megatron_nccl_groups,
    managed_groups,
    reinit_megatron_nccl_groups,
)

GLOO = frozenset({"gloo"})
WAIT_S = 30.0


def start(rank: int, world_size: int) -> None:
    install_reloadable_groups()
    dist.init_process_group("gloo", rank=rank, world_size=world_size)


def new_groups(partitions: list[list[list[int]]]) -> list[list[Any]]:
    """For each way to cut up the world, the groups that this rank is in."""
    mine: list[list[Any]] = []
    for number, partition in enumerate(partitions):
        made = [dist.new_group(ranks, group_desc=f"CUT{number}") for ranks in partition]
        rank = dist.get_rank()
        mine.append([g for g, ranks in zip(made, partition, strict=True) if rank in ranks])
    return mine


def census() -> tuple[int, int, int]:
    """Threads, open files, and groups in torch's book, of this process."""
    threads = len(os.listdir("/proc/self/task"))
    return threads, len(os.listdir("/proc/self/fd")), len(c10d._world.pg_map)


def settled_census() -> tuple[int, int, int]:
    """The census when threads that are about to end have ended."""
    gc.collect()
    last = census()
    for _ in range(20):
        time.sleep(0.02)
        if (now := census()) == last:
            return now
        last = now
    return last


def every_collective(group: Any, value: float) -> list[float]:
    """One of each collective that Megatron, its optimizer and NeMo RL call."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    first = dist.get_process_group_ranks(group)[0]
    seen: list[float] = []
    one = torch.full((4,), value + rank)

    total = one.clone()
    dist.all_reduce(total, group=group)
    seen.append(total.sum().item())
    parts = [torch.zeros(4) for _ in range(size)]
    dist.all_gather(parts, one, group=group)
    seen.append(torch.stack(parts).sum().item())
    flat = torch.zeros(4 * size)
    dist.all_gather_into_tensor(flat, one, group=group)
    seen.append(flat.sum().item())
    shard = torch.zeros(4)
    dist.reduce_scatter_tensor(shard, flat, group=group)
    seen.append(shard.sum().item())
    spread = one.clone()
    dist.broadcast(spread, src=first, group=group)
    seen.append(spread.sum().item())
    swapped = torch.zeros(size)
    dist.all_to_all_single(swapped, torch.arange(size, dtype=torch.float32) + value, group=group)
    seen.append(swapped.sum().item())
    objects: list[Any] = [None] * size
    dist.all_gather_object(objects, {"rank": rank}, group=group)
    seen.append(float(sum(o["rank"] for o in objects)))
    handle = dist.all_reduce(one, group=group, async_op=True)
    handle.wait()
    seen.append(one.sum().item())
    if size > 1:
        ranks = dist.get_process_group_ranks(group)
        there, back = torch.full((2,), value), torch.zeros(2)
        pairs = [
            dist.P2POp(dist.isend, there, ranks[(rank + 1) % size], group=group),
            dist.P2POp(dist.irecv, back, ranks[(rank - 1) % size], group=group),
        ]
        for work in dist.batch_isend_irecv(pairs):
            work.wait()
        seen.append(back.sum().item())
    dist.barrier(group=group)
    return seen


def cycles(rank: int, world_size: int, partitions: list[list[list[int]]], rounds: int) -> Any:
    start(rank, world_size)
    groups = [g for cut in new_groups(partitions) for g in cut] + [dist.group.WORLD]
    # Handles as others keep them: in a closure, a tuple, a partial and a copied config.
    hidden = [
        lambda tensor, group=groups[0]: dist.all_reduce(tensor, group=group),
        functools.partial(dist.all_reduce, group=(groups[0],)[0]),
        lambda tensor: dist.all_reduce(tensor, group=copy.deepcopy({"pg": groups[0]})["pg"]),
    ]
    before = [every_collective(group, 1.0) for group in groups]
    names = [(g.group_name, g.group_desc, g.rank(), g.size(), dist.get_backend(g)) for g in groups]
    up, down, refs = [settled_census()], [], []
    for number in range(rounds):
        inner = weakref.ref(groups[0]._inner)
        report = destroy_megatron_nccl_groups(
            kinds=GLOO, timeout_s=WAIT_S, concurrently=number == 1
        )
        assert len(report.groups) == len(managed_groups(GLOO)), report
        again = destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
        assert again.groups == ()
        refs.append(inner() is None)
        down.append(settled_census())
        assert names == [
            (g.group_name, g.group_desc, g.rank(), g.size(), dist.get_backend(g)) for g in groups
        ]
        report = reinit_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
        assert len(report.groups) == len(managed_groups(GLOO)), report
        assert reinit_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S).groups == ()
        assert [every_collective(group, 1.0) for group in groups] == before
        for call in hidden:
            one = torch.ones(1)
            call(one)
            assert one.item() == groups[0].size()
        up.append(settled_census())
    dist.destroy_process_group()
    return {"up": up, "down": down, "freed": refs, "after": settled_census()}


def down_errors(rank: int, world_size: int) -> Any:
    start(rank, world_size)
    group = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
    errors = []
    for target in (group, None):
        try:
            dist.all_reduce(torch.ones(1), group=target)
        except RuntimeError as error:
            errors.append((type(error).__name__, str(error)))
    dist.destroy_process_group()  # works on groups that are down
    dist.init_process_group("gloo", rank=rank, world_size=world_size, store=_second_store(rank))
    one = torch.ones(1)
    dist.all_reduce(one)
    assert isinstance(dist.group.WORLD, ReloadableGroup)
    return errors, one.item()


def _second_store(rank: int) -> Any:
    port = int(os.environ["MASTER_PORT"])
    return dist.PrefixStore("second/", dist.TCPStore("127.0.0.1", port, 2, is_master=False))


def dead_peer(rank: int, world_size: int, victim: int, moment: str) -> Any:
    start(rank, world_size)
    groups = [
        g
        for cut in new_groups([[[0, 1], [2, 3]], [[0, 2], [1, 3]]][: world_size // 2])
        for g in cut
    ]
    dist.barrier()
    if moment == "destroy" and rank == victim:
        os._exit(9)
    started = time.monotonic()
    name = ranks = ""
    try:
        destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=3.0)
        if moment == "reinit" and rank == victim:
            os._exit(9)
        started = time.monotonic()
        reinit_megatron_nccl_groups(kinds=GLOO, timeout_s=3.0)
    except Exception as error:
        name, ranks = type(error).__name__, getattr(error, "ranks", [])
    seconds = time.monotonic() - started
    if rank == 0:
        time.sleep(1)  # it holds the store, which the others still ask for names
    return name, ranks, seconds, [g.is_up for g in groups]


def lost_in_warm_up(rank: int, world_size: int) -> Any:
    """A rank that comes to the meeting and never to the warm-up."""
    from nemo_rl_rlix.megatron.strategy import RebuildStrategy

    class Deserter(RebuildStrategy):
        def warm_up(self, group: ReloadableGroup) -> None:
            if rank == 1:
                time.sleep(20)
            super().warm_up(group)

    start(rank, world_size)
    dist.barrier()
    destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=WAIT_S)
    started = time.monotonic()
    try:
        reinit_megatron_nccl_groups(kinds=GLOO, timeout_s=2.0, strategy=Deserter())
    except Exception as error:
        return type(error).__name__, time.monotonic() - started, dist.group.WORLD.is_up
    return "", 0.0, True


def old_groups(rank: int, world_size: int) -> Any:
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    install_reloadable_groups()
    group = dist.new_group([0, 1])
    try:
        destroy_megatron_nccl_groups(kinds=GLOO, timeout_s=5.0)
    except Exception as error:
        return type(error).__name__, str(error), group.is_up
    return "", "", group.is_up


def gloo_stays(rank: int, world_size: int) -> Any:
    """By default only groups with NCCL go; here there are none."""
    start(rank, world_size)
    report = destroy_megatron_nccl_groups(timeout_s=5.0)
    one = torch.ones(1)
    dist.all_reduce(one)
    return report.groups, one.item()
