"""Finding and ending the Ray actors of a pipeline."""

from __future__ import annotations

import logging
import time
from typing import Any

import ray

from nemo_rl_rlix.control_plane.protocol import (
    PipelineSpec,
    coordinator_name,
    pipeline_namespace,
)
from nemo_rl_rlix.errors import SettingError

logger = logging.getLogger(__name__)

SETTLE_S = 0.5
"""Seconds between the last kill and the reuse of the GPUs: a process that was killed
is gone from Ray's books before the driver of the card has its memory back."""


def find_coordinator(spec: PipelineSpec) -> Any:
    """Look up the actor that ``resize_infer`` is called on.

    Raises:
        SettingError: There is none of that name in the registered namespace.
    """
    name = coordinator_name(spec.pipeline_id)
    try:
        return ray.get_actor(name, namespace=spec.ray_namespace)
    except ValueError as error:
        raise SettingError(
            "ray_namespace",
            spec.ray_namespace,
            f"it has no actor named {name}",
            "Create the coordinator in this namespace before you register the pipeline",
        ) from error


def named_actors(spec: PipelineSpec) -> list[tuple[str, str]]:
    """Living named actors of a pipeline, as (namespace, name).

    Everything in the pipeline's canonical namespace is its own. In a namespace of
    the user's choosing other actors may live; there only those whose name contains
    the pipeline id are.
    """
    own = pipeline_namespace(spec.pipeline_id)
    return [
        (entry["namespace"], entry["name"])
        for entry in ray.util.list_named_actors(all_namespaces=True)
        if entry["namespace"] == own
        or (entry["namespace"] == spec.ray_namespace and spec.pipeline_id in entry["name"])
    ]


def end_pipeline(spec: PipelineSpec, coordinator: Any, *, timeout_s: float) -> bool:
    """Kill a pipeline's coordinator and named actors; their own actors die with them.

    Returns:
        Whether none of them is left, after a pause in which memory comes back.
    """
    ray.kill(coordinator, no_restart=True)
    deadline = time.monotonic() + timeout_s
    while left := named_actors(spec):
        if time.monotonic() > deadline:
            logger.error("pipeline %s: cannot end %s", spec.pipeline_id, left)
            return False
        for namespace, name in left:
            try:
                ray.kill(ray.get_actor(name, namespace=namespace), no_restart=True)
            except ValueError:
                continue  # it died between the listing and the look-up
        time.sleep(0.05)
    time.sleep(SETTLE_S)
    return True
