"""Actor classes that NeMo RL's worker builder can create."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray


def worker_actor(**options: Any) -> Callable[[type], Any]:
    """Decorate a worker class; use it in place of ``ray.remote``.

    Symptom: ``Setting 'concurrency_groups' is not supported in '.options()'``.
    Cause: NeMo RL hands the default options of a worker's actor class to ``options()``,
    where Ray takes no concurrency groups; those of the decorator are in effect anyway.

    A worker counts no CPUs: those in the bundles of the shared placement group are few,
    and the workers of several pipelines have to fit.

    Args:
        options: Options of ``ray.remote``.
    """

    def decorate(cls: type) -> Any:
        actor_class = ray.remote(num_cpus=0, **options)(cls)
        actor_class._default_options.pop("concurrency_groups", None)
        return actor_class

    return decorate
