"""The gate in front of an engine and what it does to requests, inside one worker process."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from nemo_rl_rlix.errors import ShardFailedError, ShardPreemptedError
from nemo_rl_rlix.shards.admission import AdmissionGate
from nemo_rl_rlix.vllm import compat
from nemo_rl_rlix.vllm.aborts import TokenRecord, raise_if_aborted
from nemo_rl_rlix.vllm.engine_control import EngineControl


@dataclass
class Admitted:
    """One caller behind the gate.

    Attributes:
        max_new_tokens: Most tokens it may still sample; ``None`` for no limit of its own.
        records: What each of its requests has sampled, in the order they were started.
    """

    max_new_tokens: int | None = None
    records: list[TokenRecord] = field(default_factory=list)


_CURRENT: ContextVar[Admitted | None] = ContextVar("rlix_admitted", default=None)


class Serving:
    """One engine and its gate. An instance stands for one shard over all its rebuilds.

    Args:
        dp_rank: Rank of the shard.
    """

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self.gate = AdmissionGate(dp_rank)
        self.control: EngineControl | None = None
        self._inside: dict[int, Admitted] = {}

    def bind(self, engine: Any, make: Callable[[AdmissionGate], EngineControl]) -> EngineControl:
        """Put the gate in front of an engine, in place of an earlier one.

        Args:
            engine: The ``AsyncLLM``; every request goes through its ``generate``.
            make: Makes the control.
        """
        compat.require(compat.ENGINE_SYMBOLS)
        control = make(self.gate)
        raw = engine.generate

        async def generate(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            async for output in self._generate(control, raw, args, kwargs):
                yield output

        engine.generate = generate
        self.control = control
        return control

    def require(self) -> EngineControl:
        """The control of a living engine.

        Raises:
            ShardFailedError: There is none.
        """
        if self.control is None or self.control.killed:
            raise ShardFailedError(self.dp_rank, "it has no engine; build it first")
        return self.control

    @contextlib.contextmanager
    def admit(self, max_new_tokens: int | None = None) -> Iterator[Admitted]:
        """Let one caller in.

        Raises:
            ShardPreemptedError: The gate is closed, or there is no living engine.
        """
        if self.control is None or self.control.dead:
            raise ShardPreemptedError(self.dp_rank, epoch=self.gate.epoch)
        with self.gate.enter():
            admitted = Admitted(max_new_tokens)
            # Not reset: the task that calls is this request's own.
            _CURRENT.set(admitted)
            self._inside[id(admitted)] = admitted
            try:
                yield admitted
            finally:
                del self._inside[id(admitted)]

    async def abort_all(self, *, timeout_s: float) -> int:
        """Abort the requests of everyone who is inside now; returns how many there were."""
        meant = dict(self._inside)  # keeps the objects, so that no id is used again

        def left() -> int:
            return len(meant.keys() & self._inside.keys())

        return await self.require().abort_all(left, timeout_s=timeout_s)

    def open(self, epoch: int, weights_version: int) -> None:
        """Accept requests.

        Raises:
            ShardFailedError: It sleeps, or does not hold that version completely.
        """
        control = self.require()
        cause = ""
        if control.dead:
            cause = "its engine has died"
        elif control.asleep:
            cause = "some of its memory is asleep"
        elif control.weights_version != weights_version:
            cause = f"it holds version {control.weights_version}, not {weights_version}"
        if cause:
            raise ShardFailedError(self.dp_rank, f"cannot serve: {cause}")
        self.gate.open(epoch, weights_version)

    async def _generate(
        self, control: EngineControl, raw: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        admitted = _CURRENT.get()
        if admitted is None:  # a way in that no method of the worker guards
            with self.admit() as entered:
                async for output in self._watch(control, raw, args, kwargs, entered):
                    yield output
            return
        async for output in self._watch(control, raw, args, kwargs, admitted):
            yield output

    async def _watch(
        self,
        control: EngineControl,
        raw: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        admitted: Admitted,
    ) -> AsyncIterator[Any]:
        record = TokenRecord()
        admitted.records.append(record)
        params = kwargs["sampling_params"] if "sampling_params" in kwargs else args[1]
        if admitted.max_new_tokens is not None and params.max_tokens is not None:
            params.max_tokens = min(params.max_tokens, admitted.max_new_tokens)
        delta = params.output_kind.name == "DELTA"
        try:
            async for output in raw(*args, **kwargs):
                record.observe(output.outputs[0], control.weights_version, delta=delta)
                raise_if_aborted(output, record, dp_rank=self.dp_rank, epoch=self.gate.epoch)
                yield output
        except compat.dead_error() as error:
            # Nothing is kept: what a dying engine said last is not to be trusted.
            raise ShardPreemptedError(self.dp_rank) from error
