"""The places at which NeMo RL is entered, as data, and the check that they are still there.

A seam says what is replaced or overridden, what that relies on, and why. It is checked
from the sources before anything is replaced, so that a moved one stops a run while no
GPU is in use. Calls, their order and return values that the binding relies on without
replacing anything are contract tests instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from nemo_rl_rlix.nemo_rl.facts import Fact, check_all
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.versions import NemoRl

GRPO = "nemo_rl.algorithms.grpo"
ASYNC_UTILS = "nemo_rl.algorithms.async_utils"
REGISTRY = "nemo_rl.distributed.ray_actor_environment_registry"
WORKER_GROUPS = "nemo_rl.distributed.worker_groups"
LM_POLICY = "nemo_rl.models.policy.lm_policy"
VLLM_GENERATION = "nemo_rl.models.generation.vllm.vllm_generation"
VLLM_WORKER = "nemo_rl.models.generation.vllm.vllm_worker_async"
VLLM_BACKEND = "nemo_rl.models.generation.vllm.vllm_backend"
MEGATRON_WORKER = "nemo_rl.models.policy.workers.megatron_policy_worker"


class Entry(StrEnum):
    """How a seam is used."""

    GLOBAL_CLASS = "a subclass takes the place of the module's global"
    GLOBAL_FUNCTION = "a wrapper takes the place of the module's global"
    ACTOR_CLASS = "an actor of a subclass takes the place of the module's global"
    MAPPING = "entries are added to the module's dictionary"
    SUBCLASS = "a class of this package inherits and is created by name"
    CALL = "called"


@dataclass(frozen=True)
class Seam:
    """One place of entry.

    Attributes:
        id: Name by which swaps and messages refer to it.
        module: Module whose global is replaced, or that defines the class.
        symbol: The global.
        entry: How it is used.
        why: What the binding needs there.
        facts: What it relies on, the symbol's existence apart.
    """

    id: str
    module: str
    symbol: str
    entry: Entry
    why: str
    facts: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class SeamProblem:
    """A seam that is not where it was.

    Attributes:
        seam: Its id.
        file: File in which the symbol is, or ought to be.
        symbol: ``module.symbol``.
        version: Version that was checked.
        reason: What was expected and what was found.
    """

    seam: str
    file: str
    symbol: str
    version: NemoRl
    reason: str

    def __str__(self) -> str:
        return f"{self.file}: {self.symbol}: {self.reason} (seam {self.seam}, {self.version})"


def _method(module: str, owner: str, name: str, *parameters: str) -> Fact:
    return Fact(module, f"{owner}.{name}", kind="function", parameters=parameters)


CLUSTERS = Seam(
    "clusters",
    GRPO,
    "RayVirtualCluster",
    Entry.GLOBAL_CLASS,
    "training and inference clusters become views of shared placement groups",
    (
        Fact(
            GRPO,
            "RayVirtualCluster",
            kind="class",
            attributes=(
                "_node_placement_groups",
                "_sorted_bundle_indices",
                "_bundle_ct_per_node_list",
                "num_gpus_per_node",
                "max_colocated_worker_groups",
                "port_range_low",
                "port_range_high",
                "name",
            ),
        ),
        Fact(
            GRPO,
            "RayVirtualCluster.__init__",
            accepts=("bundle_ct_per_node_list", "use_gpus", "num_gpus_per_node", "name"),
        ),
        _method(GRPO, "RayVirtualCluster", "_init_placement_groups", "strategy", "use_unified_pg"),
        _method(GRPO, "RayVirtualCluster", "get_placement_groups"),
        _method(GRPO, "RayVirtualCluster", "world_size"),
        _method(GRPO, "RayVirtualCluster", "shutdown"),
        Fact(
            GRPO,
            "setup",
            mentions=("'grpo_train_cluster'", "'grpo_inference_cluster'", "'grpo_policy_cluster'"),
        ),
    ),
)

POLICY = Seam(
    "policy",
    GRPO,
    "Policy",
    Entry.GLOBAL_CLASS,
    "training GPUs are requested before their first use, checkpoints included",
    (
        Fact(GRPO, "Policy", kind="class", attributes=("worker_group", "sharding_annotations")),
        Fact(
            GRPO,
            "Policy.__init__",
            accepts=("cluster", "config", "name_prefix", "worker_extension_cls_fqn"),
        ),
        _method(GRPO, "Policy", "prepare_for_training", "*args", "**kwargs"),
        Fact(GRPO, "Policy.prepare_for_lp_inference", kind="function"),
        Fact(GRPO, "Policy.get_logprobs", accepts=("data", "timer")),
        Fact(GRPO, "Policy.get_reference_policy_logprobs", accepts=("data", "timer")),
        Fact(GRPO, "Policy.train", accepts=("data", "loss_fn", "timer")),
        _method(
            GRPO,
            "Policy",
            "save_checkpoint",
            "weights_path",
            "optimizer_path",
            "tokenizer_path",
            "checkpointing_cfg",
        ),
        Fact(
            GRPO, "Policy.init_collective", accepts=("ip", "port", "world_size", "train_world_size")
        ),
        _method(GRPO, "Policy", "offload_before_refit"),
        _method(GRPO, "Policy", "offload_after_refit"),
        _method(GRPO, "Policy", "shutdown"),
        Fact(GRPO, "Policy.__del__", kind="function"),
    ),
)

ASYNC_SAVE = Fact(GRPO, "Policy.finalize_async_save", kind="function", parameters=())

GENERATION = Seam(
    "generation",
    GRPO,
    "VllmGeneration",
    Entry.GLOBAL_CLASS,
    "requests go to shards that serve; a preempted one is dispatched again",
    (
        Fact(
            GRPO,
            "VllmGeneration",
            kind="class",
            attributes=(
                "cfg",
                "worker_group",
                "dp_size",
                "tp_size",
                "current_generate_dp_shard_idx",
                "sharding_annotations",
            ),
        ),
        Fact(GRPO, "VllmGeneration.__init__", accepts=("cluster", "config", "name_prefix")),
        _method(
            GRPO,
            "VllmGeneration",
            "_async_generate_base",
            "data",
            "method_name",
            "data_validation_fn",
            "greedy",
        ),
        _method(GRPO, "VllmGeneration", "generate_async", "data", "greedy"),
        _method(GRPO, "VllmGeneration", "generate_text_async", "data", "greedy"),
        _method(GRPO, "VllmGeneration", "prepare_for_generation", "*args", "**kwargs"),
        _method(GRPO, "VllmGeneration", "finish_generation", "*args", "**kwargs"),
        _method(GRPO, "VllmGeneration", "invalidate_kv_cache"),
        _method(GRPO, "VllmGeneration", "get_logger_metrics"),
        _method(GRPO, "VllmGeneration", "clear_logger_metrics"),
        _method(GRPO, "VllmGeneration", "snapshot_step_metrics"),
        _method(GRPO, "VllmGeneration", "get_step_metrics"),
        _method(GRPO, "VllmGeneration", "prepare_refit_info", "state_dict_info"),
        _method(
            GRPO,
            "VllmGeneration",
            "init_collective",
            "ip",
            "port",
            "world_size",
            "train_world_size",
        ),
        _method(GRPO, "VllmGeneration", "shutdown"),
        Fact(GRPO, "VllmGeneration.__del__", kind="function"),
    ),
)

GENERATION_MAIN = (
    Fact(
        GRPO,
        "VllmGeneration",
        attributes=("weight_synchronizer", "fleet_monitor", "fleet_selector"),
    ),
    _method(GRPO, "VllmGeneration", "_next_dp_shard_idx"),
    _method(
        GRPO,
        "VllmGeneration",
        "_generate_on_shard",
        "data",
        "method_name",
        "greedy",
        "dp_shard_idx",
        "leader_worker_idx",
    ),
    _method(GRPO, "VllmGeneration", "attach_fleet_health", "monitor", "selector"),
)

SETUP = Seam(
    "setup",
    GRPO,
    "setup",
    Entry.GLOBAL_FUNCTION,
    "recipes that cannot be time-shared are refused; trainer and engines are built in turn",
    (
        Fact(
            GRPO,
            "setup",
            kind="function",
            parameters=(
                "master_config",
                "tokenizer",
                "dataset",
                "val_dataset",
                "processor",
                "policy_factory",
            ),
            mentions=("VllmGeneration(cluster=inference_cluster, config=generation_config)",),
        ),
    ),
)

_TRAIN_PARAMETERS = (
    "policy",
    "policy_generation",
    "dataloader",
    "val_dataloader",
    "tokenizer",
    "loss_fn",
    "task_to_env",
    "val_task_to_env",
    "logger",
    "checkpointer",
    "grpo_save_state",
    "master_config",
    "max_trajectory_age_steps",
    "teacher_worker_groups",
    "alias_to_group_alias",
)

TRAIN_LOOP = Seam(
    "train_loop",
    GRPO,
    "async_grpo_train",
    Entry.GLOBAL_FUNCTION,
    "GPUs are released and the pipeline is unregistered on every way out",
    (
        Fact(
            GRPO,
            "async_grpo_train",
            kind="function",
            accepts=_TRAIN_PARAMETERS,
            # The names are bound inside the function, so a swap of the module's globals counts.
            order=(f"import {ASYNC_UTILS}", "call policy.prepare_for_training"),
        ),
    ),
)

_REFIT_PARAMETERS = (
    "policy",
    "policy_generation",
    "colocated_inference",
    "_refit_buffer_size_gb",
    "timer",
    "kv_scales",
)

VALIDATE = Seam(
    "validate",
    GRPO,
    "validate",
    Entry.GLOBAL_FUNCTION,
    "validation counts as demand",
    (
        Fact(GRPO, "validate", kind="function", accepts=("policy_generation", "val_dataloader")),
        Fact(GRPO, "async_grpo_train", order=("call validate",)),
    ),
)

REFIT_MAIN = Seam(
    "refit",
    GRPO,
    "refit_policy_generation",
    Entry.CALL,
    "the weight synchronizer of the generation object is asked first",
    (
        Fact(
            GRPO,
            "refit_policy_generation",
            kind="function",
            parameters=_REFIT_PARAMETERS,
            mentions=(
                "getattr(policy_generation, 'weight_synchronizer', None)",
                "synchronizer.sync_weights(timer=timer, kv_scales=kv_scales)",
            ),
        ),
        _method(
            "nemo_rl.weight_sync.interfaces",
            "WeightSynchronizer",
            "sync_weights",
            "timer",
            "kv_scales",
        ),
        Fact("nemo_rl.weight_sync.interfaces", "WeightSynchronizer.is_stale", kind="function"),
    ),
)

REFIT_V0_7_0 = Seam(
    "refit",
    GRPO,
    "refit_policy_generation",
    Entry.GLOBAL_FUNCTION,
    "asks the weight synchronizer of the generation object first, as main does by itself",
    (
        Fact(GRPO, "refit_policy_generation", kind="function", parameters=_REFIT_PARAMETERS),
        Fact(
            "nemo_rl.weight_sync.interfaces",
            "WeightSynchronizer.sync_weights",
            accepts=("timer", "kv_scales"),
        ),
    ),
)

COLLECTOR = Seam(
    "collector",
    ASYNC_UTILS,
    "AsyncTrajectoryCollector",
    Entry.ACTOR_CLASS,
    "reports generation demand",
    (
        Fact(
            ASYNC_UTILS,
            "AsyncTrajectoryCollector",
            kind="class",
            decorated=("ray.remote",),
            attributes=(
                "policy_generation",
                "replay_buffer",
                "running",
                "current_weight_version",
                "_generating_targets",
                "_generation_check_lock",
            ),
        ),
        Fact(
            ASYNC_UTILS,
            "AsyncTrajectoryCollector.__init__",
            accepts=("policy_generation", "master_config", "replay_buffer", "start_step"),
        ),
        _method(
            ASYNC_UTILS,
            "AsyncTrajectoryCollector",
            "_calculate_target_weights",
            "generation_weight_version",
        ),
        _method(ASYNC_UTILS, "AsyncTrajectoryCollector", "_process_batch", "batch"),
        _method(ASYNC_UTILS, "AsyncTrajectoryCollector", "set_weight_version", "version"),
        _method(ASYNC_UTILS, "AsyncTrajectoryCollector", "_collection_loop"),
        _method(ASYNC_UTILS, "AsyncTrajectoryCollector", "pause"),
        _method(ASYNC_UTILS, "AsyncTrajectoryCollector", "resume"),
    ),
)

BUFFER = Seam(
    "buffer",
    ASYNC_UTILS,
    "ReplayBuffer",
    Entry.ACTOR_CLASS,
    "counts what is valid and derives demand from the polls of sample",
    (
        Fact(
            ASYNC_UTILS,
            "ReplayBuffer",
            kind="class",
            decorated=("ray.remote",),
            attributes=(
                "max_size",
                "trajectories",
                "trajectory_versions",
                "target_weight_versions",
                "last_target_weight_already_generated",
                "_lock",
            ),
        ),
        Fact(ASYNC_UTILS, "ReplayBuffer.__init__", accepts=("max_size",)),
        _method(
            ASYNC_UTILS,
            "ReplayBuffer",
            "add",
            "trajectory",
            "weight_version",
            "target_weight_version",
        ),
        _method(
            ASYNC_UTILS,
            "ReplayBuffer",
            "sample",
            "num_prompt_groups",
            "current_weight_version",
            "max_age_steps",
        ),
    ),
)

ENVIRONMENTS = Seam(
    "actor_environments",
    REGISTRY,
    "ACTOR_ENVIRONMENT_REGISTRY",
    Entry.MAPPING,
    "actors of this package run in the interpreter of the class they inherit from",
    (Fact(REGISTRY, "get_actor_python_env", kind="function", parameters=("actor_class_fqn",)),),
)

GENERATION_WORKER_CHOICE = Seam(
    "generation_worker_choice",
    VLLM_GENERATION,
    "resolve_generation_worker_cls",
    Entry.GLOBAL_FUNCTION,
    "engines run in this package's worker class",
    (
        Fact(
            VLLM_GENERATION,
            "resolve_generation_worker_cls",
            kind="function",
            parameters=("default_cls", "config"),
        ),
        Fact(
            VLLM_GENERATION,
            "VllmGeneration.__init__",
            mentions=("resolve_generation_worker_cls(worker_cls, self.cfg)",),
        ),
    ),
)

GENERATION_WORKER_GROUP = Seam(
    "generation_worker_group",
    VLLM_GENERATION,
    "RayWorkerGroup",
    Entry.GLOBAL_CLASS,
    "engines run on the bundles of the device mapping",
    (
        Fact(
            VLLM_GENERATION,
            "RayWorkerGroup.__init__",
            parameters=(
                "cluster",
                "remote_worker_builder",
                "workers_per_node",
                "name_prefix",
                "bundle_indices_list",
                "sharding_annotations",
                "env_vars",
            ),
        ),
        Fact(VLLM_GENERATION, "VllmGeneration.__init__", order=("call RayWorkerGroup",)),
        Fact(
            VLLM_GENERATION,
            "VllmGeneration._get_tied_worker_bundle_indices",
            mentions=("sorted_bundle_indices=cluster._sorted_bundle_indices",),
        ),
        Fact(
            LM_POLICY,
            "Policy.__init__",
            mentions=("enumerate(cluster._sorted_bundle_indices)",),
        ),
    ),
)

POLICY_WORKER_CHOICE = Seam(
    "policy_worker_choice",
    LM_POLICY,
    "resolve_policy_worker_cls",
    Entry.GLOBAL_FUNCTION,
    "trainers run in this package's worker class",
    (
        Fact(
            LM_POLICY,
            "resolve_policy_worker_cls",
            kind="function",
            parameters=("default_cls", "config"),
        ),
    ),
)

GENERATION_WORKER = Seam(
    "generation_worker",
    VLLM_WORKER,
    "VllmAsyncGenerationWorkerImpl",
    Entry.SUBCLASS,
    "admission, abort, sleep and wake of one engine",
    (
        Fact(
            VLLM_WORKER,
            "VllmAsyncGenerationWorkerImpl",
            kind="class",
            attributes=("cfg", "llm", "is_model_owner"),
        ),
        _method(VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "_create_engine", "llm_kwargs"),
        _method(VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "generate_async", "data", "greedy"),
        _method(
            VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "generate_text_async", "data", "greedy"
        ),
        _method(VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "sleep_async"),
        _method(VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "wake_up_async", "**kwargs"),
        _method(VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "reset_prefix_cache_async"),
        _method(VLLM_WORKER, "VllmAsyncGenerationWorkerImpl", "shutdown"),
    ),
)

ENGINE_EXTENSION = Seam(
    "engine_extension",
    VLLM_BACKEND,
    "VllmInternalWorkerExtension",
    Entry.SUBCLASS,
    "weights are loaded from host memory inside the engine's own processes",
    (
        Fact(VLLM_BACKEND, "VllmInternalWorkerExtension", kind="class"),
        _method(VLLM_BACKEND, "VllmInternalWorkerExtension", "_load_weights", "weights"),
        _method(VLLM_BACKEND, "VllmInternalWorkerExtension", "report_device_id"),
        _method(VLLM_BACKEND, "VllmInternalWorkerExtension", "get_zmq_address"),
    ),
)

ENGINE_EXTENSION_MAIN = (
    Fact(
        VLLM_BACKEND,
        "VllmInternalWorkerExtension._weight_update_lifecycle",
        kind="function",
    ),
)

SHARD_LEADERS = Seam(
    "shard_leaders",
    WORKER_GROUPS,
    "RayWorkerGroup",
    Entry.CALL,
    "a method runs on the leaders of chosen shards only",
    (
        _method(WORKER_GROUPS, "RayWorkerGroup", "get_dp_leader_worker_idx", "dp_shard_idx"),
        _method(
            WORKER_GROUPS,
            "RayWorkerGroup",
            "run_single_worker_single_data",
            "method_name",
            "worker_idx",
            "*args",
            "**kwargs",
        ),
        Fact(WORKER_GROUPS, "RayWorkerGroup", kind="class", attributes=("workers", "dp_size")),
    ),
)

TRAINER_WORKER = Seam(
    "trainer_worker",
    MEGATRON_WORKER,
    "MegatronPolicyWorkerImpl",
    Entry.SUBCLASS,
    "weights are exported to host memory, the device is given back, groups are re-made",
    (
        Fact(MEGATRON_WORKER, "MegatronPolicyWorkerImpl", kind="class"),
        Fact(
            MEGATRON_WORKER,
            "MegatronPolicyWorkerImpl._iter_params_with_optional_kv_scales",
            accepts=("kv_scales",),
        ),
        _method(MEGATRON_WORKER, "MegatronPolicyWorkerImpl", "offload_before_refit"),
        _method(MEGATRON_WORKER, "MegatronPolicyWorkerImpl", "offload_after_refit"),
        _method(
            MEGATRON_WORKER,
            "MegatronPolicyWorkerImpl",
            "move_model",
            "model",
            "device",
            "move_params",
            "move_grads",
        ),
        _method(MEGATRON_WORKER, "MegatronPolicyWorkerImpl", "move_optimizer", "device"),
    ),
)


def _with(seam: Seam, *facts: Fact) -> Seam:
    return Seam(seam.id, seam.module, seam.symbol, seam.entry, seam.why, seam.facts + facts)


_COMMON = (
    CLUSTERS,
    SETUP,
    TRAIN_LOOP,
    VALIDATE,
    COLLECTOR,
    BUFFER,
    ENVIRONMENTS,
    GENERATION_WORKER_CHOICE,
    GENERATION_WORKER_GROUP,
    POLICY_WORKER_CHOICE,
    GENERATION_WORKER,
    SHARD_LEADERS,
    TRAINER_WORKER,
)

SEAMS: dict[NemoRl, tuple[Seam, ...]] = {
    NemoRl.MAIN: (
        *_COMMON,
        _with(POLICY, ASYNC_SAVE),
        _with(GENERATION, *GENERATION_MAIN),
        _with(ENGINE_EXTENSION, *ENGINE_EXTENSION_MAIN),
        REFIT_MAIN,
    ),
    NemoRl.V0_7_0: (*_COMMON, POLICY, GENERATION, ENGINE_EXTENSION, REFIT_V0_7_0),
}


def seam(version: NemoRl, seam_id: str) -> Seam:
    """The seam of that id.

    Raises:
        KeyError: The version has none.
    """
    for candidate in SEAMS[version]:
        if candidate.id == seam_id:
            return candidate
    raise KeyError(f"NeMo RL {version} has no seam {seam_id}")


def check_seams(version: NemoRl, tree: SourceTree) -> list[SeamProblem]:
    """What has moved.

    Args:
        version: Version whose seams are expected.
        tree: Sources to look in.

    Returns:
        One entry for each expectation that does not hold, in the order of the seams.
    """
    problems = []
    for candidate in SEAMS[version]:
        exists = Fact(candidate.module, candidate.symbol)
        for drift in check_all(tree, (exists, *candidate.facts)):
            problem = SeamProblem(candidate.id, drift.file, drift.symbol, version, drift.reason)
            if problem not in problems:
                problems.append(problem)
    return problems
