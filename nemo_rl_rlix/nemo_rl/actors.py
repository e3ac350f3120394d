"""How NeMo RL's driver makes the collector and the buffer of a time-shared run.

NeMo RL creates them as ``Class.options(...).remote(...)`` with arguments of its own; what
is added to those, and who keeps the handle, is said here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from nemo_rl_rlix.nemo_rl import session
from nemo_rl_rlix.nemo_rl.makers import load

COLLECTOR = "nemo_rl_rlix.nemo_rl.collector:ReportingCollector"
BUFFER = "nemo_rl_rlix.nemo_rl.buffer:CountingBuffer"

_buffer: Any = None


class ActorFactory:
    """Stands in for an actor class.

    Args:
        actor_class: The actor class that is used, possibly with options.
        arguments: Keyword arguments to add, asked for at each creation.
        made: Told the handle of each actor.
    """

    def __init__(
        self,
        actor_class: Any,
        arguments: Callable[[], dict[str, Any]],
        made: Callable[[Any], None],
    ) -> None:
        self._actor_class, self._arguments, self._made = actor_class, arguments, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor_class, name)

    def options(self, **options: Any) -> ActorFactory:
        """As an actor class's."""
        return ActorFactory(self._actor_class.options(**options), self._arguments, self._made)

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        """Create the actor."""
        handle = self._actor_class.remote(*args, **kwargs, **self._arguments())
        self._made(handle)
        return handle


def reporting_collector(original: Any) -> ActorFactory:
    """The collector's replacement: reports demand to the scheduler of the session."""
    return ActorFactory(ray.remote(load(COLLECTOR)), _hooks, lambda handle: None)


def counting_buffer(original: Any) -> ActorFactory:
    """The buffer's replacement: its handle is kept for :func:`note_validation`."""
    return ActorFactory(ray.remote(load(BUFFER)), dict, _keep_buffer)


def note_validation(trajectories: int) -> bool:
    """Add the driver's own requests to the demand that the collector reports.

    Two processes that report for one pipeline would overwrite one another.

    Args:
        trajectories: How many are wanted; 0 when they are no longer.

    Returns:
        Whether there is a buffer, and so a collector that will report it.
    """
    if _buffer is None:
        return False
    _buffer.rlix_note_extra.remote(trajectories)
    return True


def _hooks() -> dict[str, Any]:
    run = session.find()
    return {} if run is None else {"rlix_hooks": run.collector_hooks()}


def _keep_buffer(handle: Any) -> None:
    global _buffer
    _buffer = handle
