"""What the processes of a shard report of a transfer, and how that becomes one report. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.shards.protocol import ReceiveReport


@dataclass(frozen=True)
class WorkerReceive:
    """What one worker process of an engine received.

    Attributes:
        weights_version: Version that arrived.
        loaded: Engine tensors that were written from the first to the last element.
        expected: Engine tensors that this process has.
        nbytes: Bytes that were copied to its device.
        seconds: Time it took.
    """

    weights_version: int
    loaded: frozenset[str]
    expected: frozenset[str]
    nbytes: int
    seconds: float


def merge(workers: Sequence[WorkerReceive]) -> ReceiveReport:
    """One report for the shard.

    A tensor counts as loaded only if every process that has (a part of) it wrote it:
    under tensor parallelism all have the same names, under pipeline parallelism each
    its own.

    Raises:
        RLixError: No process reported, or they received different versions.
    """
    versions = {worker.weights_version for worker in workers}
    if len(versions) != 1:
        raise RLixError(f"the processes of an engine received versions {sorted(versions)}")
    incomplete = frozenset().union(*(worker.expected - worker.loaded for worker in workers))
    return ReceiveReport(
        weights_version=versions.pop(),
        loaded=frozenset().union(*(worker.loaded for worker in workers)) - incomplete,
        expected=frozenset().union(*(worker.expected for worker in workers)),
        nbytes=sum(worker.nbytes for worker in workers),
        seconds=max(worker.seconds for worker in workers),
    )
