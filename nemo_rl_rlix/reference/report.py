"""What a run of the demo came to: the figures and the verdict. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from nemo_rl_rlix.observe.busy import Activity

RunMode = Literal["alone", "shared"]
PAYS = 1.2
"""Ratio from which sharing pays without a reservation."""
EVEN = 0.02
"""Differences up to this are noise."""


@dataclass(frozen=True)
class PipelineReport:
    """What one pipeline did in one run.

    Attributes:
        mode: ``alone`` on its half of the GPUs, or ``shared``.
        pipeline: Name.
        steps: Training steps done.
        reward_start: Mean reward of the first quarter of the steps.
        reward_end: Mean reward of the last quarter.
        rollout_tokens: Tokens of finished rollouts; what was thrown away is not in it.
        wall_s: Seconds from the start of the run to this pipeline's last step.
        preempted: Dispatches that were cut off or refused because a shard was taken.
        redispatched: Dispatches after such a one.
        tokens_kept: Tokens that later dispatches of a request did not sample again.
        tokens_dropped: Tokens that were sampled and thrown away.
        lost_groups: Prompt groups that were reserved and never came to training. Must be 0.
        duplicated_groups: Prompt groups that were trained more than once. Must be 0.
        aborted_tokens_trained: Tokens of unfinished answers in training. Must be 0.
        switch_in_seconds: Seconds of each time a shard was brought in, wake to first request.
        switch_out_seconds: Seconds of each time one was taken, route cut to memory free.
    """

    mode: RunMode
    pipeline: str
    steps: int
    reward_start: float
    reward_end: float
    rollout_tokens: int
    wall_s: float
    preempted: int = 0
    redispatched: int = 0
    tokens_kept: int = 0
    tokens_dropped: int = 0
    lost_groups: int = 0
    duplicated_groups: int = 0
    aborted_tokens_trained: int = 0
    switch_in_seconds: tuple[float, ...] = ()
    switch_out_seconds: tuple[float, ...] = ()

    @property
    def switch_seconds(self) -> tuple[float, ...]:
        """Seconds of each switch, in either direction."""
        return (*self.switch_in_seconds, *self.switch_out_seconds)

    @property
    def rollout_tokens_per_s(self) -> float:
        """Tokens of finished rollouts per second."""
        return self.rollout_tokens / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def trainer_steps_per_s(self) -> float:
        """Training steps per second."""
        return self.steps / self.wall_s if self.wall_s > 0 else 0.0


@dataclass(frozen=True)
class RunReport:
    """What all pipelines did in one mode.

    Attributes:
        mode: ``alone`` or ``shared``.
        seed: Seed of the run.
        policy: ``restart`` or ``resume``.
        pipelines: One report each.
        gpu_busy: Logical GPU -> activity -> share of the run, idle included.
        shard_killed: Whether a shard's process was ended on purpose.
        data: Name of the file of problems, empty for the generated task.
    """

    mode: RunMode
    seed: int
    policy: str
    pipelines: tuple[PipelineReport, ...]
    gpu_busy: Mapping[int, Mapping[Activity, float]] = field(default_factory=dict)
    shard_killed: bool = False
    data: str = ""

    @property
    def tokens_per_s(self) -> float:
        """Sum of the pipelines' rollout tokens per second."""
        return sum(one.rollout_tokens_per_s for one in self.pipelines)

    @property
    def switch_seconds(self) -> tuple[float, ...]:
        """Seconds of each switch of each pipeline."""
        return tuple(s for one in self.pipelines for s in one.switch_seconds)

    def mean_share(self, activity: Activity) -> float:
        """Share of all GPUs' time that went to ``activity``."""
        shares = [one.get(activity, 0.0) for one in self.gpu_busy.values()]
        return statistics.fmean(shares) if shares else 0.0


@dataclass(frozen=True)
class TracedRun:
    """Where the trace of a run lies and which part of it was measured.

    Attributes:
        mode: ``alone`` or ``shared``; several runs of one mode are drawn together.
        directory: Folder that its processes traced into.
        start_s: Unix seconds at which the measurement began.
        end_s: Unix seconds at which it ended.
    """

    mode: RunMode
    directory: Path
    start_s: float
    end_s: float


@dataclass(frozen=True)
class DemoResult:
    """All that the demo found out. ``alone`` or ``shared`` is missing if it was not asked for."""

    alone: RunReport | None = None
    shared: RunReport | None = None
    traces: tuple[TracedRun, ...] = ()

    @property
    def reports(self) -> tuple[RunReport, ...]:
        """The reports there are."""
        return tuple(one for one in (self.alone, self.shared) if one is not None)


