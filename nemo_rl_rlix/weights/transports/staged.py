"""Executing a staging plan: copies run beside the loading of the bucket before."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

import torch

from nemo_rl_rlix.weights.slot import Allocate, typed
from nemo_rl_rlix.weights.staging import StagingPlan

Named = tuple[str, torch.Tensor]


class Lane(Protocol):
    """How copies into staging are ordered against the loading of what they bring."""

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: object) -> object:
        """Start ``target <- source`` copies once the load ``after`` is done."""
        ...

    def await_copy(self, copied: object) -> None:
        """Let loading continue only when these copies are done."""
        ...

    def mark_load(self) -> object:
        """What stands for the loading that has been requested so far."""
        ...

    def finish(self) -> None:
        """Return when nothing reads host memory or staging any more."""
        ...


class SideStream:
    """Copies on a stream of their own, beside the stream that loads."""

    def __init__(self, device: torch.device) -> None:
        self._load = torch.cuda.current_stream(device)
        self._copy = torch.cuda.Stream(device)
        # Fresh staging may be memory that queued work of the loading stream still uses.
        self._copy.wait_stream(self._load)

    def copy(self, pairs: list[tuple[torch.Tensor, torch.Tensor]], after: object) -> object:
        """Queue the copies on the side stream, behind the load ``after``."""
        if isinstance(after, torch.cuda.Event):
            self._copy.wait_event(after)
        with torch.cuda.stream(self._copy):
            for target, source in pairs:
                target.copy_(source, non_blocking=True)
        return self._copy.record_event()

    def await_copy(self, copied: object) -> None:
        """Make the loading stream wait for the copies; the host goes on."""
        if isinstance(copied, torch.cuda.Event):
            self._load.wait_event(copied)

    def mark_load(self) -> object:
        """Record an event on the loading stream."""
        return self._load.record_event()

    def finish(self) -> None:
        """Wait on the host for both streams."""
        self._copy.synchronize()
        self._load.synchronize()


def device_staging(device: torch.device) -> Allocate:
    """Staging of torch's caching allocator on a device."""

    def allocate(nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)

    return allocate


def staged_batches(
    slot: torch.Tensor, plan: StagingPlan, allocate: Allocate, lane: Lane
) -> Generator[list[Named], None, None]:
    """Yield the tensors of each bucket in staging, filling the next meanwhile."""
    # All at once and before any load: memory that a load has just freed could still
    # be in use on the loading stream, which the copies do not wait for.
    turns = {turn: allocate(plan.turn_nbytes) for turn in plan.turns}
    assembly = allocate(plan.assembly_nbytes)
    copied: dict[int, object] = {}
    loaded: dict[int, object] = {}

    def buffer(index: int, assembled: bool) -> torch.Tensor:
        return assembly if assembled else turns[index % 2]

    def fill(index: int) -> None:
        step = plan.steps[index]
        pairs = []
        for copy in step.copies:
            target = buffer(index, copy.assembled)
            pairs.append(
                (
                    target[copy.target_offset : copy.target_offset + copy.nbytes],
                    slot[copy.slot_offset : copy.slot_offset + copy.nbytes],
                )
            )
        free_since = loaded.get(index - 2 if step.may_overlap else index - 1)
        copied[index] = lane.copy(pairs, free_since)

    try:
        for index, step in enumerate(plan.steps):
            if index not in copied:
                fill(index)
            following = index + 1
            if following < len(plan.steps) and plan.steps[following].may_overlap:
                fill(following)
            lane.await_copy(copied[index])
            yield [
                (
                    entry.spec.name,
                    typed(
                        buffer(index, entry.assembled)[
                            entry.offset : entry.offset + entry.spec.nbytes
                        ],
                        entry.spec,
                    ),
                )
                for entry in step.ready
            ]
            loaded[index] = lane.mark_load()
        if plan.empty:
            yield [(spec.name, typed(assembly[:0], spec)) for spec in plan.empty]
    finally:
        lane.finish()
