"""A package ``nemo_rl`` of a few dozen lines that has every seam, or one of them moved.

It imports nothing heavy: ``ray`` is a stand-in too. Signatures are those that the seams
name; bodies do what the tests need and no more.
"""

from __future__ import annotations

from pathlib import Path

RAY = """
WORKER_MODE = 1
mode = 0
class _Context:
    @property
    def worker(self):
        import ray
        return ray
def is_initialized():
    return True
def get_runtime_context():
    return _Context()
def remote(cls):
    cls.decorated = True
    return cls
"""

PACKAGE_INFO = "MAJOR = 0\nMINOR = {minor}\nPATCH = 0\n"

VIRTUAL_CLUSTER = """
class RayVirtualCluster:
    def __init__(self, bundle_ct_per_node_list, use_gpus=True, num_gpus_per_node=8, name=""):
        self._node_placement_groups = None
        self._sorted_bundle_indices = None
        self._bundle_ct_per_node_list = bundle_ct_per_node_list
        self.num_gpus_per_node = num_gpus_per_node
        self.max_colocated_worker_groups = 1
        self.port_range_low = self.port_range_high = 0
        self.name = name
    def _init_placement_groups(self, strategy=None, use_unified_pg=False): ...
    def get_placement_groups(self): ...
    def world_size(self): ...
    def shutdown(self): ...
"""

REGISTRY = """
ACTOR_ENVIRONMENT_REGISTRY: dict[str, str] = {"nemo_rl.Worker": "uv run"}
def get_actor_python_env(actor_class_fqn):
    return ACTOR_ENVIRONMENT_REGISTRY[actor_class_fqn]
"""

WORKER_GROUPS = """
class RayWorkerGroup:
    workers = dp_size = None
    def __init__(
        self, cluster, remote_worker_builder, workers_per_node=None, name_prefix="",
        bundle_indices_list=None, sharding_annotations=None, env_vars={},
    ): ...
    def get_dp_leader_worker_idx(self, dp_shard_idx): ...
    def run_single_worker_single_data(self, method_name, worker_idx, *args, **kwargs): ...
"""

LM_POLICY = """
from nemo_rl.models.policy.utils import resolve_policy_worker_cls
class Policy:
    def __init__(self, cluster, config, name_prefix="", worker_extension_cls_fqn=None):
        self.worker_group = self.sharding_annotations = None
        tied = [(0, [index]) for _, index in enumerate(cluster._sorted_bundle_indices)]
    def prepare_for_training(self, *args, **kwargs): ...
    def prepare_for_lp_inference(self): ...
    def get_logprobs(self, data, timer=None): ...
    def get_reference_policy_logprobs(self, data, timer=None): ...
    def train(self, data, loss_fn, timer=None): ...
    def save_checkpoint(
        self, weights_path, optimizer_path=None, tokenizer_path=None, checkpointing_cfg=None
    ): ...
    def init_collective(self, ip, port, world_size, *, train_world_size): ...
    def offload_before_refit(self): ...
    def offload_after_refit(self): ...
    def finalize_async_save(self): ...
    def shutdown(self): ...
    def __del__(self): ...
"""

POLICY_UTILS = "def resolve_policy_worker_cls(default_cls, config):\n    return default_cls\n"
VLLM_UTILS = "def resolve_generation_worker_cls(default_cls, config):\n    return default_cls\n"

