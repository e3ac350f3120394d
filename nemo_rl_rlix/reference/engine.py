"""A continuous-batching engine, token by token, with the manners of a real one.

Its ids differ from the callers'; an aborted request ends as an ordinary output; a
step on unmapped memory kills it; its prefix cache outlives a weight update unless
it is reset. It belongs to one thread: nothing here is locked.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

import torch
from torch import Tensor

from nemo_rl_rlix.errors import PartialGeneration, RLixError
from nemo_rl_rlix.reference.batch import Batch, Sequence
from nemo_rl_rlix.reference.memory import DeviceAccount, EngineMemory
from nemo_rl_rlix.reference.model import ModelConfig
from nemo_rl_rlix.shards.protocol import MEMORY_TAGS, WEIGHTS_TAG
from nemo_rl_rlix.shards.requests import GenerationRequest

ABORT = "abort"


@dataclass(frozen=True)
class EngineConfig:
    """Size of an engine.

    Attributes:
        model: Size of the model.
        max_num_seqs: Most sequences that run at once; others wait.
        prefix_cache_bytes: Bytes for prompts' keys and values; 0 turns it off.
        seed: Seed of the initial weights, and of requests that bring none.
        step_s: Least seconds that a step occupies the logical GPU. Where cores are
            threads of one core, a busy neighbour slows a step; a device's does not.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    max_num_seqs: int = 16
    prefix_cache_bytes: int = 4 * 1024 * 1024
    seed: int = 0
    step_s: float = 0.0


class EngineState(StrEnum):
    """Whether the engine steps."""

    RUNNING = "running"
    PAUSED = "paused"
    DEAD = "dead"


class PauseMode(StrEnum):
    """What a pause does to the requests in the table."""

    ABORT = "abort"
    KEEP = "keep"


class EngineDeadError(RLixError):
    """The engine crashed; its process must be ended."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"the engine is dead: {cause}")
        self.cause = cause


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """The end of a request.

    Attributes:
        internal_id: The engine's id of it.
        request_id: The caller's id of it.
        generation: Tokens of this dispatch.
        finish_reason: ``stop``, ``length`` or ``abort``.
    """

    internal_id: str
    request_id: str
    generation: PartialGeneration
    finish_reason: str


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One token of a streamed request."""

    internal_id: str
    token_id: int
    logprob: float
    weights_version: int


