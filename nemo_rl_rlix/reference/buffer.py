"""The replay buffer: which prompt groups a training step needs, and how far each is.

Each target version has a fixed set of groups, known by name before any of them
starts. A group goes TODO -> RESERVED -> READY -> SAMPLED; a failed one goes back
to TODO under its target. So a group can be neither lost nor counted twice, whatever
is preempted, retried or restarted in between.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from nemo_rl_rlix.errors import DeadlineExceededError, PipelineClosedError, RLixError, Segment
from nemo_rl_rlix.reference.trajectory import FINISHED, PromptGroup, Trajectory


class GroupState(StrEnum):
    """How far a group is."""

    TODO = "todo"
    RESERVED = "reserved"
    READY = "ready"
    SAMPLED = "sampled"


class DuplicateGroupError(RLixError):
    """A reservation was used that is void: used before, or from before a restart."""

    def __init__(self, group_id: str, attempt: int, state: str) -> None:
        super().__init__(
            f"attempt {attempt} of group {group_id} is void, the group is {state};"
            " use each reservation once"
        )
        self.group_id = group_id
        self.state = state


class StaleGroupError(RLixError):
    """A group has tokens of weights that are too old for its target."""

    def __init__(self, group_id: str, oldest: int, allowed: int) -> None:
        super().__init__(
            f"group {group_id} has tokens of version {oldest}, its target allows {allowed} and later"
        )
        self.group_id = group_id
        self.oldest = oldest
        self.allowed = allowed


@dataclass(frozen=True)
class Reservation:
    """The right to push one group, once.

    Attributes:
        group_id: Name of the group, the same at every attempt.
        target_version: Training step that it is for.
        index: Place in that step.
        attempt: Attempts before this one.
    """

    group_id: str
    target_version: int
    index: int
    attempt: int


@dataclass(frozen=True)
class BufferStats:
    """Counts since the start of the run, restarts included.

    Attributes:
        reserved: Reservations made.
        pushed: Groups completed.
        failed: Reservations that were given back.
        refused: Pushes and returns of reservations that were void; they changed nothing.
        sampled: Groups handed to training.
        lost_groups: Groups of sampled versions that training never got.
        duplicated_groups: Groups that training got more than once.
        aborted_tokens: Tokens of aborted responses that training got.
    """

    reserved: int = 0
    pushed: int = 0
    failed: int = 0
    refused: int = 0
    sampled: int = 0
    lost_groups: int = 0
    duplicated_groups: int = 0
    aborted_tokens: int = 0


@dataclass(frozen=True)
class BufferSnapshot:
    """State of a buffer for a checkpoint. Plain data.

    Attributes:
        first_version: First version of the run.
        next_version: Next version to be sampled.
        ready: Groups that are complete.
        attempts: Group -> attempts so far.
        trained: Names of the groups that training got, in that order.
        counts: Event -> how often it happened.
    """

    first_version: int
    next_version: int
    ready: tuple[PromptGroup, ...] = ()
    attempts: dict[str, int] = field(default_factory=dict)
    trained: tuple[str, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        """JSON text, for a checkpoint."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> BufferSnapshot:
        """What :meth:`to_json` wrote."""
        state: dict[str, Any] = json.loads(text)
        state["ready"] = tuple(_group(row) for row in state["ready"])
        state["trained"] = tuple(state["trained"])
        return cls(**state)


def _group(row: dict[str, Any]) -> PromptGroup:
    trajectories = []
    for one in row["trajectories"]:
        for name in ("prompt_ids", "token_ids", "logprobs"):
            one[name] = tuple(one[name])
        one["segments"] = tuple(Segment(**segment) for segment in one["segments"])
        trajectories.append(Trajectory(**one))
    return PromptGroup(row["group_id"], row["target_version"], tuple(trajectories))


def group_name(target_version: int, index: int) -> str:
    """Name of a group; a function of its place, so that a restart finds it again."""
    return f"v{target_version}-g{index}"


