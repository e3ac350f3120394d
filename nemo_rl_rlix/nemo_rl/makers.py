"""How replacements are made: a subclass, an actor, another choice of worker, an entry.

Each takes names, not classes. A module that defines a subclass imports NeMo RL, so it
can be imported only once NeMo RL has been, which is when a swap is applied.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Mapping
from typing import Any

Make = Callable[[Any], Any]


def load(name: str) -> Any:
    """The object that ``package.module:attribute`` names."""
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def plain_class(actor_class: Any) -> type:
    """The class to inherit from, of a class that ``ray.remote`` decorates.

    Args:
        actor_class: What the decorator left under the class's name.
    """
    cls: type = actor_class.__ray_metadata__.modified_class
    return cls


def subclass(name: str) -> Make:
    """Put the class of that name in the place of its base.

    Args:
        name: ``package.module:Class``.
    """
    return lambda original: load(name)


def actor(name: str) -> Make:
    """Put an actor of the class of that name in the place of an actor.

    The class is undecorated and inherits from :func:`plain_class`, so that it is still
    found by its own name: what a decorator leaves there is pickled by value.

    Args:
        name: ``package.module:Class``.
    """

    def make(original: Any) -> Any:
        import ray

        return ray.remote(load(name))

    return make


def other_workers(instead: Mapping[str, str]) -> Make:
    """Have a ``resolve_..._worker_cls`` answer with classes of this package.

    Args:
        instead: Full name of a class that the original may answer with -> full name of
            the one to use. What is not listed, quantised workers say, stays.
    """

    def make(original: Callable[[str, Any], str]) -> Callable[[str, Any], str]:
        @functools.wraps(original)
        def resolve(default_cls: str, config: Any) -> str:
            chosen = original(default_cls, config)
            return instead.get(chosen, chosen)

        return resolve

    return make


def same_environments(like: Mapping[str, str]) -> Make:
    """Add entries that run actors of this package in the interpreter of their base.

    Args:
        like: Full name of a class of this package -> full name of the class it
            inherits from, as the registry has it.
    """
    return lambda registry: {ours: registry[theirs] for ours, theirs in like.items()}