class ContinuousBatchingEngine:
    """Serves requests over one model.

    Args:
        config: Sizes and seed.
        account: The logical GPU it lives on; without one nothing is charged.
    """

    def __init__(self, config: EngineConfig, account: DeviceAccount | None = None) -> None:
        self.config = config
        self._account = account or DeviceAccount(None, "engine", "engine")
        self.memory = EngineMemory(
            config.model,
            slots=config.max_num_seqs,
            prefix_bytes=config.prefix_cache_bytes,
            account=self._account,
            seed=config.seed,
        )
        self.state = EngineState.RUNNING
        self.weights_version = -1
        self.weights_discarded = False
        self.pause_epoch = 0
        self.steps = 0
        self.running_gauge = 0
        """Running requests as of the last step: the metric that no decision may rest on."""
        self._cause = ""
        self._synced: set[str] = set()
        self._waiting: deque[Sequence] = deque()
        self._batch = Batch(config.model, config.max_num_seqs)
        self._outputs: list[EngineOutput | TokenDelta] = []
        self._ids = count()
        self._seeds = torch.Generator().manual_seed(config.seed)

    # -- requests -------------------------------------------------------------

    def add(self, request: GenerationRequest, *, stream: bool = False) -> str:
        """Put a request in the table; returns its internal id.

        A paused or sleeping engine accepts it too, and runs it when it can.

        Raises:
            ValueError: The request can never run.
        """
        self.check_alive()
        seed = request.seed
        if seed is None:
            seed = int(torch.randint(2**62, (1,), generator=self._seeds))
        sequence = Sequence(f"{request.request_id}#{next(self._ids):x}", request, seed, stream)
        vocab = self.config.model.vocab_size
        if not request.prompt_ids or not all(0 <= token < vocab for token in sequence.known):
            raise ValueError(
                f"request {request.request_id}: prompt and prior must be 1 or more tokens"
                f" below {vocab}"
            )
        if sequence.length > self.config.model.max_len:
            raise ValueError(
                f"request {request.request_id}: {sequence.length} tokens do not fit into"
                f" max_len={self.config.model.max_len}; shorten the prompt"
            )
        if request.temperature < 0:
            raise ValueError(f"request {request.request_id}: temperature must be 0 or more")
        if reason := sequence.finish_reason(self.config.model.max_len):
            self._finish(sequence, reason)
        else:
            self._waiting.append(sequence)
        return sequence.internal_id

    def request_ids(self) -> tuple[str, ...]:
        """Internal ids of every request in the table, running or waiting."""
        # Copies first: the drain reads the table from another thread.
        return tuple(s.internal_id for s in (*list(self._batch.sequences), *list(self._waiting)))

    def abort(self, internal_ids: Collection[str]) -> int:
        """End requests with finish reason ``abort`` and what they have; returns how many.

        Ids that the engine does not know are ignored, callers' ids among them.

        Raises:
            UnmappedMemoryError: The engine sleeps; the step that ends them crashes it.
        """
        self.check_alive()
        wanted = frozenset(internal_ids)
        doomed = [
            sequence
            for sequence in (*self._batch.sequences, *self._waiting)
            if sequence.internal_id in wanted
        ]
        if doomed:
            self._require("abort", MEMORY_TAGS)
        for sequence in doomed:
            if sequence in self._batch.sequences:
                self._leave(sequence)
            else:
                self._waiting.remove(sequence)
            self._finish(sequence, ABORT)
        return len(doomed)

    def take_outputs(self) -> list[EngineOutput | TokenDelta]:
        """What ended, or was sampled for a stream, since the last call."""
        taken, self._outputs = self._outputs, []
        return taken

    # -- stepping -------------------------------------------------------------

    @property
    def has_work(self) -> bool:
        """Whether :meth:`step` would do something."""
        return self.state is EngineState.RUNNING and bool(self._waiting or self._batch.sequences)

    def step(self) -> bool:
        """Admit what fits and sample one token for every running request.

        Returns:
            ``False`` when there was nothing to do.

        Raises:
            UnmappedMemoryError: Memory is unmapped; the engine is dead.
            GrantRequiredError: The GPU is not granted; the engine is dead.
        """
        self.check_alive()
        if not self.has_work:
            return False
        self._require("step", MEMORY_TAGS)
        try:
            with (
                self._account.compute("engine step", self.config.step_s),
                torch.inference_mode(),
            ):
                self._admit()
                self._advance()
        except Exception as error:
            self._die(error)
            raise
        return True

    def _admit(self) -> None:
        assert self.memory.cache is not None
        while self._waiting and not self._batch.full:
            sequence = self._waiting.popleft()
            slot = self._batch.add(sequence)
            self._prefill(sequence, slot)

    def _prefill(self, sequence: Sequence, slot: int) -> None:
        """Fill the cache for all but the newest token, which the next decode feeds."""
        memory, cache = self.memory, self.memory.cache
        assert cache is not None
        known = sequence.known
        key = sequence.request.prompt_ids[:-1]
        start = 0
        if key:
            stored = memory.prefixes.hold(key)
            if stored is None:
                memory.model.prefill(torch.tensor(key), 0, slot, cache)
                if memory.prefixes.store(key, cache.extract(slot, len(key))):
                    sequence.prefix = key
            else:
                cache.insert(slot, stored)
                sequence.prefix = key
            start = len(key)
        if start < len(known) - 1:
            memory.model.prefill(torch.tensor(known[start:-1]), start, slot, cache)

    def _advance(self) -> None:
        assert self.memory.cache is not None
        running = list(self._batch.sequences)
        tokens, logprobs = self._batch.advance(self.memory.model, self.memory.cache)
        for sequence, token, logprob in zip(running, tokens, logprobs, strict=True):
            sequence.append(token, logprob, self.weights_version)
            if sequence.stream:
                self._outputs.append(
                    TokenDelta(sequence.internal_id, token, logprob, self.weights_version)
                )
            if reason := sequence.finish_reason(self.config.model.max_len):
                self._leave(sequence)
                self._finish(sequence, reason)
        self.steps += 1
        self.running_gauge = len(running)

    def _leave(self, sequence: Sequence) -> None:
        self._batch.remove(sequence, self.memory.cache)
        if sequence.prefix is not None:
            self.memory.prefixes.release(sequence.prefix)
            sequence.prefix = None

    def _finish(self, sequence: Sequence, reason: str) -> None:
        self._outputs.append(
            EngineOutput(
                sequence.internal_id, sequence.request.request_id, sequence.partial(), reason
            )
        )

    # -- pause, sleep, wake ---------------------------------------------------

    def pause(self, mode: PauseMode, *, clear_cache: bool = False) -> int:
        """Stop stepping; requests that come now wait. Returns the epoch of the pause.

        Args:
            mode: ``abort`` ends every request in the table, ``keep`` freezes it.
            clear_cache: Compute the running requests' keys and values again on
                resume, and forget cached prefixes.
        """
        self.check_alive()
        self.state = EngineState.PAUSED
        self.pause_epoch += 1
        if mode is PauseMode.ABORT:
            self.abort(self.request_ids())
        elif clear_cache:
            running = list(self._batch.sequences)
            for sequence in running:
                self._leave(sequence)
            self._waiting.extendleft(reversed(running))
            self.memory.prefixes.reset()
        return self.pause_epoch

    def resume(self, pause_epoch: int | None = None) -> bool:
        """Step again.

        Args:
            pause_epoch: Only if this pause is the last one and all memory is mapped.

        Returns:
            Whether the engine steps now.
        """
        self.check_alive()
        stale = pause_epoch is not None and pause_epoch != self.pause_epoch
        if stale or (pause_epoch is not None and self.memory.mapped != frozenset(MEMORY_TAGS)):
            return False
        self.state = EngineState.RUNNING
        return True

    def sleep(self, level: int) -> None:
        """Free the device memory and stay as paused as before; twice is a no-op.

        As with a real engine nothing is drained first: that is the caller's duty.
        """
        self.check_alive()
        if level not in (1, 2):
            raise ValueError(f"sleep level {level}: use 1 or 2")
        if level == 2 and WEIGHTS_TAG in self.memory.mapped:
            self.weights_discarded, self._synced = True, set()
        self.pause_epoch += 1
        self.memory.unmap(level)

    def wake(self, tags: Iterable[str] = MEMORY_TAGS) -> None:
        """Map ``tags``. A pause ends when every tag is mapped; waking twice is a no-op.

        Raises:
            ValueError: There is no such tag.
            DeviceOutOfMemoryError: The GPU is full; the tag stays unmapped.
        """
        self.check_alive()
        wanted = [*tags]
        if unknown := set(wanted) - set(MEMORY_TAGS):
            raise ValueError(f"memory tags {sorted(unknown)}: use {MEMORY_TAGS}")
        asleep = self.memory.mapped != frozenset(MEMORY_TAGS)
        with self._account.compute("wake"):
            for tag in wanted:
                self.memory.map(tag)
        if asleep and self.memory.mapped == frozenset(MEMORY_TAGS):
            self.state = EngineState.RUNNING

    @property
    def awake(self) -> bool:
        """Whether all memory is mapped."""
        return self.memory.mapped == frozenset(MEMORY_TAGS)

    # -- weights --------------------------------------------------------------

    def expected_names(self) -> frozenset[str]:
        """Names that a complete sync brings: parameters and persistent buffers, ties stored once."""
        return frozenset(self.memory.model.state_dict()) - frozenset(self.memory.model.ties())

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Write tensors into the model, in one call or several.

        Args:
            weights: Name and tensor. A tied name writes to the stored tensor.

        Returns:
            Stored names of what came. Names that the engine does not know are among
            them and were written nowhere, so that coverage can tell.

        Raises:
            UnmappedMemoryError: The weights are unmapped; the engine is dead.
            ValueError: A tensor has the wrong shape.
        """
        self.check_alive()
        self._require("load_weights", (WEIGHTS_TAG,))
        ties, targets = self.memory.model.ties(), self.memory.model.state_dict()
        came: set[str] = set()
        with self._account.compute("load weights"), torch.no_grad():
            for name, tensor in weights:
                stored = ties.get(name, name)
                came.add(stored)
                if stored not in targets:
                    continue
                if targets[stored].shape != tensor.shape:
                    raise ValueError(
                        f"{name} has shape {tuple(tensor.shape)}, the engine expects"
                        f" {tuple(targets[stored].shape)}: trainer and engine differ in size"
                    )
                targets[stored].copy_(tensor)
        self._synced |= came
        if self._synced >= self.expected_names():
            self.weights_discarded = False
        return came

    def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; ``False``, and none is forgotten, while a request holds one."""
        self.check_alive()
        return self.memory.prefixes.reset()

    # -- death ----------------------------------------------------------------

    def _require(self, act: str, tags: Collection[str]) -> None:
        try:
            self.memory.require(act, tags)
        except RLixError as error:
            self._die(error)
            raise

    def _die(self, error: Exception) -> None:
        self.state, self._cause = EngineState.DEAD, f"{type(error).__name__}: {error}"

    def check_alive(self) -> None:
        """Raise ``EngineDeadError`` after a crash."""
        if self.state is EngineState.DEAD:
            raise EngineDeadError(self._cause)
