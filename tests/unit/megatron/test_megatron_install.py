"""Another library's way to make groups is found and refused by name."""

import functools
import threading
import time
import types
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as c10d
from torch.distributed.c10d_logger import _exception_logger

from nemo_rl_rlix.megatron.errors import ForeignWrapperError, GroupDownError
from nemo_rl_rlix.megatron.groups import BackendRecipe, ReloadableGroup, group_order
from nemo_rl_rlix.megatron.install import (
    check_no_foreign_wrapper,
    install_reloadable_groups,
    uninstall_reloadable_groups,
)


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    uninstall_reloadable_groups()


def test_install_twice_wraps_once_and_uninstall_restores() -> None:
    original = c10d._new_process_group_helper
    install_reloadable_groups()
    wrapped = c10d._new_process_group_helper
    install_reloadable_groups()
    assert c10d._new_process_group_helper is wrapped is not original
    uninstall_reloadable_groups()
    uninstall_reloadable_groups()
    assert c10d._new_process_group_helper is original


@pytest.mark.parametrize("module", [dist, c10d])
@pytest.mark.parametrize("name", ["new_group", "init_process_group", "destroy_process_group"])
@pytest.mark.parametrize("wraps", [True, False])
def test_replaced_entry_point_is_refused(
    monkeypatch: pytest.MonkeyPatch, module: object, name: str, wraps: bool
) -> None:
    original = getattr(module, name)

    def other(*args: object, **kwargs: object) -> object:
        return original(*args, **kwargs)

    replacement = functools.wraps(original)(other) if wraps else other
    monkeypatch.setattr(module, name, replacement)
    with pytest.raises(ForeignWrapperError) as caught:
        install_reloadable_groups()
    assert name in caught.value.where
    assert caught.value.owner == __file__


def test_replacement_under_a_decorator_of_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    original = dist.new_group
    other = functools.wraps(original)(lambda *a, **k: original(*a, **k))
    monkeypatch.setattr(dist, "new_group", _exception_logger(other))
    with pytest.raises(ForeignWrapperError, match="new_group"):
        check_no_foreign_wrapper()


def test_replaced_helper_and_class_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(c10d, "_new_process_group_helper", lambda *a, **k: None)
        with pytest.raises(ForeignWrapperError, match="_new_process_group_helper"):
            check_no_foreign_wrapper()

    class Other(ProcessGroup):
        pass

    monkeypatch.setattr(c10d, "ProcessGroup", Other)
    with pytest.raises(ForeignWrapperError, match=r"ProcessGroup"):
        check_no_foreign_wrapper()


def test_wrapper_put_over_ours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install_reloadable_groups()
    ours = c10d._new_process_group_helper
    monkeypatch.setattr(c10d, "_new_process_group_helper", lambda *a, **k: ours(*a, **k))
    with pytest.raises(ForeignWrapperError):
        install_reloadable_groups()


def test_every_method_of_torch_is_answered_or_refused_while_down() -> None:
    """A method that torch adds later is forwarded too, not run on the empty shell."""
    group = ReloadableGroup(dist.HashStore(), 0, 1)
    known_when_down = {
        "rank", "size", "name", "shutdown", "abort", "get_group_store", "boxed", "unbox",
        "getGroupName", "getGroupDesc", "getBackendName", "_has_hooks", "_wait_for_pending_works",
        "_set_default_backend", "_register_backend", "_set_group_name", "_set_group_desc",
        "_pybind11_conduit_v1_",
    }  # fmt: skip
    for name, member in vars(ProcessGroup).items():
        if name.startswith("__") or not callable(member) or isinstance(member, type | property):
            continue
        if name in known_when_down:
            continue
        with pytest.raises(GroupDownError, match=name):
            getattr(group, name)()


def test_abort_ends_a_shutdown_that_is_stuck() -> None:
    """A communicator with a dead peer: its orderly end never comes."""
    aborted = threading.Event()
    backend = types.SimpleNamespace(shutdown=lambda: aborted.wait(20), abort=aborted.set)
    group = ReloadableGroup(dist.HashStore(), 0, 1)
    group._recipes = [BackendRecipe("nccl", None, (torch.device("cuda"),), None)]
    group._inner = types.SimpleNamespace(_get_backend=lambda device: backend)
    stuck = threading.Thread(target=group.take_down, daemon=True)
    stuck.start()
    while group.is_up:
        time.sleep(0.001)
    group.take_down(abort=True)
    stuck.join(10)
    assert aborted.is_set() and not stuck.is_alive()
    assert group._ending is None


@given(st.permutations(["0", "2", "10", "9", "f00", "a1b"]))
def test_order_is_that_of_creation_whatever_it_was_read_in(names: list[str]) -> None:
    assert sorted(names, key=group_order) == ["0", "2", "9", "10", "a1b", "f00"]
