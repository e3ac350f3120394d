"""Selective sync: chosen shards, a complete set of weights, or an error."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from nemo_rl_rlix.errors import CoverageError, DeadlineExceededError
from nemo_rl_rlix.settings import Deadlines
from nemo_rl_rlix.shards.protocol import InferenceShard, ReceiveReport
from nemo_rl_rlix.weights.errors import VersionOrderError
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SyncOutcome:
    """What a sync did to one shard; exactly one of ``report`` and ``error`` is set.

    Attributes:
        dp_rank: Rank of the shard.
        report: What it received.
        error: Why it must not be activated.
        seconds: Time it took.
    """

    dp_rank: int
    report: ReceiveReport | None
    error: Exception | None
    seconds: float


def check_coverage(
    dp_rank: int, report: ReceiveReport, ties: Sequence[tuple[str, str]] = ()
) -> None:
    """Check a report against the engine's own list of tensors.

    Args:
        dp_rank: Rank of the shard.
        report: What arrived.
        ties: Tied name -> stored name pairs; either name stands for both.

    Raises:
        CoverageError: Something is missing, or arrived that the engine does not have.
    """
    stored = dict(ties)
    expected = {stored.get(name, name) for name in report.expected}
    loaded = {stored.get(name, name) for name in report.loaded}
    if expected != loaded:
        raise CoverageError(dp_rank, sorted(expected - loaded), sorted(loaded - expected))


def sync_shard(shard: InferenceShard, handle: CacheHandle, deadlines: Deadlines) -> ReceiveReport:
    """Bring one shard to a version; post-load work runs once, after all is there.

    Args:
        shard: The shard; its weights are mapped and its admission is closed, or
            it is paused between steps.
        handle: The version; the caller holds its lease until this returns.
        deadlines: ``receive_s`` and ``finalize_s`` are used.

    Raises:
        CoverageError: The set of tensors is not complete.
        VersionOrderError: Another version arrived.
        RLixError: What the shard raised. After any error the shard must not serve.
    """
    report = shard.receive(handle, timeout_s=deadlines.receive_s)
    check_coverage(shard.dp_rank, report, handle.layout.ties)
    if report.weights_version != handle.weights_version:
        raise VersionOrderError(
            f"shard {shard.dp_rank} received version {report.weights_version} instead of "
            f"{handle.weights_version}"
        )
    shard.finalize_weights(timeout_s=deadlines.finalize_s)
    return report


def sync_shards(
    shards: Sequence[InferenceShard],
    lease: AbstractContextManager[CacheHandle],
    deadlines: Deadlines,
    *,
    grace_s: float = 5.0,
) -> tuple[SyncOutcome, ...]:
    """Sync shards in parallel; one that fails does not stop the others.

    A shard that does not answer within its deadlines and the grace is reported as
    failed and not waited for. The lease ends then as well: a shard that reads on
    notices by the slot's header, and is never activated.

    Args:
        shards: Shards to sync.
        lease: From :meth:`~nemo_rl_rlix.weights.book.CacheBook.lease`; entered here.
        deadlines: Deadlines of the calls.
        grace_s: Seconds beyond them, for shards that report their own lateness.

    Returns:
        An outcome for each shard, in the order given.

    Raises:
        CacheNotReadyError: There is nothing to sync from.
    """
    limit_s = deadlines.receive_s + deadlines.finalize_s + grace_s
    results: queue.SimpleQueue[tuple[int, SyncOutcome]] = queue.SimpleQueue()
    outcomes: dict[int, SyncOutcome] = {}
    with lease as handle:
        started = time.monotonic()

        def run(index: int, shard: InferenceShard) -> None:
            results.put((index, _outcome(shard, handle, deadlines)))

        for index, shard in enumerate(shards):
            # Daemon: a call that never returns must not hold up the end of the process.
            threading.Thread(
                target=run, args=(index, shard), name=f"sync-shard-{shard.dp_rank}", daemon=True
            ).start()
        while len(outcomes) < len(shards):
            remaining = started + limit_s - time.monotonic()
            try:
                index, outcome = results.get(timeout=max(remaining, 0.001))
            except queue.Empty:
                break
            outcomes[index] = outcome
    for index, shard in enumerate(shards):
        if index not in outcomes:
            late = DeadlineExceededError(f"weight sync of shard {shard.dp_rank}", limit_s)
            logger.error("%s", late)
            outcomes[index] = SyncOutcome(shard.dp_rank, None, late, limit_s)
    return tuple(outcomes[index] for index in range(len(shards)))


def _outcome(shard: InferenceShard, handle: CacheHandle, deadlines: Deadlines) -> SyncOutcome:
    started = time.monotonic()
    report: ReceiveReport | None = None
    failure: Exception | None = None
    try:
        report = sync_shard(shard, handle, deadlines)
    except Exception as error:  # noqa: BLE001 - whatever it is, it concerns this rank alone
        logger.warning(
            "pipeline %s, shard %d: sync failed: %s", handle.pipeline_id, shard.dp_rank, error
        )
        failure = error
    return SyncOutcome(shard.dp_rank, report, failure, time.monotonic() - started)
