"""What the demo can be asked to do."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.observe.records import load_records
from nemo_rl_rlix.settings import PreemptedRequests

MIN_STEPS = 4
"""Rewards of the first and the last quarter are compared: there must be four quarters."""


MAX_SEED = 2**31 - 1
"""Seeds are multiplied and added to; every generator takes the result."""


class DemoMode(StrEnum):
    """Which runs the demo makes."""

    BOTH = "both"
    SHARED = "shared"
    ALONE = "alone"


class DemoOptions(BaseModel):
    """Options of ``nemo-rl-rlix demo``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    out: Path = Field(description="Folder for traces, picture and table; created, must be new.")
    data: Path | None = Field(
        None, description="JSON lines of prompts and answers; unset: generated arithmetic."
    )
    steps: int = Field(32, ge=MIN_STEPS, description="Training steps of each pipeline.")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="Seed of weights, data and sampling.")
    policy: PreemptedRequests = Field(
        PreemptedRequests.RESUME, description="What happens to preempted requests."
    )
    mode: DemoMode = Field(DemoMode.BOTH, description="Which runs to make.")
    json_path: Path | None = Field(None, description="File of records to write or to merge into.")
    kill_shard: bool = Field(False, description="End a shard's process in the shared run.")
    plain: bool = Field(False, description="Log lines instead of the live view.")

    @model_validator(mode="after")
    def _kill_needs_shared(self) -> DemoOptions:
        if self.kill_shard and self.mode is DemoMode.ALONE:
            raise SettingError(
                "--kill-shard",
                True,
                "the shard is ended in the shared run, which --mode alone leaves out",
                "Use --mode both or --mode shared",
            )
        return self

    @classmethod
    def checked(cls, **values: Any) -> DemoOptions:
        """Validate the options and the folder and files that they name.

        Raises:
            SettingError: Names the option as the user typed it and what to do.
        """
        try:
            options = cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            option = str(first["loc"][0])
            raise SettingError(
                _flag(option), values.get(option), first["msg"], "See `nemo-rl-rlix demo --help`"
            ) from error
        if options.data is not None and not options.data.is_file():
            raise SettingError(
                "--data",
                str(options.data),
                "there is no such file",
                'Name a file with one {"prompt": ..., "answer": ...} a line',
            )
        if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
            raise SettingError(
                "--out",
                str(options.out),
                "it exists and is not an empty folder",
                "Name a new folder, so that the traces of two runs do not mix",
            )
        _check_can_be_made("--out", options.out)
        if options.json_path is not None:
            _check_records(options.json_path)
        return options


def _check_records(path: Path) -> None:
    """Refuse a file that figures cannot be written to: they would be lost after minutes."""
    if path.is_dir():
        raise SettingError("--json", str(path), "it is a folder", "Name a file")
    if path.exists():
        try:
            load_records(path)
        except SettingError as error:
            raise SettingError("--json", str(path), error.reason, error.remedy) from error
        except OSError as error:
            raise SettingError(
                "--json", str(path), f"it cannot be read: {error}", "Name another file"
            ) from error
    _check_can_be_made("--json", path.parent)


def _check_can_be_made(option: str, folder: Path) -> None:
    """Refuse a folder that does not exist and cannot be made, or not be written to."""
    nearest = next(
        path for path in (folder.absolute(), *folder.absolute().parents) if path.exists()
    )
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        raise SettingError(
            option,
            str(folder),
            f"nothing can be written to {nearest}",
            "Name a place where you may make files",
        )


def _flag(option: str) -> str:
    return "--json" if option == "json_path" else f"--{option.replace('_', '-')}"
