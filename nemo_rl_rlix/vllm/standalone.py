"""A shard's worker without NeMo RL: requests in, answers out. For gates and benchmarks."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator
from typing import Any

from nemo_rl_rlix.errors import PartialGeneration
from nemo_rl_rlix.shards.requests import GenerationOutput, GenerationRequest
from nemo_rl_rlix.vllm.options import SETTINGS_KEY, ShardSettings
from nemo_rl_rlix.vllm.worker import AsyncShardWorkerMixin


class PlainWorker:
    """Owns an engine and nothing else.

    Args:
        config: ``engine``: keyword arguments of ``AsyncEngineArgs``, and the settings
            of the shard under :data:`~nemo_rl_rlix.vllm.options.SETTINGS_KEY`.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.cfg = config
        self.llm: Any = None

    def _load_model(self, bundle_indices: object, seed: object) -> None:
        self._create_engine(dict(self.cfg["engine"]))

    def _create_engine(self, llm_kwargs: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**llm_kwargs))

    async def post_init_async(self) -> None:
        """Nothing is left to do."""


class StandaloneShardWorker(AsyncShardWorkerMixin, PlainWorker):
    """The mixin over :class:`PlainWorker`.

    Args:
        engine: Keyword arguments of ``AsyncEngineArgs``.
        settings: Settings of the shard.
        extension_cls: Worker extension of the engine.
    """

    def __init__(
        self, engine: dict[str, Any], settings: ShardSettings, extension_cls: str = ""
    ) -> None:
        super().__init__({"engine": engine, SETTINGS_KEY: settings.to_config()})
        if extension_cls:
            self.rlix_extension_cls = extension_cls
        # So that the first build makes an engine: nothing does before it.
        self._rlix_place = (None, None)
        self._numbers = itertools.count()

    async def generate_stream(
        self, request: GenerationRequest
    ) -> AsyncIterator[PartialGeneration | GenerationOutput]:
        """Yield what there is after each output of the engine, and last the whole answer.

        Raises:
            ShardPreemptedError: The gate is closed, or the request was aborted.
        """
        from vllm import SamplingParams

        params = SamplingParams(
            max_tokens=request.max_new_tokens - len(request.prior.token_ids),
            temperature=request.temperature,
            stop_token_ids=list(request.stop_ids),
            seed=request.seed,
            logprobs=0,
            ignore_eos=True,
            detokenize=False,
        )
        prompt = {"prompt_token_ids": [*request.prompt_ids, *request.prior.token_ids]}
        number = next(self._numbers)
        last: Any = None
        with self._rlix().admit() as admitted:
            async for output in self.llm.generate(
                prompt=prompt,
                sampling_params=params,
                request_id=f"{request.request_id}-{number}",
            ):
                last = output
                yield admitted.records[0].partial()
            whole = admitted.records[0].partial()
        yield GenerationOutput(
            request_id=request.request_id,
            token_ids=whole.token_ids,
            logprobs=whole.logprobs,
            segments=whole.segments,
            finish_reason=str(last.outputs[0].finish_reason),
            dp_rank=self._rlix().dp_rank,
        )

    async def generate(self, request: GenerationRequest) -> GenerationOutput:
        """As :meth:`generate_stream`, the whole answer only."""
        answer: Any = None
        async for item in self.generate_stream(request):
            answer = item
        assert isinstance(answer, GenerationOutput), "a stream ends with the answer or an error"
        return answer
