"""Who may use which logical GPU, kept by the pipelines that the scheduler grants them to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nemo_rl_rlix.reference.device import LogicalGpu, LogicalGpuSpec


def shard_owner(pipeline: str, dp_rank: int) -> str:
    """Name under which a shard holds a GPU."""
    return f"{pipeline}/shard{dp_rank}"


def trainer_owner(pipeline: str) -> str:
    """Name under which a trainer holds a GPU."""
    return f"{pipeline}/trainer"


class OwnerGuard:
    """Grants a set of GPUs to one owner and takes them back.

    A grant to a second owner raises, so a scheduler that gave one GPU to two
    owners ends the run instead of going unnoticed.

    Args:
        gpus: The GPUs.
        owner: The owner.
    """

    def __init__(self, gpus: Sequence[LogicalGpuSpec], owner: str) -> None:
        self._gpus = [LogicalGpu(spec) for spec in gpus]
        self._owner = owner

    def grant(self) -> None:
        """The GPUs are the owner's from now on."""
        for gpu in self._gpus:
            gpu.grant(self._owner)

    def revoke(self) -> None:
        """The GPUs are free from now on; a no-op on those of somebody else."""
        for gpu in self._gpus:
            gpu.revoke(self._owner)


class ShardGuards:
    """The device guard of a coordinator: one owner per shard.

    Args:
        pipeline: Name of the pipeline.
        gpus: dp rank -> its GPUs.
    """

    def __init__(self, pipeline: str, gpus: Mapping[int, Sequence[LogicalGpuSpec]]) -> None:
        self._guards = {
            rank: OwnerGuard(specs, shard_owner(pipeline, rank)) for rank, specs in gpus.items()
        }

    def grant(self, dp_rank: int) -> None:
        """The shard's GPUs are its own from now on."""
        self._guards[dp_rank].grant()

    def revoke(self, dp_rank: int) -> None:
        """The shard's GPUs are free from now on. Idempotent."""
        self._guards[dp_rank].revoke()
