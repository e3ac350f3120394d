"""An asyncio stand-in for vLLM's AsyncLLM, true to the ways in which that one fails.

It keeps a waiting and a running table under internal ids, counts gauges only on a
step, maps memory by tag, crashes when it steps on a tag that is not mapped, and
ends an aborted request as an ordinary output with finish reason "abort".

The toy model is greedy and every token depends on all weights, on a buffer that
no checkpoint holds, and on the cached keys of every earlier position: stale weights,
a stale prefix cache and discarded weights all show in the tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from nemo_rl_rlix.shards.protocol import KV_CACHE_TAG, MEMORY_TAGS, WEIGHTS_TAG

VOCABULARY = 97
WEIGHT_NAMES = ("embed", "head", "rope_buffer")
DISCARDED = -999_983
TAG_BYTES = {WEIGHTS_TAG: 6_000_000, KV_CACHE_TAG: 3_000_000}
RESIDUE_BYTES = 100_000


class EngineDeadError(Exception):
    """The engine has crashed; nothing it holds can be had any more."""


def weights_of(version: int, names: Iterable[str] = WEIGHT_NAMES) -> dict[str, int]:
    """What a complete sync of ``version`` leaves in the engine."""
    return {name: version * 7919 + 31 * place + 11 for place, name in enumerate(sorted(names))}


def key_of(weights: dict[str, int], position: int, token: int) -> int:
    """Cached key of one position; it stays what it was when the weights change."""
    return (weights["embed"] * (token + 3) + weights["rope_buffer"] * (position + 1)) % 1_000_003


def next_token(weights: dict[str, int], keys: Sequence[int]) -> int:
    """Greedy choice after the positions whose keys are given."""
    return (weights["head"] * 17 + sum(keys)) * 2_654_435_761 // 7 % VOCABULARY


def reference_tokens(
    version: int, prompt_ids: Sequence[int], count: int, stop_ids: Sequence[int] = ()
) -> tuple[int, ...]:
    """What an undisturbed engine with the weights of ``version`` answers."""
    weights, sequence = weights_of(version), list(prompt_ids)
    keys = [key_of(weights, place, token) for place, token in enumerate(sequence)]
    for _ in range(count):
        token = next_token(weights, keys)
        keys.append(key_of(weights, len(sequence), token))
        sequence.append(token)
        if token in stop_ids:
            break
    return tuple(sequence[len(prompt_ids) :])


@dataclass(frozen=True)
class EngineOutput:
    """How a request ended; an abort looks like any other end.

    Attributes:
        token_ids: New tokens.
        stamps: Value of :attr:`FakeEngine.stamp` at each token.
        finish_reason: ``stop``, ``length`` or ``abort``.
    """

    token_ids: tuple[int, ...]
    stamps: tuple[int, ...]
    finish_reason: str


@dataclass
class _Sequence:
    external_id: str
    prompt: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    done: asyncio.Future[EngineOutput]
    new_tokens: list[int] = field(default_factory=list)
    stamps: list[int] = field(default_factory=list)
    keys: list[int] = field(default_factory=list)

    def output(self, reason: str) -> EngineOutput:
        return EngineOutput(tuple(self.new_tokens), tuple(self.stamps), reason)


class FakeEngine:
    """See the module. Lives on one event loop; it starts asleep at level 2, paused.

    Args:
        admission_delay_s: Time that a request is preprocessed before any table
            knows of it, in seconds.
        step_s: Length of one step, in seconds.
        names: Names of its parameters and buffers.
    """

    def __init__(
        self,
        *,
        admission_delay_s: float = 0.0,
        step_s: float = 0.001,
        names: Iterable[str] = WEIGHT_NAMES,
    ) -> None:
        self.admission_delay_s = admission_delay_s
        self.step_s = step_s
        self.weights = dict.fromkeys(names, DISCARDED)
        self.waiting: dict[str, _Sequence] = {}
        self.running: dict[str, _Sequence] = {}
        self.preprocessing = 0
        self.mapped: set[str] = set()
        self.paused = True
        self.crashed = ""
        self.violation = ""
        self.gauge_running = 0
        self.steps = 0
        self.stamp = -1
        self.freed_share = 1.0
        self.freeze_gauge = False
        self._saved: dict[str, int] = {}
        self._prefixes: dict[tuple[int, ...], int] = {}
        self._kept_bytes = RESIDUE_BYTES
        self._stepping = False
        self._numbers = itertools.count()
        self._wake_up = asyncio.Event()
        self._loop_task = asyncio.get_running_loop().create_task(self._run())

    @property
    def asleep(self) -> bool:
        return not self.mapped

    @property
    def held_bytes(self) -> int:
        return self._kept_bytes + sum(TAG_BYTES[tag] for tag in self.mapped)

    def internal_ids(self) -> list[str]:
        """Ids of every request in a table; preprocessed ones are in none."""
        return [*self.waiting, *self.running]

    async def generate(
        self,
        external_id: str,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int] = (),
    ) -> EngineOutput:
        """Answer a prompt. A sleeping or paused engine takes it in and lets it wait."""
        self._check()
        self.preprocessing += 1
        try:
            await asyncio.sleep(self.admission_delay_s)
        finally:
            self.preprocessing -= 1
        self._check()
        done: asyncio.Future[EngineOutput] = asyncio.get_running_loop().create_future()
        internal = f"{external_id}-{next(self._numbers):08x}"
        self.waiting[internal] = _Sequence(
            external_id, tuple(prompt), max_new_tokens, tuple(stop_ids), done
        )
        self._wake_up.set()
        try:
            return await done
        finally:
            self.waiting.pop(internal, None)
            self.running.pop(internal, None)

    async def abort(self, ids: Sequence[str], *, internal: bool = False) -> None:
        """End requests. Ids of the other kind match nothing, and nobody is told."""
        self._check()
        for number, sequence in [*self.waiting.items(), *self.running.items()]:
            if (number if internal else sequence.external_id) in ids:
                self._finish(number, sequence, "abort")
                if self.mapped != set(MEMORY_TAGS):
                    self._crash("an abort made it step on unmapped memory")

    async def pause(self, mode: str, *, clear_cache: bool = False) -> None:
        """Stop scheduling; on return no step is under way.

        ``abort`` ends what the tables hold now, ``keep`` freezes it.
        """
        self._check()
        self.paused = True
        while self._stepping:
            await asyncio.sleep(self.step_s / 4)
        self._check()
        if mode == "abort":
            await self.abort(self.internal_ids(), internal=True)
        elif clear_cache:
            self._prefixes.clear()
            for sequence in self.running.values():
                sequence.keys.clear()

    def resume(self) -> None:
        self._check()
        self.paused = False
        self._wake_up.set()

    def sleep(self, level: int) -> None:
        """Unmap everything at once, whether a step is under way or not."""
        self._check()
        if not self.mapped:
            return
        self._kept_bytes = RESIDUE_BYTES + int(
            (1 - self.freed_share) * sum(TAG_BYTES[tag] for tag in self.mapped)
        )
        self._saved = dict(self.weights) if level == 1 else {}
        self.weights = dict.fromkeys(self.weights, DISCARDED)
        self.mapped.clear()
        self.paused = True

    def wake(self, tags: Iterable[str]) -> None:
        """Map tags. Scheduling starts again by itself once all are mapped."""
        self._check()
        slept = self.mapped != set(MEMORY_TAGS)
        for tag in tags:
            if tag == WEIGHTS_TAG and tag not in self.mapped:
                self.weights.update(self._saved)
            self.mapped.add(tag)
        self._kept_bytes = RESIDUE_BYTES
        if slept and self.mapped == set(MEMORY_TAGS):
            self.resume()

    def load(self, new: dict[str, int]) -> frozenset[str]:
        """Write the tensors that the engine has; returns the names that were sent."""
        self._check()
        if WEIGHTS_TAG not in self.mapped:
            self._crash("weights were written to unmapped memory")
        for name in new.keys() & self.weights.keys():
            self.weights[name] = new[name]
        return frozenset(new)

    def reset_prefix_cache(self) -> bool:
        """Forget prefixes, unless running requests hold their blocks."""
        self._check()
        if any(sequence.keys for sequence in self.running.values()):
            return False
        self._prefixes.clear()
        return True

    def stop(self, cause: str) -> None:
        """End the engine at once; what it was asked ends with an error."""
        self.crashed = self.crashed or cause
        self._loop_task.cancel()
        for sequence in [*self.waiting.values(), *self.running.values()]:
            if not sequence.done.done():
                sequence.done.set_exception(EngineDeadError(cause))

    def _check(self) -> None:
        if self.crashed:
            raise EngineDeadError(self.crashed)

    def _crash(self, cause: str) -> None:
        self.violation = cause
        self.stop(cause)
        raise EngineDeadError(cause)

    async def _run(self) -> None:
        with contextlib.suppress(EngineDeadError):  # its requests have been told
            while True:
                if self.paused or not (self.waiting or self.running):
                    self._wake_up.clear()
                    await self._wake_up.wait()
                else:
                    await self._step()

    async def _step(self) -> None:
        self._stepping = True
        try:
            self._touch()
            self.running |= self.waiting
            self.waiting.clear()
            await asyncio.sleep(self.step_s)
            self._touch()
            for number, sequence in list(self.running.items()):
                self._advance(number, sequence)
            self.steps += 1
            if not self.freeze_gauge:
                self.gauge_running = len(self.running)
        finally:
            self._stepping = False

    def _touch(self) -> None:
        if self.mapped != set(MEMORY_TAGS):
            self._crash(f"it stepped with only {sorted(self.mapped)} mapped")

    def _advance(self, number: str, sequence: _Sequence) -> None:
        tokens = (*sequence.prompt, *sequence.new_tokens)
        for place in range(len(sequence.keys), len(tokens)):
            prefix = tokens[: place + 1]
            if prefix not in self._prefixes:
                self._prefixes[prefix] = key_of(self.weights, place, tokens[place])
            sequence.keys.append(self._prefixes[prefix])
        sequence.new_tokens.append(next_token(self.weights, sequence.keys))
        sequence.stamps.append(self.stamp)
        if sequence.new_tokens[-1] in sequence.stop_ids:
            self._finish(number, sequence, "stop")
        elif len(sequence.new_tokens) >= sequence.max_new_tokens:
            self._finish(number, sequence, "length")

    def _finish(self, number: str, sequence: _Sequence, reason: str) -> None:
        self.waiting.pop(number, None)
        self.running.pop(number, None)
        if not sequence.done.done():
            sequence.done.set_result(sequence.output(reason))
