"""Keys and values of prompts, kept so that the next request need not compute them.

They belong to the weights that computed them: after an update they are stale, and
only :meth:`PrefixCache.reset` makes the engine forget them.
"""

from __future__ import annotations

from collections import Counter, OrderedDict

from torch import Tensor

Key = tuple[int, ...]


class PrefixCache:
    """Least recently used prompts, within a number of bytes.

    Args:
        capacity_bytes: Bytes for keys and values; 0 turns the cache off.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity = capacity_bytes
        self._entries: OrderedDict[Key, Tensor] = OrderedDict()
        self._held: Counter[Key] = Counter()
        self._nbytes = 0
        self.hits = 0

    @property
    def nbytes(self) -> int:
        """Bytes in use."""
        return self._nbytes

    def hold(self, key: Key) -> Tensor | None:
        """Return the entry of ``key`` and keep it until :meth:`release`, if there is one."""
        stored = self._entries.get(key)
        if stored is None:
            return None
        self._entries.move_to_end(key)
        self._held[key] += 1
        self.hits += 1
        return stored

    def store(self, key: Key, stored: Tensor) -> bool:
        """Keep and hold an entry; ``False`` when held entries leave no room for it."""
        need = self._nbytes + stored.nbytes - self._capacity
        victims = []
        for candidate, tensor in self._entries.items():
            if need <= 0:
                break
            if not self._held[candidate]:
                victims.append(candidate)
                need -= tensor.nbytes
        if need > 0:
            return False
        for victim in victims:
            self._nbytes -= self._entries.pop(victim).nbytes
        self._entries[key] = stored
        self._held[key] += 1
        self._nbytes += stored.nbytes
        return True

    def release(self, key: Key) -> None:
        """Let go of what :meth:`hold` or :meth:`store` held."""
        self._held[key] -= 1
        if self._held[key] <= 0:
            del self._held[key]

    def reset(self) -> bool:
        """Forget everything; ``False``, and nothing is forgotten, while anything is held."""
        if self._held:
            return False
        self.drop()
        return True

    def drop(self) -> None:
        """Free every tensor, held or not: the memory goes away."""
        self._entries.clear()
        self._nbytes = 0
