"""The start of a time-shared run: the wrapper around NeMo RL's ``setup``."""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from nemo_rl_rlix.cluster.names import new_pipeline_id
from nemo_rl_rlix.cluster.placement import SharedCluster
from nemo_rl_rlix.control_plane.coordinator import CoordinatorPlan, call, start_coordinator
from nemo_rl_rlix.control_plane.embedded.client import EmbeddedControlPlane
from nemo_rl_rlix.control_plane.protocol import (
    INFER_CLUSTER,
    TRAIN_CLUSTER,
    PipelineSpec,
    pipeline_namespace,
)
from nemo_rl_rlix.errors import RLixError, SettingError
from nemo_rl_rlix.nemo_rl import session as sessions
from nemo_rl_rlix.nemo_rl.bridge import SharePlan, plan_share
from nemo_rl_rlix.nemo_rl.config_access import assign, changed, plain
from nemo_rl_rlix.nemo_rl.host import NEMO_HOST
from nemo_rl_rlix.nemo_rl.recipe import check_recipe
from nemo_rl_rlix.nemo_rl.session import Host, Parts, Session
from nemo_rl_rlix.settings import ControlPlaneKind, RLixSettings
from nemo_rl_rlix.topology import Topology

logger = logging.getLogger(__name__)

Setup = Callable[..., Any]

GENERATION = 1
"""Position of the generation object in what ``setup`` returns."""


def time_share_setup(original: Setup, host: Host = NEMO_HOST) -> Setup:
    """Make a run time-shared from its setup on.

    Symptom: trainer and engines are built at the same time on GPUs of their own.
    Cause: ``setup`` makes clusters, trainer and engines before its caller has any of them.

    Args:
        original: ``setup`` of the GRPO module.
        host: What runs below NeMo RL's classes.

    Returns:
        A function of the same signature. It raises ``SettingError`` before any GPU is
        used for a recipe that cannot be shared.
    """

    @functools.wraps(original)
    def setup(
        master_config: Any,
        tokenizer: Any,
        dataset: Any,
        val_dataset: Any,
        processor: Any = None,
        policy_factory: Any = None,
    ) -> Any:
        if policy_factory is not None:
            raise SettingError(
                "policy_factory",
                policy_factory,
                "the policy of a time-shared run is made by a class of this package",
                "Leave it out, or unset RLIX_CONTROL_PLANE",
            )
        recipe = plain(master_config)
        settings = check_recipe(recipe, os.environ)
        session, plan = open_session(recipe, settings, first_step(recipe), host)
        try:
            assign(master_config, plan.lasting)
            with changed(master_config, plan.during_setup):
                result = original(master_config, tokenizer, dataset, val_dataset, processor)
            # Not earlier: with a synchronizer, setup leaves out what the engines need.
            from nemo_rl_rlix.nemo_rl.synchronizer import TimeSharingSynchronizer

            result[GENERATION].weight_synchronizer = TimeSharingSynchronizer(session)
        except BaseException as error:
            session.fail(error)
            session.close()
            raise
        session.built()
        return result

    return setup


def first_step(recipe: Mapping[str, Any]) -> int:
    """Training steps that the checkpoint has from which ``setup`` will resume; else 0."""
    from nemo_rl.utils.checkpoint import CheckpointManager

    checkpointer = CheckpointManager(recipe["checkpointing"])
    info = checkpointer.load_training_info(checkpointer.get_latest_checkpoint_path())
    return 0 if info is None else int(info["current_step"])


def open_session(
    recipe: Mapping[str, Any], settings: RLixSettings, step: int, host: Host
) -> tuple[Session, SharePlan]:
    """Join the shared GPUs, start the coordinator, and register; nothing is built yet.

    Args:
        recipe: The whole recipe as plain data.
        settings: Its ``rlix:`` block.
        step: Training steps done before.
        host: What runs below NeMo RL's classes.

    Raises:
        SettingError: The recipe does not fit the cluster.
        ControlPlaneLostError: Scheduler or coordinator could not be started.
    """
    pipeline_id = new_pipeline_id(settings.pipeline_name)
    with contextlib.ExitStack() as undo:
        cluster = SharedCluster.connect(pipeline_id)
        undo.callback(cluster.release)
        plan = plan_share(
            recipe,
            settings,
            num_gpus=len(cluster.gpus),
            gpus_per_node=_gpus_per_node([slot.node_id for slot in cluster.gpus]),
        )
        topology = plan.topology
        ranks = tuple(range(topology.inference.num_shards))
        coordinator = start_coordinator(
            CoordinatorPlan(
                pipeline_id=pipeline_id,
                settings=settings,
                shard_gpus={rank: topology.inference.shard_gpus(rank) for rank in ranks},
                make_shards=functools.partial(host.make_shards, pipeline_id, ranks),
                make_guard=host.make_shard_guard,
                initial_version=step,
                clear_cache_on_refresh=plan.clear_cache_on_refresh,
                trace_name=settings.pipeline_name or "",
            )
        )
        spec = pipeline_spec(pipeline_id, topology, settings)
        control_plane = _connect(spec, settings)
        control_plane.register(spec)
        undo.callback(control_plane.unregister)
        limit = settings.deadlines.control_s
        call(coordinator, "attach", control_plane, timeout_s=limit)
        session = Session(
            Parts(
                pipeline_id=pipeline_id,
                settings=settings,
                topology=topology,
                control_plane=control_plane,
                coordinator=coordinator,
                cluster=cluster,
                host=host,
                first_step=step,
                demand_estimate=plan.demand_estimate,
                validation_samples=plan.validation_samples,
            )
        )
        sessions.make_current(session)
        undo.pop_all()
    atexit.register(session.close)
    for notice in plan.notices:
        logger.warning("%s: %s", pipeline_id, notice)
    return session, plan


def pipeline_spec(pipeline_id: str, topology: Topology, settings: RLixSettings) -> PipelineSpec:
    """What the pipeline registers."""
    return PipelineSpec(
        pipeline_id=pipeline_id,
        ray_namespace=pipeline_namespace(pipeline_id),
        device_mappings={
            TRAIN_CLUSTER: topology.train_gpus,
            INFER_CLUSTER: topology.inference.device_mapping,
        },
        tp_sizes={TRAIN_CLUSTER: 1, INFER_CLUSTER: topology.inference.gpus_per_shard},
        allow_shrink_to_zero=settings.allow_shrink_to_zero,
        priority_weight=settings.priority_weight,
    )


def _connect(spec: PipelineSpec, settings: RLixSettings) -> EmbeddedControlPlane:
    if settings.control_plane is ControlPlaneKind.RLIX:
        raise SettingError(
            "rlix.control_plane",
            str(settings.control_plane),
            "NeMo RL runs are scheduled by the embedded control plane",
            "Use embedded or auto",
        )
    return EmbeddedControlPlane(spec, settings).connect()


def _gpus_per_node(nodes: list[str]) -> int:
    counts = set(Counter(nodes).values())
    if len(counts) != 1:
        raise RLixError(
            f"the nodes of the Ray cluster have {sorted(counts)} GPUs; they must be alike"
        )
    return counts.pop()