VLLM_GENERATION = """
from nemo_rl.distributed.worker_groups import RayWorkerGroup
from nemo_rl.models.generation.vllm.utils import resolve_generation_worker_cls
class VllmGeneration:
    def __init__(self, cluster, config, name_prefix="vllm_policy"):
        self.cfg = config
        worker_cls = resolve_generation_worker_cls(worker_cls, self.cfg)
        self.worker_group = self.dp_size = self.tp_size = None
        group = RayWorkerGroup(cluster, worker_cls, name_prefix=name_prefix)
        self.current_generate_dp_shard_idx = 0
        self.sharding_annotations = None
        self.weight_synchronizer = self.fleet_monitor = self.fleet_selector = None
    def _get_tied_worker_bundle_indices(self, cluster):
        return allocate_worker_groups(sorted_bundle_indices=cluster._sorted_bundle_indices)
    async def _async_generate_base(self, data, method_name, data_validation_fn, greedy=False): ...
    def _next_dp_shard_idx(self): ...
    async def _generate_on_shard(
        self, *, data, method_name, greedy, dp_shard_idx, leader_worker_idx
    ): ...
    def attach_fleet_health(self, monitor, selector): ...
    async def generate_async(self, data, greedy=False): ...
    async def generate_text_async(self, data, greedy=False): ...
    def prepare_for_generation(self, *args, **kwargs): ...
    def finish_generation(self, *args, **kwargs): ...
    def invalidate_kv_cache(self): ...
    def get_logger_metrics(self): ...
    def clear_logger_metrics(self): ...
    def snapshot_step_metrics(self): ...
    def get_step_metrics(self): ...
    def prepare_refit_info(self, state_dict_info): ...
    def init_collective(self, ip, port, world_size, *, train_world_size): ...
    def shutdown(self): ...
    def __del__(self): ...
"""

VLLM_WORKER = """
class VllmAsyncGenerationWorkerImpl:
    cfg = llm = is_model_owner = None
    def _create_engine(self, llm_kwargs): ...
    async def generate_async(self, data, greedy=False): ...
    async def generate_text_async(self, data, greedy=False): ...
    async def sleep_async(self): ...
    async def wake_up_async(self, **kwargs): ...
    async def reset_prefix_cache_async(self): ...
    async def shutdown(self): ...
"""

VLLM_BACKEND = """
class VllmInternalWorkerExtension:
    def _load_weights(self, weights): ...
    def report_device_id(self): ...
    def get_zmq_address(self): ...
    def _weight_update_lifecycle(self, transport): ...
"""

MEGATRON_WORKER = """
class MegatronPolicyWorkerImpl:
    def _iter_params_with_optional_kv_scales(self, kv_scales=None): ...
    def offload_before_refit(self): ...
    def offload_after_refit(self): ...
    def move_model(self, model, device, move_params=True, move_grads=True): ...
    def move_optimizer(self, device): ...
"""

SYNCHRONIZER = """
class WeightSynchronizer:
    def sync_weights(self, *, timer=None, kv_scales=None): ...
    @property
    def is_stale(self): ...
"""

GRPO = """
from nemo_rl.distributed.virtual_cluster import RayVirtualCluster
from nemo_rl.models.generation.vllm.vllm_generation import VllmGeneration
from nemo_rl.models.policy.lm_policy import Policy
import ray
def setup(master_config, tokenizer, dataset, val_dataset, processor=None, policy_factory=None):
    if tokenizer is None:
        return "built"
    for name in ("grpo_policy_cluster", "grpo_train_cluster", "grpo_inference_cluster"):
        cluster = RayVirtualCluster([1], name=name)
    return VllmGeneration(cluster=inference_cluster, config=generation_config)
def refit_policy_generation(
    policy,
    policy_generation,
    colocated_inference,
    _refit_buffer_size_gb=None,
    timer=None,
    kv_scales=None,
):
    {refit}
    return "broadcast"
def async_grpo_train(
    policy, policy_generation, dataloader, val_dataloader, tokenizer, loss_fn, task_to_env,
    val_task_to_env, logger, checkpointer, grpo_save_state, master_config,
    max_trajectory_age_steps=1, teacher_worker_groups=None, alias_to_group_alias=None,
):
    from nemo_rl.algorithms.async_utils import AsyncTrajectoryCollector, ReplayBuffer
    policy.prepare_for_training()
    validate(policy_generation, val_dataloader)
def validate(policy_generation, val_dataloader): ...
LAST_LINE = True
"""

REFIT = {
    "main": """synchronizer = getattr(policy_generation, "weight_synchronizer", None)
    if synchronizer is not None:
        return synchronizer.sync_weights(timer=timer, kv_scales=kv_scales) or {}""",
    "v0.7.0": "pass",
}

