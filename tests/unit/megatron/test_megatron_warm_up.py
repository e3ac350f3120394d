"""Which communicators come back with a re-init: those that some rank has had."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from nemo_rl_rlix.megatron.groups import BackendRecipe, ReloadableGroup
from nemo_rl_rlix.megatron.rendezvous import is_marked, meet


@pytest.mark.parametrize(("kind", "initialized"), [("nccl", False), ("nccl", True), ("gloo", True)])
def test_a_group_that_nobody_has_used_holds_no_communicator(kind: str, initialized: bool) -> None:
    group = ReloadableGroup(dist.HashStore(), 0, 1)
    assert not group.has_communicator
    group._recipes = [BackendRecipe(kind, None, (torch.device("cuda"),), None)]
    backend = SimpleNamespace(_is_initialized=lambda: initialized)
    group._inner = SimpleNamespace(_get_backend=lambda device: backend)  # type: ignore[assignment]
    assert group.has_communicator is initialized


def test_every_rank_learns_which_communicators_any_of_them_had() -> None:
    store = dist.HashStore()
    meet(store, "destroy-1", rank=0, world_size=1, timeout_s=5, marks=["7"])
    meet(store, "destroy-3", rank=0, world_size=1, timeout_s=5)
    assert is_marked(store, "7") and not is_marked(store, "8")