class ReplayBuffer:
    """Groups of the target versions from ``next_version`` on. Thread-safe.

    Args:
        groups_per_version: Prompt groups of one training step.
        group_size: Trajectories of one group.
        max_age: A group may start this many versions before its target.
        first_version: First version that will be sampled.
        end_version: First version that will not, ``None`` for an endless run.
    """

    def __init__(
        self,
        groups_per_version: int,
        group_size: int,
        max_age: int,
        *,
        first_version: int = 0,
        end_version: int | None = None,
    ) -> None:
        if groups_per_version < 1 or group_size < 1 or max_age < 0:
            raise ValueError(
                f"groups_per_version={groups_per_version}, group_size={group_size} and"
                f" max_age={max_age}: the first two must be >= 1, the last >= 0"
            )
        self._per_version, self._group_size, self._max_age = (
            groups_per_version,
            group_size,
            max_age,
        )
        self._changed = threading.Condition()
        self._first = self._next = first_version
        self._end = end_version
        self._states: dict[str, GroupState] = {}
        self._ready: dict[int, dict[int, PromptGroup]] = {}
        self._attempts: Counter[str] = Counter()
        self._trained: list[str] = []
        self._counts: Counter[str] = Counter()
        self._closed = ""

    # -- the collector's side ---------------------------------------------------

    def reserve(self, current_version: int) -> Reservation | None:
        """Take the next group to generate, soonest target first.

        Args:
            current_version: Version of the weights that it will be generated with.

        Returns:
            ``None`` when every group of the targets up to ``current_version + max_age``
            is in progress or done.
        """
        with self._changed:
            for target, index in self._allowed(current_version):
                name = group_name(target, index)
                if self._states.get(name, GroupState.TODO) is GroupState.TODO:
                    attempt = self._attempts[name]
                    self._states[name] = GroupState.RESERVED
                    self._attempts[name] += 1
                    self._counts["reserved"] += 1
                    return Reservation(name, target, index, attempt)
        return None

    def push(self, reservation: Reservation, group: PromptGroup) -> None:
        """Complete a reservation.

        Raises:
            DuplicateGroupError: It was completed, or given back, already.
            StaleGroupError: A token comes from weights older than the target allows.
            UnfinishedTrajectoryError: A trajectory was aborted.
            ValueError: The group is not what was reserved.

        The reservation stays valid after an error other than the first.
        """
        with self._changed:
            self._check_current(reservation)
            target = reservation.target_version
            if (group.group_id, group.target_version) != (reservation.group_id, target):
                raise ValueError(f"{reservation.group_id} was reserved, {group.group_id} pushed")
            if len(group.trajectories) != self._group_size:
                raise ValueError(
                    f"group {group.group_id} has {len(group.trajectories)} trajectories,"
                    f" not {self._group_size}"
                )
            for trajectory in group.trajectories:
                trajectory.check()
                oldest = min(segment.weights_version for segment in trajectory.segments)
                if oldest < target - self._max_age:
                    raise StaleGroupError(group.group_id, oldest, target - self._max_age)
            self._states[group.group_id] = GroupState.READY
            self._ready.setdefault(target, {})[reservation.index] = group
            self._counts["pushed"] += 1
            self._changed.notify_all()

    def fail(self, reservation: Reservation) -> None:
        """Give a reservation back: its group is to be generated anew, for the same target.

        Raises:
            DuplicateGroupError: It was completed, or given back, already.
        """
        with self._changed:
            self._check_current(reservation)
            self._states[reservation.group_id] = GroupState.TODO
            self._counts["failed"] += 1
            self._changed.notify_all()

    def progress(self, current_version: int) -> tuple[int, int]:
        """Groups that are ready, and all that may be generated at this version."""
        with self._changed:
            allowed = self._allowed(current_version)
            ready = sum(
                self._states.get(group_name(*place)) is GroupState.READY for place in allowed
            )
            return ready, len(allowed)

    def valid_count(self, current_weight_version: int, max_age_steps: int) -> int:
        """Ready groups that a step could still train on.

        Args:
            current_weight_version: Version of the policy; groups of earlier targets
                are past.
            max_age_steps: Groups for targets further ahead than this do not count.
        """
        with self._changed:
            last = current_weight_version + max_age_steps
            return sum(
                len(groups)
                for target, groups in self._ready.items()
                if current_weight_version <= target <= last
            )

    # -- the trainer's side -----------------------------------------------------

    def sample(
        self,
        version: int,
        *,
        timeout_s: float,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> list[PromptGroup]:
        """Wait for all groups of a target and hand them over, once.

        Args:
            version: Target; must be the next one.
            timeout_s: Deadline in seconds.
            cancelled: Asked at least five times a second; true ends the wait.

        Returns:
            The groups in the order of their index.

        Raises:
            DeadlineExceededError: Some group did not come in time; none is taken.
            PipelineClosedError: The buffer was closed, or the wait cancelled.
            ValueError: Another version is next.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            if version != self._next:
                raise ValueError(f"version {version} was asked for, {self._next} is next")
            while len(self._ready.get(version, {})) < self._per_version:
                if self._closed or cancelled():
                    raise PipelineClosedError(
                        f"no sample of version {version}: {self._closed or 'cancelled'}"
                    )
                left = end - time.monotonic()
                if left <= 0:
                    got = len(self._ready.get(version, {}))
                    raise DeadlineExceededError(
                        f"sample of version {version}",
                        timeout_s,
                        f"{got} of {self._per_version} groups are ready",
                    )
                self._changed.wait(min(left, 0.2))
                if version != self._next:
                    raise ValueError(f"version {version} went to another caller of sample")
            return self._take(version)

    def close(self, reason: str) -> None:
        """End every wait; idempotent, the first reason stays."""
        with self._changed:
            self._closed = self._closed or reason or "closed"
            self._changed.notify_all()

    # -- checkpoints ------------------------------------------------------------

    @property
    def next_version(self) -> int:
        """Next version to be sampled."""
        with self._changed:
            return self._next

    @property
    def stats(self) -> BufferStats:
        """Counts so far."""
        with self._changed:
            trained = set(self._trained)
            expected = (self._next - self._first) * self._per_version
            return BufferStats(
                reserved=self._counts["reserved"],
                pushed=self._counts["pushed"],
                failed=self._counts["failed"],
                refused=self._counts["refused"],
                sampled=len(self._trained),
                lost_groups=expected - len(trained),
                duplicated_groups=len(self._trained) - len(trained),
                aborted_tokens=self._counts["aborted_tokens"],
            )

    def snapshot(self) -> BufferSnapshot:
        """State for a checkpoint; groups in progress are left out and so are to be done."""
        with self._changed:
            return BufferSnapshot(
                first_version=self._first,
                next_version=self._next,
                ready=tuple(
                    groups[index]
                    for _, groups in sorted(self._ready.items())
                    for index in sorted(groups)
                ),
                attempts=dict(self._attempts),
                trained=tuple(self._trained),
                counts=dict(self._counts),
            )

    def restore(self, snapshot: BufferSnapshot) -> None:
        """Continue from a snapshot; reservations made before are void.

        Raises:
            ValueError: A group of the snapshot does not fit this buffer's sizes.
        """
        ready: dict[int, dict[int, PromptGroup]] = {}
        for group in snapshot.ready:
            target = group.target_version
            places = {group_name(target, index): index for index in range(self._per_version)}
            if group.group_id not in places or len(group.trajectories) != self._group_size:
                raise ValueError(
                    f"group {group.group_id} of the checkpoint is not one of"
                    f" {self._per_version} groups of {self._group_size}; resume with the"
                    " workload that the checkpoint was made with"
                )
            ready.setdefault(target, {})[places[group.group_id]] = group
        with self._changed:
            self._first, self._next = snapshot.first_version, snapshot.next_version
            self._ready, self._trained = ready, list(snapshot.trained)
            self._states = {group.group_id: GroupState.READY for group in snapshot.ready}
            # One more attempt each, so that what was in flight cannot pass for current.
            self._attempts = Counter({name: n + 1 for name, n in snapshot.attempts.items()})
            self._counts = Counter(snapshot.counts)
            self._changed.notify_all()

    # -- internals --------------------------------------------------------------

    def _allowed(self, current_version: int) -> list[tuple[int, int]]:
        end = current_version + self._max_age + 1
        if self._end is not None:
            end = min(end, self._end)
        return [
            (target, index)
            for target in range(self._next, end)
            for index in range(self._per_version)
        ]

    def _check_current(self, reservation: Reservation) -> None:
        name = reservation.group_id
        past = reservation.target_version < self._next
        state = GroupState.SAMPLED if past else self._states.get(name, GroupState.TODO)
        newest = self._attempts[name] - 1
        if state is not GroupState.RESERVED or reservation.attempt != newest:
            self._counts["refused"] += 1
            raise DuplicateGroupError(name, reservation.attempt, state)

    def _take(self, version: int) -> list[PromptGroup]:
        groups = self._ready.pop(version)
        taken = [groups[index] for index in sorted(groups)]
        for group in taken:
            del self._states[group.group_id]
            del self._attempts[group.group_id]
            self._trained.append(group.group_id)
            self._counts["aborted_tokens"] += sum(
                len(trajectory.token_ids)
                for trajectory in group.trajectories
                if trajectory.finish_reason not in FINISHED
            )
        self._next = version + 1
        return taken