COLLECTOR = """
import ray
from nemo_rl.algorithms.grpo import LAST_LINE
@ray.remote
class AsyncTrajectoryCollector:
    def __init__(self, policy_generation, master_config, replay_buffer, start_step=0):
        self.policy_generation = self.replay_buffer = self.running = None
        self.current_weight_version = self._generating_targets = None
        self._generation_check_lock = None
    def _calculate_target_weights(self, generation_weight_version): ...
    def _process_batch(self, batch): ...
    def set_weight_version(self, version): ...
    def _collection_loop(self): ...
    def pause(self): ...
    def resume(self): ...
"""

BUFFER = """
import ray
class ReplayBufferImpl:
    def __init__(self, max_size):
        self.max_size = self.trajectories = self.trajectory_versions = None
        self.target_weight_versions = self._lock = None
        self.last_target_weight_already_generated = -1
    def add(self, trajectory, weight_version, target_weight_version): ...
    def sample(self, num_prompt_groups, current_weight_version, max_age_steps): ...
@ray.remote
class ReplayBuffer(ReplayBufferImpl):
    pass
"""

ASYNC_UTILS = """
from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBuffer
from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
"""

INTERFACES = """
class GenerationInterface:
    def wake_carries_weight_updates(self): ...
"""


def sources(version: str) -> dict[str, str]:
    """Path below the root -> text of every file of one fake NeMo RL.

    Args:
        version: ``main`` or ``v0.7.0``.
    """
    files = {
        "ray.py": RAY,
        "nemo_rl/package_info.py": PACKAGE_INFO.format(minor=6 if version == "main" else 7),
        "nemo_rl/algorithms/grpo.py": GRPO.format(refit=REFIT[version]),
        "nemo_rl/algorithms/async_utils/__init__.py": ASYNC_UTILS,
        "nemo_rl/algorithms/async_utils/replay_buffer.py": BUFFER,
        "nemo_rl/algorithms/async_utils/trajectory_collector.py": COLLECTOR,
        "nemo_rl/distributed/virtual_cluster.py": VIRTUAL_CLUSTER,
        "nemo_rl/distributed/ray_actor_environment_registry.py": REGISTRY,
        "nemo_rl/distributed/worker_groups.py": WORKER_GROUPS,
        "nemo_rl/models/policy/lm_policy.py": LM_POLICY,
        "nemo_rl/models/policy/utils.py": POLICY_UTILS,
        "nemo_rl/models/policy/workers/megatron_policy_worker.py": MEGATRON_WORKER,
        "nemo_rl/models/generation/vllm/utils.py": VLLM_UTILS,
        "nemo_rl/models/generation/vllm/vllm_generation.py": VLLM_GENERATION,
        "nemo_rl/models/generation/vllm/vllm_worker_async.py": VLLM_WORKER,
        "nemo_rl/models/generation/vllm/vllm_backend.py": VLLM_BACKEND,
        "nemo_rl/weight_sync/interfaces.py": SYNCHRONIZER,
        "nemo_rl/weight_sync/factory.py": "def create_weight_synchronizer(): ...\n",
    }
    if version == "main":
        files["nemo_rl/models/generation/interfaces.py"] = INTERFACES
        files["nemo_rl/models/generation/fleet_health.py"] = "class GenerationFleetHealth: ...\n"
    return files


def write_fake(root: Path, version: str, edits: dict[str, tuple[str, str]] | None = None) -> Path:
    """Write a fake NeMo RL below ``root`` and return ``root``.

    Args:
        root: What goes on ``PYTHONPATH``.
        version: ``main`` or ``v0.7.0``.
        edits: Path -> (text, replacement), to move something.
    """
    files = sources(version)
    for path, (old, new) in (edits or {}).items():
        assert old in files[path], f"{path} does not contain {old!r}"
        files[path] = files[path].replace(old, new)
    for path, text in files.items():
        file = root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    for folder in (root / "nemo_rl").rglob("*"):
        if folder.is_dir() and not (folder / "__init__.py").exists():
            (folder / "__init__.py").touch()
    (root / "nemo_rl" / "__init__.py").touch()
    return root
