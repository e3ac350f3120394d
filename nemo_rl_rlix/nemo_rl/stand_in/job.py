"""What one run of one pipeline is to do, as plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Job:
    """One run of one pipeline.

    Attributes:
        address: Address of the Ray cluster.
        stand_in: Its stand-ins.
        folder: Directory for logs, checkpoints and the outcome.
        steps: Training steps at its end.
        gpus: GPUs of the recipe.
        infer_gpus: Of these, GPUs of inference in the recipe.
        val_period: Steps between validations, 0 for none.
        save_period: Steps between checkpoints.
        rlix: The ``rlix:`` block.
    """

    address: str
    stand_in: dict[str, Any]
    folder: str
    steps: int
    gpus: int
    infer_gpus: int
    val_period: int = 0
    save_period: int = 1000
    rlix: dict[str, Any] = field(default_factory=dict)
