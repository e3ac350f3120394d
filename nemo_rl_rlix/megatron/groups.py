"""Process groups whose communicators can be taken down while every handle stays valid.

Megatron, its optimizers, Megatron Bridge and NeMo RL keep references to groups in
hundreds of places (modules, collections, closures, conversion tasks), and a group
that is destroyed frees nothing while one of them is left (pytorch/pytorch#107298).
So the object that they all hold is never replaced. It is a shell around an inner
group that holds the backends; taking the group down drops the inner one, and rank,
size, name and torch's own books stay as they are.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroup

from nemo_rl_rlix.megatron.errors import GroupDownError, UnmanagedGroupError

_NCCL = getattr(dist, "ProcessGroupNCCL", None)  # absent from builds without CUDA
_GLOO = getattr(dist, "ProcessGroupGloo", None)


@dataclass(frozen=True)
class BackendRecipe:
    """What is needed to make one backend again.

    Attributes:
        kind: ``nccl``, ``gloo``, or the name of a type that cannot be re-created.
        backend_type: Its member of ``ProcessGroup.BackendType``.
        devices: Device types it serves.
        options: Its options; for gloo only the timeout is used.
    """

    kind: str
    backend_type: Any
    devices: tuple[torch.device, ...]
    options: Any

    @property
    def reloadable(self) -> bool:
        """Whether this module knows how to make it."""
        return self.kind in ("nccl", "gloo")

    def make(self, store: dist.Store, rank: int, size: int) -> Any:
        """Make the backend anew; no communicator exists before its first collective."""
        backend: Any
        if self.kind == "nccl" and _NCCL is not None:
            self.options.split_from = None  # the parent it was split from is gone
            backend = _NCCL(store, rank, size, self.options)
        elif self.kind == "gloo" and _GLOO is not None:
            backend = _GLOO(store, rank, size, timeout=self.options)
        else:
            raise UnmanagedGroupError([f"backend {self.kind}"])
        backend._set_sequence_number_for_group()
        return backend


def _recipe_of(device: torch.device, backend_type: Any, backend: Any) -> BackendRecipe:
    if _NCCL is not None and type(backend) is _NCCL:
        return BackendRecipe("nccl", backend_type, (device,), backend.options)
    if _GLOO is not None and type(backend) is _GLOO:
        timeout = backend.options._timeout
        return BackendRecipe("gloo", backend_type, (device,), timeout)
    return BackendRecipe(type(backend).__name__, backend_type, (device,), None)


class ReloadableGroup(ProcessGroup):
    """A process group that can be taken down and brought up again in place.

    Made by torch itself in place of its own class, see :mod:`.install`.

    Args:
        store: Store with the group's own prefix.
        rank: Rank in the group.
        size: Number of ranks in the group.
    """

    def __init__(self, store: dist.Store, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # the form a subclass can use
        self._base_store = store
        self._inner: ProcessGroup | None = None
        self._ending: ProcessGroup | None = None
        self._recipes: list[BackendRecipe] = []
        self._default_type: Any = None
        self._names: dict[str, Any] = {"group_name": "", "group_desc": "undefined"}
        self._backend_name = "undefined"

    # What torch's constructor code calls.

    def _set_default_backend(self, backend_type: Any) -> None:
        self._default_type = backend_type

    def _register_backend(self, device: torch.device, backend_type: Any, backend: Any) -> None:
        inner = self._inner or self._new_inner(self._base_store)
        self._inner = inner
        inner._register_backend(device, backend_type, backend)
        new = _recipe_of(device, backend_type, backend)
        for index, old in enumerate(self._recipes):
            if old.backend_type == backend_type:  # one backend that serves several devices
                devices = (*old.devices, device)
                self._recipes[index] = BackendRecipe(old.kind, backend_type, devices, old.options)
                return
        self._recipes.append(new)

    def _set_group_name(self, name: Any) -> None:
        self._names["group_name"] = name
        if self._inner is not None:
            self._inner._set_group_name(name)
            self._backend_name = self._inner.name()

    def _set_group_desc(self, desc: str) -> None:
        self._names["group_desc"] = desc
        if self._inner is not None:
            self._inner._set_group_desc(desc)

    # What stays known while the group is down.

    @property
    def group_name(self) -> Any:
        """Name, unique in the world and equal on all ranks."""
        return self._names["group_name"]

    @property
    def group_desc(self) -> str:
        """Description, e.g. ``TENSOR_MODEL_PARALLEL_GROUP``."""
        return self._names["group_desc"]

    @property
    def _device_types(self) -> list[torch.device]:
        return [device for recipe in self._recipes for device in recipe.devices]

    def getGroupName(self) -> str:  # asked for by C++
        """Name, for C++."""
        return self.group_name

    def getGroupDesc(self) -> str:  # asked for by C++
        """Description, for C++."""
        return self.group_desc

    def getBackendName(self) -> str:  # asked for by C++
        """Backend, for C++."""
        return self._backend_name

    def name(self) -> str:
        """Name of the backend."""
        return self._backend_name

    def get_group_store(self) -> dist.Store:
        """The group's store."""
        return self._base_store

    def __deepcopy__(self, memo: dict[int, object]) -> ReloadableGroup:
        """A handle: a copied configuration refers to the same group."""
        return self

    # Taking down and bringing up.

    @property
    def is_up(self) -> bool:
        """Whether collectives may be called."""
        return self._inner is not None

    @property
    def has_communicator(self) -> bool:
        """Whether it holds one. NCCL makes one at the first collective, gloo at once."""
        inner = self._inner
        return inner is not None and any(
            recipe.kind != "nccl" or inner._get_backend(recipe.devices[0])._is_initialized()  # type: ignore[attr-defined]
            for recipe in self._recipes
        )

    @property
    def recipes(self) -> tuple[BackendRecipe, ...]:
        """How its backends are made."""
        return tuple(self._recipes)

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of its backends, e.g. ``{"nccl"}``."""
        return frozenset(recipe.kind for recipe in self._recipes)

    @property
    def label(self) -> str:
        """Description and name, for messages."""
        return f"{self.group_desc}[{self.group_name}]"

    def take_down(self, *, abort: bool = False) -> None:
        """Free the communicators. Every rank of the group has to, a no-op when down.

        Args:
            abort: Do not wait for the other ranks. Also ends a call without it that is
                stuck on another thread because a rank is dead.
        """
        inner = self._inner or self._ending
        self._inner, self._ending = None, inner
        if inner is None:
            return
        for recipe in self._recipes:
            if recipe.kind == "nccl":
                backend = inner._get_backend(recipe.devices[0])
                (backend.abort if abort else backend.shutdown)()
        self._ending = None

    def bring_up(self, generation: int) -> None:
        """Make the backends anew, a no-op when up.

        Args:
            generation: Number that was never used before and is equal on all ranks; a
                store prefix of its own keeps this rendezvous apart from earlier ones
                (pytorch/pytorch#74666).
        """
        if self._inner is not None:
            return
        self._ending = None
        store = PrefixStore(f"rlix-generation-{generation}/", self._base_store)
        inner = self._new_inner(store)
        for recipe in self._recipes:
            prefix = PrefixStore(f"{recipe.devices[0]}/", store)
            backend = recipe.make(prefix, self.rank(), self.size())
            for device in recipe.devices:
                inner._register_backend(device, recipe.backend_type, backend)
        inner._set_group_name(self.group_name)
        inner._set_group_desc(self.group_desc)
        self._inner = inner

    def _new_inner(self, store: dist.Store) -> ProcessGroup:
        inner = ProcessGroup(store, self.rank(), self.size())
        if self._default_type is not None:
            inner._set_default_backend(self._default_type)
        if self.bound_device_id is not None:
            inner.bound_device_id = self.bound_device_id
        return inner

    # What torch calls while it takes a group out of its books, possibly when down.

    def shutdown(self) -> None:
        """End for good, as ``destroy_process_group`` does."""
        self.take_down()

    def abort(self) -> None:
        """End for good without waiting for other ranks."""
        self.take_down(abort=True)

    def _has_hooks(self) -> bool:
        return self._inner is not None and self._inner._has_hooks()

    def _wait_for_pending_works(self) -> None:
        if self._inner is not None:
            self._inner._wait_for_pending_works()


def _forwarder(name: str) -> Callable[..., Any]:
    def call(self: ReloadableGroup, *args: Any, **kwargs: Any) -> Any:
        inner = self._inner
        if inner is None:
            raise GroupDownError(self.label, name)
        return getattr(inner, name)(*args, **kwargs)

    call.__name__ = name
    return call


# Known without a communicator, or about the shell itself.
_OF_THE_SHELL = frozenset({"rank", "size", "boxed", "unbox", "_pybind11_conduit_v1_"})


def _forward_the_rest() -> None:
    """Forward every other method of this torch's process group to the inner one."""
    for name, member in vars(ProcessGroup).items():
        is_method = callable(member) and not isinstance(member, type | property)
        internal = name.startswith("__") or name in _OF_THE_SHELL
        if is_method and not internal and name not in vars(ReloadableGroup):
            setattr(ReloadableGroup, name, _forwarder(name))


_forward_the_rest()


def group_order(name: str) -> tuple[int, int, str]:
    """Sort key of group names that is equal on all ranks.

    torch counts groups over the whole world, members or not; groups that were made
    by their members alone have a hash for a name.
    """
    return (0, int(name), "") if name.isdigit() else (1, 0, name)


def timeout_of(seconds: float) -> datetime.timedelta:
    """Seconds as torch wants them."""
    return datetime.timedelta(seconds=seconds)
