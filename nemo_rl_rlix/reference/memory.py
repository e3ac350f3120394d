"""Device memory of an engine, mapped and unmapped by tag.

Level 1 keeps a host copy of the weights. Level 2 discards them and keeps only the
buffers, which no weight transfer brings back (vLLM does the same). What was
discarded comes back as NaN, so that output from weights that were never synced
shows at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.reference.device import LogicalGpu, tensor_bytes
from nemo_rl_rlix.reference.model import KVCache, ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.prefix import PrefixCache
from nemo_rl_rlix.shards.protocol import KV_CACHE_TAG, MEMORY_TAGS, WEIGHTS_TAG

PREFIX_LABEL = "prefix_cache"


class UnmappedMemoryError(RLixError):
    """The engine touched memory that a sleep had unmapped; on a device, a crash."""

    def __init__(self, act: str, tags: Collection[str]) -> None:
        super().__init__(f"{act} on unmapped memory {sorted(tags)}: the engine is dead")
        self.act = act
        self.tags = tuple(sorted(tags))


class DeviceAccount:
    """What an engine does to its logical GPU; without one, nothing is charged.

    Args:
        gpu: The logical GPU, or ``None``.
        owner: Name that must hold the grant while the engine computes.
        resident: Name under which memory is charged.
    """

    def __init__(self, gpu: LogicalGpu | None, owner: str, resident: str) -> None:
        self.gpu, self.owner, self.resident = gpu, owner, resident

    def charge(self, label: str, nbytes: int) -> None:
        """Set the bytes held under ``label``."""
        if self.gpu is not None:
            self.gpu.charge(self.resident, label, nbytes)

    def compute(self, what: str, at_least_s: float = 0.0) -> AbstractContextManager[None]:
        """Context in which the device computes; the grant is checked, the pace kept."""
        if self.gpu is None:
            return nullcontext()
        return self.gpu.compute(self.owner, what, at_least_s)

    def held_bytes(self) -> int:
        """Bytes of the device that are charged now."""
        return 0 if self.gpu is None else self.gpu.held_bytes(self.resident)


class EngineMemory:
    """Weights, KV cache and prefix cache, each on the device only while mapped."""

    def __init__(
        self,
        config: ModelConfig,
        *,
        slots: int,
        prefix_bytes: int,
        account: DeviceAccount,
        seed: int,
        make_model: Callable[..., ReferenceModel] = ReferenceModel,
    ) -> None:
        self._config, self._slots, self._prefix_bytes = config, slots, prefix_bytes
        self._account = account
        self.model = make_model(config, seed=seed).requires_grad_(False)
        self._tensors: dict[str, Tensor] = {
            **dict(self.model.named_parameters()),
            **dict(self.model.named_buffers()),
        }
        self._buffers = frozenset(name for name, _ in self.model.named_buffers())
        self._shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        self._weight_bytes = tensor_bytes(self._tensors.values())
        self._host: dict[str, Tensor] = {}
        account.charge(WEIGHTS_TAG, self._weight_bytes)
        self.prefixes = PrefixCache(prefix_bytes)
        self.cache: KVCache | None = None
        self._map_cache()
        self.mapped: frozenset[str] = frozenset(MEMORY_TAGS)

    @property
    def host_bytes(self) -> int:
        """Host memory of the copies that a sleep made."""
        return tensor_bytes(self._host.values())

    @property
    def device_bytes(self) -> int:
        """Device memory that is really held, whatever the account says."""
        cache = self.cache.layers if self.cache is not None else []
        return tensor_bytes([*self._tensors.values(), *cache]) + self.prefixes.nbytes

    def require(self, act: str, tags: Collection[str]) -> None:
        """Check that memory is mapped.

        Raises:
            UnmappedMemoryError: Some tag is not.
        """
        missing = frozenset(tags) - self.mapped
        if missing:
            raise UnmappedMemoryError(act, missing)

    def unmap(self, level: int) -> None:
        """Free both tags. A no-op on what is unmapped already.

        Args:
            level: 1 or 2, see the module.
        """
        if WEIGHTS_TAG in self.mapped:
            kept = self._tensors if level == 1 else self._buffers
            self._host = {name: self._tensors[name].detach().clone() for name in kept}
            for tensor in self._tensors.values():
                tensor.data = torch.empty(0)
            self._account.charge(WEIGHTS_TAG, 0)
        if KV_CACHE_TAG in self.mapped:
            self.cache = None
            self.prefixes.drop()
            self._account.charge(KV_CACHE_TAG, 0)
            self._account.charge(PREFIX_LABEL, 0)
        self.mapped = frozenset()

    def map(self, tag: str) -> None:
        """Allocate one tag again; a no-op when it is mapped.

        Raises:
            DeviceOutOfMemoryError: The GPU is full; the tag stays unmapped.
        """
        if tag in self.mapped:
            return
        if tag == WEIGHTS_TAG:
            self._account.charge(WEIGHTS_TAG, self._weight_bytes)
            for name, tensor in self._tensors.items():
                kept = self._host.pop(name, None)
                tensor.data = torch.full(self._shapes[name], math.nan) if kept is None else kept
        else:
            self._map_cache()
        self.mapped = self.mapped | {tag}

    def _map_cache(self) -> None:
        self._account.charge(KV_CACHE_TAG, KVCache.nbytes(self._config, self._slots))
        try:
            # The pool for prefixes is taken whole, as engines do with their blocks.
            self._account.charge(PREFIX_LABEL, self._prefix_bytes)
        except RLixError:
            self._account.charge(KV_CACHE_TAG, 0)
            raise
        self.cache = KVCache(self._config, self._slots)
