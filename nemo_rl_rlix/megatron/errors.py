"""Errors of the Megatron side."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_rlix.errors import RLixError

_SHOWN = 8


class GroupDownError(RLixError, RuntimeError):
    """A collective was called on a group whose communicator is torn down.

    A ``RuntimeError`` too, since torch expects that of a group without a backend.

    Args:
        group: Name and description of the group.
        call: Method that was called.
    """

    def __init__(self, group: str, call: str) -> None:
        super().__init__(
            f"{call} on process group {group}: its communicator is torn down because the "
            "training GPUs are not granted. Acquire actor_train and call "
            "reinit_megatron_nccl_groups() on every rank first"
        )
        self.group = group
        self.call = call


class ForeignWrapperError(RLixError):
    """Another library has replaced how torch makes process groups.

    Args:
        where: What was replaced, or the group that came out of it.
        owner: File or module of the replacement.
    """

    def __init__(self, where: str, owner: str) -> None:
        super().__init__(
            f"{where} was replaced by {owner}; two libraries that tear down communicators would "
            "free each other's. Switch the other one off, or leave RLIX_CONTROL_PLANE unset"
        )
        self.where = where
        self.owner = owner


class UnmanagedGroupError(RLixError):
    """Groups hold communicators that cannot be torn down and re-created.

    Args:
        groups: Name and reason of each.
    """

    def __init__(self, groups: Sequence[str]) -> None:
        super().__init__(
            f"{len(groups)} process groups cannot be re-created: {'; '.join(groups[:_SHOWN])}. "
            "Call install_reloadable_groups() before torch.distributed.init_process_group()"
        )
        self.groups = list(groups)


class PeersMissingError(RLixError):
    """Ranks did not come to a step that all ranks take together.

    Args:
        what: The step.
        timeout_s: How long they were waited for, in seconds.
        ranks: Ranks that did not come; empty if that could not be found out.
        detail: What the store said.
    """

    def __init__(self, what: str, timeout_s: float, ranks: Sequence[int], detail: str = "") -> None:
        who = f"ranks {list(ranks)}" if ranks else "some ranks, or the store's process,"
        tail = f" ({detail})" if detail else ""
        super().__init__(
            f"{what}: {who} did not come within {timeout_s:g} s{tail}. The communicators of this "
            "rank are torn down; restart the training workers"
        )
        self.what = what
        self.timeout_s = timeout_s
        self.ranks = list(ranks)


class WarmUpError(RLixError):
    """A re-created group does not work."""


class OffloadIncompleteError(RLixError):
    """Tensors, or memory of unknown origin, stayed on the device after an offload.

    Args:
        tensors: Path and size of what stayed, first ones first.
        nbytes: Bytes that stayed.
        budget_bytes: Bytes that may stay.
    """

    def __init__(self, tensors: Sequence[str], nbytes: int, budget_bytes: int) -> None:
        super().__init__(
            f"{nbytes / 2**20:.1f} MiB stayed on the device after the offload, "
            f"{budget_bytes / 2**20:.1f} MiB may: {'; '.join(tensors[:_SHOWN]) or 'origin unknown'}"
            f" ({len(tensors)} tensors). Whoever holds them must drop them between steps"
        )
        self.tensors = list(tensors)
        self.nbytes = nbytes
        self.budget_bytes = budget_bytes


class TrainerBusyError(RLixError):
    """The trainer is in the middle of something that an offload would destroy."""


class TrainerOffloadedError(RLixError):
    """A call needs the training GPUs while the trainer is offloaded.

    Args:
        call: Method that was called.
        rank: Rank of the worker.
    """

    def __init__(self, call: str, rank: int) -> None:
        super().__init__(
            f"rank {rank}: {call} needs the training GPUs and the trainer is offloaded. "
            "Acquire actor_train (before_training) first"
        )
        self.call = call
        self.rank = rank
