"""Selective sync: chosen shards, a complete set of weights, or an error."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_rl_rlix.errors import CoverageError
from nemo_rl_rlix.settings import Deadlines
from nemo_rl_rlix.shards.protocol import InferenceShard, ReceiveReport
from nemo_rl_rlix.weights.errors import VersionOrderError
from nemo_rl_rlix.weights.types import CacheHandle


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
