"""The fake engine behind the interface of vLLM's AsyncLLM, worker extension included."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from fakes.engine import WEIGHT_NAMES, EngineDeadError, FakeEngine, weights_of

from nemo_rl_rlix.shards.protocol import MEMORY_TAGS
from nemo_rl_rlix.vllm.accounting import ProcessMemory
from nemo_rl_rlix.vllm.receive import WorkerReceive

__all__ = ["EngineDeadError", "FakeAsyncLLM"]


class _Table:
    """``output_processor``: states by internal id."""

    def __init__(self, fake: FakeEngine) -> None:
        self._fake = fake

    @property
    def request_states(self) -> dict[str, None]:
        return dict.fromkeys(self._fake.internal_ids())

    def propagate_error(self, error: Exception) -> None:
        for sequence in [*self._fake.waiting.values(), *self._fake.running.values()]:
            if not sequence.done.done():
                sequence.done.set_exception(error)


class FakeAsyncLLM:
    """Made on its event loop, awake and running.

    Args:
        resumes_early: Whether any wake lets it step, as before vLLM 0.25.
        options: Options of the fake engine.
    """

    def __init__(self, *, resumes_early: bool = False, **options: Any) -> None:
        self.fake = FakeEngine(**options)
        self.fake.wake(("weights", "kv_cache"))
        self.fake.load(weights_of(1))
        self.output_processor = _Table(self.fake)
        self.engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=None))
        self.resumes_early = resumes_early
        self.delay_s: dict[str, float] = {}
        self.aborted: list[tuple[tuple[str, ...], bool]] = []
        self.missing: frozenset[str] = frozenset()
        self.finalized = 0
        self.shut_down = False

    @property
    def errored(self) -> bool:
        return bool(self.fake.crashed)

    async def _late(self, act: str) -> None:
        await asyncio.sleep(self.delay_s.get(act, 0.0))

    async def generate(
        self, prompt: dict[str, Any], sampling_params: Any, request_id: str
    ) -> AsyncIterator[Any]:
        answer = await self.fake.generate(
            request_id, prompt["prompt_token_ids"], sampling_params.max_tokens
        )
        tokens = list(answer.token_ids)
        logprobs = [{token: SimpleNamespace(logprob=-0.5)} for token in tokens]
        yield SimpleNamespace(
            outputs=[
                SimpleNamespace(
                    token_ids=tokens, logprobs=logprobs, finish_reason=answer.finish_reason
                )
            ]
        )

    async def abort(self, request_id: list[str], internal: bool = False) -> None:
        await self._late("abort")
        self.aborted.append((tuple(request_id), internal))
        await self.fake.abort(request_id, internal=internal)

    async def pause_generation(self, *, mode: str, clear_cache: bool = True) -> None:
        await self._late("pause")
        await self.fake.pause(mode, clear_cache=clear_cache)

    async def resume_generation(self) -> None:
        self.fake.resume()

    async def is_paused(self) -> bool:
        return self.fake.paused

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        await self._late("sleep")
        self.fake.paused = True
        # Half awake, the executor counts as sleeping and does nothing.
        if not self.fake.asleep and self.fake.mapped != set(MEMORY_TAGS):
            return
        self.fake.sleep(level)

    async def wake_up(self, tags: list[str]) -> None:
        self.fake.wake(tags)
        if self.resumes_early:
            self.fake.paused = False

    async def reset_prefix_cache(self) -> bool:
        return self.fake.reset_prefix_cache()

    async def reset_mm_cache(self) -> None:
        pass

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[bytes, ...] = ()
    ) -> list[bytes]:
        await self._late(method)
        arguments = pickle.loads(args[0])
        return [pickle.dumps(getattr(self, f"_{method}")(*arguments))]

    def _rlix_ping(self) -> bool:
        self.fake._check()
        return True

    def _rlix_memory(self) -> ProcessMemory:
        self.fake._check()
        return ProcessMemory({}, frozenset(), 0, self.fake.held_bytes, self.fake.held_bytes)

    def _rlix_receive_shm(self, version: int, timeout_s: float) -> WorkerReceive:
        new = {n: w for n, w in weights_of(version).items() if n not in self.missing}
        loaded = self.fake.load(new)
        return WorkerReceive(version, loaded, frozenset(WEIGHT_NAMES), 8 * len(new), 0.0)

    def _rlix_finalize(self) -> bool:
        self.finalized += 1
        return True

    def shutdown(self) -> None:
        self.shut_down = True
        self.fake.stop("shut down")