@dataclass(frozen=True)
class Verdict:
    """Whether sharing paid.

    Attributes:
        ratio: Rollout tokens/s, shared over alone; ``nan`` if it cannot be said.
        text: One line for a reader.
        cause: What cost most; empty where sharing pays.
    """

    ratio: float
    text: str
    cause: str = ""


def quarter_means(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean of the first and of the last quarter, each at least one value long.

    Args:
        rewards: Mean reward of each step, in order.
    """
    if not rewards:
        return math.nan, math.nan
    quarter = max(1, len(rewards) // 4)
    return statistics.fmean(rewards[:quarter]), statistics.fmean(rewards[-quarter:])


def percentile(values: Sequence[float], share: float) -> float:
    """Smallest value that at least ``share`` of the values do not exceed; ``nan`` if empty."""
    if not values:
        return math.nan
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def broken_guarantees(reports: Iterable[RunReport]) -> list[str]:
    """What must not happen in any run and did, one line each."""
    rules: tuple[tuple[str, Callable[[PipelineReport], int]], ...] = (
        ("lost groups", lambda one: one.lost_groups),
        ("duplicated groups", lambda one: one.duplicated_groups),
        ("tokens of aborted answers in training", lambda one: one.aborted_tokens_trained),
    )
    return [
        f"{one.pipeline} ({one.mode}): {count(one)} {name}"
        for report in reports
        for one in report.pipelines
        for name, count in rules
        if count(one)
    ]


def judge(alone: RunReport, shared: RunReport) -> Verdict:
    """Compare rollout tokens/s and say what cost most where sharing does not clearly pay.

    tokens/s = GPUs x share of time they generate x share of tokens kept x tokens a
    second of a generating GPU. The smallest of the three quotients shared / alone
    is the cause; if it is the first one, the activity that grew most is.
    """
    if alone.tokens_per_s <= 0:
        return Verdict(math.nan, "no comparison: the pipelines sampled nothing when alone")
    ratio = shared.tokens_per_s / alone.tokens_per_s
    if ratio >= PAYS:
        return Verdict(ratio, f"sharing pays: {ratio:.2f}x")
    cause = largest_cause(alone, shared)
    if ratio < 1 - EVEN:
        return Verdict(ratio, f"sharing lost: {ratio:.2f}x because {cause}", cause)
    if ratio <= 1 + EVEN:
        return Verdict(ratio, f"sharing changed nothing: {ratio:.2f}x because {cause}", cause)
    return Verdict(ratio, f"sharing pays a little: {ratio:.2f}x, not more because {cause}", cause)


def largest_cause(alone: RunReport, shared: RunReport) -> str:
    """What cost most tokens/s in the shared run against the runs alone."""
    generating = alone.mean_share(Activity.GENERATE), shared.mean_share(Activity.GENERATE)
    if min(generating) <= 0:
        return "of a cause that the trace does not show: it holds no generation"
    kept = _kept_share(alone), _kept_share(shared)
    speed = _speed(alone, generating[0], kept[0]), _speed(shared, generating[1], kept[1])
    grown = max(
        (Activity.IDLE, Activity.SWITCH, Activity.TRAIN),
        key=lambda activity: shared.mean_share(activity) - alone.mean_share(activity),
    )
    words = {
        Activity.IDLE: "the GPUs were idle for",
        Activity.SWITCH: "the GPUs were changing hands for",
        Activity.TRAIN: "the GPUs were training for",
    }
    share = f"{shared.mean_share(grown):.0%} of the time (alone {alone.mean_share(grown):.0%})"
    losses = [
        (generating[1] / generating[0], f"{words[grown]} {share}"),
        (
            kept[1] / kept[0] if kept[0] > 0 else 1.0,
            f"{1 - kept[1]:.0%} of the sampled tokens were thrown away (alone {1 - kept[0]:.0%})",
        ),
        (
            speed[1] / speed[0] if speed[0] > 0 else 1.0,
            f"a generating GPU sampled {speed[1]:,.0f} tokens/s (alone {speed[0]:,.0f})",
        ),
    ]
    factor, text = min(losses)
    if factor < 1:
        return text
    rest = max((Activity.IDLE, Activity.SWITCH), key=shared.mean_share)
    return f"{words[rest]} {shared.mean_share(rest):.0%} of the time even when shared"


def _kept_share(report: RunReport) -> float:
    kept = sum(one.rollout_tokens for one in report.pipelines)
    sampled = kept + sum(one.tokens_dropped for one in report.pipelines)
    return kept / sampled if sampled else 1.0


def _speed(report: RunReport, generating: float, kept: float) -> float:
    """Tokens a second, thrown away ones included, of a GPU while it generates."""
    gpus = len(report.gpu_busy)
    return report.tokens_per_s / (generating * kept * gpus) if generating * kept * gpus else 0.0
