"""Running a method on the leaders of chosen shards of a NeMo RL worker group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import ray


def run_on_dp_shard_leaders(
    worker_group: Any, dp_ranks: Iterable[int], method_name: str, **kwargs: Any
) -> list[Any]:
    """Run a method on the leader of each of some shards, all at once.

    Args:
        worker_group: NeMo RL's ``RayWorkerGroup``.
        dp_ranks: Ranks of the shards.
        method_name: Method of the worker.
        kwargs: Its arguments, the same for every shard.

    Returns:
        One object reference for each rank, in the order of ``dp_ranks``.

    Raises:
        IndexError: The group has no such shard.
    """
    return [
        worker_group.run_single_worker_single_data(
            method_name, worker_idx=worker_group.get_dp_leader_worker_idx(rank), **kwargs
        )
        for rank in dp_ranks
    ]


class SomeShards:
    """A worker group of which only some shards are asked; the others are left alone.

    Stands in for the group in methods that fan out, so that those need not be copied.

    Args:
        worker_group: NeMo RL's ``RayWorkerGroup``.
        dp_ranks: Ranks that may be asked.
    """

    def __init__(self, worker_group: Any, dp_ranks: Iterable[int]) -> None:
        self._group = worker_group
        self._ranks = frozenset(dp_ranks)

    @property
    def dp_size(self) -> int:
        """Number of shards, the ones left alone included."""
        return int(self._group.dp_size)

    def get_dp_leader_worker_idx(self, dp_shard_idx: int) -> int:
        """Index of the shard's leader in the group."""
        return int(self._group.get_dp_leader_worker_idx(dp_shard_idx))

    def run_all_workers_single_data(
        self,
        method_name: str,
        run_rank_0_only_axes: Sequence[str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Run a method on the leaders of the chosen shards, or on all their workers."""
        if run_rank_0_only_axes:
            return run_on_dp_shard_leaders(self._group, sorted(self._ranks), method_name, **kwargs)
        return [
            getattr(worker, method_name).remote(**kwargs)
            for worker, about in zip(self._group.workers, self._group.worker_metadata, strict=True)
            if about["dp_shard_idx"] in self._ranks
        ]

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, **kwargs: Any
    ) -> Any:
        """Run a method on one worker; of a shard left alone the answer is ``None``."""
        if self._group.worker_metadata[worker_idx]["dp_shard_idx"] not in self._ranks:
            return ray.put(None)
        return self._group.run_single_worker_single_data(
            method_name, worker_idx=worker_idx, **kwargs
        )
