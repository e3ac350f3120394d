"""One request to one worker of NeMo RL: its stream, its errors, its cancellation."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayError

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.nemo_rl.failures import unavailable_error
from nemo_rl_rlix.ray_errors import Callee, unwrap

logger = logging.getLogger(__name__)

TIMEOUT_ENV = "NRL_VLLM_ASYNC_TIMEOUT_SECONDS"
"""NeMo RL's limit, in seconds, on the transfer of an answer."""

DEFAULT_TIMEOUT_S = 900.0


def answer_timeout_s() -> float:
    """NeMo RL's limit on the transfer of an answer, as the variable says now."""
    return float(os.environ.get(TIMEOUT_ENV, DEFAULT_TIMEOUT_S))


async def call_worker(
    worker_group: Any,
    dp_rank: int,
    method_name: str,
    *,
    data: Any,
    greedy: bool,
    timeout_s: float,
    on_silence: Callable[[], None],
) -> tuple[int, Any]:
    """Have the leader of a shard answer a request of one sample.

    No clock ends the generation itself, as none does in NeMo RL: a shard that is taken
    or dies ends it, so a shard that says nothing for long is looked after.

    Args:
        worker_group: NeMo RL's ``RayWorkerGroup``.
        dp_rank: The shard.
        method_name: ``generate_async`` or ``generate_text_async``.
        data: The request.
        greedy: Whether the most probable token is taken.
        timeout_s: Limit of the transfer of the answer; also how long a shard may be
            silent before ``on_silence`` is called, again and again.
        on_silence: Has the shard looked after; returns at once.

    Returns:
        Index of the sample, always 0, and the answer.

    Raises:
        ShardPreemptedError: The shard was taken.
        ShardFailedError: Its process is gone.
        Exception: ``GenerationUnavailable`` (``RuntimeError`` in v0.7.0) for every other
            failure, as NeMo RL reports it.
    """
    worker_idx = worker_group.get_dp_leader_worker_idx(dp_rank)
    stream = worker_group.run_single_worker_single_data(
        method_name=method_name, worker_idx=worker_idx, data=data, greedy=greedy
    )
    try:
        ref = await _first(stream, dp_rank, timeout_s, on_silence)
        index, answer = await asyncio.wait_for(ref, timeout=timeout_s)
    except TimeoutError as error:
        ray.cancel(stream)
        raise unavailable_error()(
            f"the answer of shard {dp_rank} (worker {worker_idx}) did not arrive within"
            f" {timeout_s:g} s. For longer sequences set {TIMEOUT_ENV}={timeout_s * 2:g}"
        ) from error
    except RayError as error:
        typed = unwrap(error, Callee(f"{method_name} of shard {dp_rank}", dp_rank, timeout_s))
        if isinstance(typed, RLixError):
            raise typed from error
        raise unavailable_error()(
            f"shard {dp_rank} (worker {worker_idx}) cannot answer: {type(typed).__name__}: {typed}"
        ) from error
    except (asyncio.CancelledError, GeneratorExit):
        ray.cancel(stream)  # the engine must not go on for nobody
        raise
    return int(index), answer


async def _first(stream: Any, dp_rank: int, quiet_s: float, on_silence: Callable[[], None]) -> Any:
    """The first item of a stream, however long it takes."""
    waiting: asyncio.Future[Any] = asyncio.ensure_future(anext(stream))
    try:
        while not (await asyncio.wait((waiting,), timeout=quiet_s))[0]:
            logger.warning("shard %d has been silent for %g s", dp_rank, quiet_s)
            on_silence()
        return waiting.result()
    except StopAsyncIteration:
        raise RuntimeError(f"shard {dp_rank} ended a request without an answer") from None
    finally:
        waiting.cancel()
