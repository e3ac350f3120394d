"""How a request that cannot be answered is reported to NeMo RL, in either version."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache

from nemo_rl_rlix.errors import RLixError

FAILURES = "nemo_rl.experience.failures"
"""Main's taxonomy of rollout failures; v0.7.0 has none."""


@cache
def unavailable_error() -> type[Exception]:
    """Class for "no fault of the prompt": ``GenerationUnavailable``, else ``RuntimeError``."""
    return _failure("GenerationUnavailable")


@cache
def no_healthy_shards_error() -> type[Exception]:
    """Class for "fleet health permits no shard": ``NoHealthyShards``, else ``RuntimeError``."""
    return _failure("NoHealthyShards")


def _failure(name: str) -> type[Exception]:
    if importlib.util.find_spec(FAILURES) is None:
        return RuntimeError
    found: type[Exception] = getattr(importlib.import_module(FAILURES), name)
    return found


class CollectionFailedError(RLixError):
    """Trajectories cannot be collected any more; the run must end."""

    def __init__(self, cause: str) -> None:
        super().__init__(f"trajectory collection failed: {cause}")
        self.cause = cause
