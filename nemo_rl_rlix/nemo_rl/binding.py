"""What is replaced in NeMo RL for a time-shared run.

An entry names a seam and how its replacement is made; the seam says where, by what
means and what it relies on. Classes of workers are named, not imported: they need vLLM
or Megatron, which the driver's interpreter may not have.
"""

from __future__ import annotations

from nemo_rl_rlix.nemo_rl import actors, refit, start, train_loop
from nemo_rl_rlix.nemo_rl.makers import other_workers, same_environments, subclass
from nemo_rl_rlix.nemo_rl.swap import Swap
from nemo_rl_rlix.nemo_rl.versions import NemoRl

_VLLM = "nemo_rl.models.generation.vllm"
_MEGATRON = "nemo_rl.models.policy.workers.megatron_policy_worker"
_OURS = "nemo_rl_rlix.nemo_rl"

GENERATION_WORKERS = {
    f"{_VLLM}.vllm_worker_async.VllmAsyncGenerationWorker": (
        f"{_OURS}.vllm_workers.RlixVllmAsyncGenerationWorker"
    ),
}
POLICY_WORKERS = {
    f"{_MEGATRON}.MegatronPolicyWorker": f"{_OURS}.megatron_workers.RlixMegatronPolicyWorker",
}
"""NeMo RL's class -> the one in its place; both run in the former's environment."""

_ENVIRONMENTS = {
    ours: theirs for theirs, ours in (*GENERATION_WORKERS.items(), *POLICY_WORKERS.items())
}

SWAPS: tuple[Swap, ...] = (
    Swap("setup", start.time_share_setup),
    Swap("clusters", subclass(f"{_OURS}.virtual_cluster:SharedVirtualCluster")),
    Swap("policy", subclass(f"{_OURS}.policy:TimeSharedPolicy")),
    Swap("generation", subclass(f"{_OURS}.generation:TimeSharedVllmGeneration")),
    Swap("generation_worker_group", subclass(f"{_OURS}.worker_group:MappedWorkerGroup")),
    Swap("generation_worker_choice", other_workers(GENERATION_WORKERS)),
    Swap("policy_worker_choice", other_workers(POLICY_WORKERS)),
    Swap("actor_environments", same_environments(_ENVIRONMENTS)),
    Swap("train_loop", train_loop.guard),
    Swap("validate", train_loop.count_validation),
    Swap("refit", refit.ask_synchronizer_first, frozenset({NemoRl.V0_7_0})),
    Swap("collector", actors.reporting_collector),
    Swap("buffer", actors.counting_buffer),
)
