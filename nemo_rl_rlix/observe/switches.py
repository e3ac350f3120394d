"""From the transitions of shards to spans on the GPUs' tracks, and to switch times."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from nemo_rl_rlix.observe.trace import Tracer
from nemo_rl_rlix.shards.state import ShardState
from nemo_rl_rlix.shards.table import Transition

SPAN_OF_STATE: dict[ShardState, str] = {
    ShardState.WAKING: "wake",
    ShardState.SYNCING: "sync",
    ShardState.REFRESHING: "refresh",
    ShardState.DRAINING: "sleep",
    ShardState.REBUILDING: "build",
}
"""State that costs a switch -> name of its span."""

BROUGHT_IN = "switch_in_s"
TAKEN = "switch_out_s"


class SwitchTracer:
    """A listener of shard transitions that writes spans and counts switches.

    A switch in lasts from the end of the sleep to ACTIVE, a switch out from the
    route cut to the acknowledged sleep.

    Args:
        tracer: Where spans go.
        pipeline: Name of the pipeline on the tracks.
        shard_gpus: dp rank -> logical GPU ids.
    """

    def __init__(
        self, tracer: Tracer, pipeline: str, shard_gpus: Mapping[int, tuple[int, ...]]
    ) -> None:
        self._tracer = tracer
        self._pipeline = pipeline
        self._shard_gpus = dict(shard_gpus)
        self._lock = threading.Lock()
        self._entered: dict[int, float] = {}
        self._waking_since: dict[int, float] = {}
        self._seconds: dict[str, list[float]] = {BROUGHT_IN: [], TAKEN: []}
        self._failures = 0

    def __call__(self, change: Transition) -> None:
        """Account for one transition."""
        rank, now = change.dp_rank, change.wall_s
        with self._lock:
            entered = self._entered.get(rank, now)
            self._entered[rank] = now
            if change.after is ShardState.WAKING:
                self._waking_since[rank] = now
            if change.before is ShardState.SYNCING and change.after is ShardState.ACTIVE:
                self._seconds[BROUGHT_IN].append(now - self._waking_since.get(rank, now))
            if change.before is ShardState.DRAINING and change.after is ShardState.ASLEEP:
                self._seconds[TAKEN].append(now - entered)
            if change.after is ShardState.FAILED:
                self._failures += 1
        for gpu in self._shard_gpus[rank]:
            track = f"gpu/{gpu}/{self._pipeline}"
            if name := SPAN_OF_STATE.get(change.before):
                self._tracer.complete(
                    track, name, entered, now, dp_rank=rank, version=change.weights_version
                )
            if change.after is ShardState.FAILED:
                self._tracer.instant(track, "failed", dp_rank=rank, cause=change.cause)

    @property
    def seconds(self) -> dict[str, list[float]]:
        """Seconds of every switch so far, by direction."""
        with self._lock:
            return {name: list(values) for name, values in self._seconds.items()}

    @property
    def failures(self) -> int:
        """Times that a shard failed."""
        with self._lock:
            return self._failures
