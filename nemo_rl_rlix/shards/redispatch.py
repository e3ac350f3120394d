"""Sending a request until some shard finishes it, exactly once.

Preemption is not failure: it is counted, never reported as an error of the
request. What is kept of an interrupted answer is the policy's choice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from nemo_rl_rlix.errors import PartialGeneration, ShardPreemptedError
from nemo_rl_rlix.settings import PreemptedRequests
from nemo_rl_rlix.shards.requests import (
    GenerationOutput,
    GenerationRequest,
    join_output,
    join_partial,
)
from nemo_rl_rlix.shards.router import ShardRouter

Send = Callable[[int, GenerationRequest], Awaitable[GenerationOutput]]
"""Sends a request to the shard of a rank; raises ``ShardPreemptedError`` if it was taken."""


@dataclass(frozen=True)
class DispatchCounts:
    """How requests fared since the start.

    Attributes:
        finished: Requests answered.
        dispatched: Times a shard was asked, refusals included.
        refused: Dispatches that ended before the shard had sampled a token.
        preempted: Dispatches whose shard was taken, or died, while it answered.
        tokens_kept: Tokens of interrupted dispatches that became part of an answer.
        tokens_dropped: Tokens of interrupted dispatches that were thrown away.
    """

    finished: int = 0
    dispatched: int = 0
    refused: int = 0
    preempted: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0

    @property
    def redispatched(self) -> int:
        """Dispatches beyond the first of each request."""
        return self.refused + self.preempted


class DispatchStats:
    """Thread-safe counter of :class:`DispatchCounts`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = DispatchCounts()

    def add(self, **changes: int) -> None:
        """Add to the named counts."""
        with self._lock:
            old = self._counts
            self._counts = replace(
                old, **{name: getattr(old, name) + value for name, value in changes.items()}
            )

    @property
    def counts(self) -> DispatchCounts:
        """The counts at this moment."""
        with self._lock:
            return self._counts


def complete_from(
    prior: PartialGeneration, request: GenerationRequest, dp_rank: int
) -> GenerationOutput | None:
    """The answer, if the kept tokens already are one.

    An abort can meet a request between its last token and its end.
    """
    if not prior.token_ids:
        return None
    if prior.token_ids[-1] in request.stop_ids:
        reason = "stop"
    elif len(prior.token_ids) >= request.max_new_tokens:
        reason = "length"
    else:
        return None
    return GenerationOutput(
        request_id=request.request_id,
        token_ids=prior.token_ids,
        logprobs=prior.logprobs,
        segments=prior.segments,
        finish_reason=reason,
        dp_rank=dp_rank,
        tokens_kept=len(prior.token_ids),
    )


async def generate(
    request: GenerationRequest,
    *,
    router: ShardRouter,
    send: Send,
    policy: PreemptedRequests,
    stats: DispatchStats,
    backoff_s: float,
) -> GenerationOutput:
    """Have a request answered by whichever shard serves, however often it is taken.

    Args:
        request: The request; its ``prior`` is normally empty.
        router: Routing replica of this process.
        send: Asks one shard.
        policy: What to keep of an interrupted answer.
        stats: Counters.
        backoff_s: Pause in seconds after a refusal, so that a replica that is
            behind does not spin.

    Returns:
        The whole answer; ``finish_reason`` is never ``abort``.

    Raises:
        NoLiveShardError: No shard can ever serve it.
        PipelineClosedError: The pipeline has ended.
    """
    prior, dropped, accepted = request.prior, 0, 0
    while True:
        rank, epoch = await router.acquire()
        stats.add(dispatched=1)
        try:
            last = _finished(await send(rank, replace(request, prior=prior)), epoch)
        except ShardPreemptedError as taken:
            router.avoid(rank, chosen_at=epoch, closed_at=taken.epoch)
            tokens = len(taken.partial.token_ids)
            refused = tokens == 0 and taken.epoch >= 0
            stats.add(**{"refused" if refused else "preempted": 1})
            accepted += not refused
            if policy is PreemptedRequests.RESUME:
                prior = join_partial(prior, taken.partial)
            else:
                dropped += tokens
        else:
            output = join_output(prior, last)
            accepted += 1
            break
        finally:
            router.release(rank)
        done = complete_from(prior, request, rank)
        if done is not None:
            output = done
            break
        await asyncio.sleep(backoff_s)
    stats.add(finished=1, tokens_kept=len(prior.token_ids), tokens_dropped=dropped)
    return replace(output, dispatches=accepted, tokens_dropped=dropped)


def _finished(output: GenerationOutput, epoch: int) -> GenerationOutput:
    """Refuse an aborted answer that a shard passed on as if it were a finished one."""
    if output.finish_reason != "abort":
        return output
    partial = PartialGeneration(output.token_ids, output.logprobs, output.segments)
    raise ShardPreemptedError(output.dp_rank, partial, epoch)
