"""Policy, clusters, worker group and synchronizer over NeMo RL's own classes; no Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_rl_rlix.cluster.slots import GpuSlot
from nemo_rl_rlix.errors import GrantRequiredError, SettingError
from nemo_rl_rlix.nemo_rl import session as sessions
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.versions import NemoRl, detect
from nemo_rl_rlix.topology import validate_topology

# The shared group has its bundles in another order than the cards.
BUNDLES = (2, 0, 3, 1)


class FakeSession:
    """Writes down what the replacements ask for."""

    pipeline_id = "p1"
    step = 0

    def __init__(self, group: Any = "group") -> None:
        self.acts: list[str] = []
        self.held = False
        self.generating = False
        self.topology = validate_topology(
            train_device_mapping=[0],
            infer_device_mapping=[0, 1, 3, 2],
            infer_tp=1,
            num_gpus=4,
            gpus_per_node=4,
        )
        slots = [
            GpuSlot(gpu, "node", 0, bundle, group, str(gpu)) for gpu, bundle in enumerate(BUNDLES)
        ]
        self.cluster = SimpleNamespace(gpus=tuple(slots))

    def before_training(self) -> None:
        self.acts.append("before")
        self.held = True

    def after_training(self) -> None:
        self.acts.append("after")
        self.step += 1

    def start_generation(self) -> None:
        self.acts.append("start")
        self.generating = True

    def require_grant(self, act: str) -> None:
        if not self.held:
            raise GrantRequiredError("p1", [0], act)

    @contextlib.contextmanager
    def grant(self) -> Iterator[None]:
        self.acts.append("grant")
        yield
        self.acts.append("release")

    def leave(self) -> None:
        self.acts.append("leave")


@pytest.fixture(scope="module")
def version(importable: Path) -> NemoRl:
    return detect(SourceTree(importable / "nemo_rl"))


@pytest.fixture
def session(version: NemoRl) -> Iterator[FakeSession]:
    made: Any = FakeSession()
    sessions._current = made
    yield made
    sessions._current = None


# -- policy --------------------------------------------------------------------------


class FakeGroup:
    """A worker group that writes down what it is asked to run."""

    def __init__(self, acts: list[str]) -> None:
        self.acts = acts

    def run_all_workers_single_data(self, method: str, *args: Any, **kwargs: Any) -> list[Any]:
        self.acts.append(method)
        return []

    def shutdown(self, cleanup_method: str) -> bool:
        self.acts.append("workers end")
        return True


@pytest.fixture
def policy(session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> Any:
    from nemo_rl.models.policy import lm_policy

    from nemo_rl_rlix.nemo_rl.policy import TimeSharedPolicy

    monkeypatch.setattr(lm_policy.ray, "get", lambda futures: futures)
    made: Any = object.__new__(TimeSharedPolicy)
    made._rlix_session = session
    made.worker_group = FakeGroup(session.acts)
    made.cfg = {}
    return made


@pytest.mark.parametrize("prepare", ["prepare_for_lp_inference", "prepare_for_training"])
def test_a_step_begins_with_a_grant(policy: Any, session: FakeSession, prepare: str) -> None:
    getattr(policy, prepare)()
    assert session.acts == ["before", prepare]


@pytest.mark.parametrize(
    "method",
    [
        "train",
        "get_logprobs",
        "get_reference_policy_logprobs",
        "get_topk_logits",
        "offload_before_refit",
        "offload_after_refit",
        "stream_weights_via_ipc_zmq",
        "broadcast_weights_for_collective",
        "calibrate_qkv_fp8_scales",
        "score",
    ],
)
def test_a_use_of_the_gpus_without_a_grant_is_refused(
    policy: Any, session: FakeSession, method: str
) -> None:
    with pytest.raises(GrantRequiredError, match=f"may not {method}"):
        getattr(policy, method)({})
    assert session.acts == []


def test_with_a_grant_the_workers_are_asked(policy: Any, session: FakeSession) -> None:
    session.held = True
    policy.offload_before_refit()
    assert session.acts == ["offload_before_refit"]


def test_there_is_no_group_of_trainer_and_engines(policy: Any, session: FakeSession) -> None:
    assert policy.init_collective("ip", 1, 2, train_world_size=1) == []
    assert session.acts == []


def test_refit_metadata_is_not_asked_for_again(policy: Any, session: FakeSession) -> None:
    policy._rlix_refit_info = {"weight": 1}
    assert policy.prepare_refit_info() == {"weight": 1}
    assert session.acts == []


def test_a_save_is_complete_before_the_gpus_go(
    policy: Any, session: FakeSession, version: NemoRl
) -> None:
    policy.save_checkpoint(weights_path="w")
    finalize = ["finalize_async_save"] if version is NemoRl.MAIN else []
    assert session.acts == ["grant", "save_checkpoint", *finalize, "release"]
    session.acts.clear()
    policy.finalize_async_save()
    assert session.acts == []


def test_a_save_that_failed_is_finalized_later(policy: Any, session: FakeSession) -> None:
    def broken(method: str, *args: Any, **kwargs: Any) -> list[Any]:
        raise RuntimeError("disk full")

    policy.worker_group.run_all_workers_single_data = broken
    with pytest.raises(RuntimeError, match="disk full"):
        policy.save_checkpoint(weights_path="w")
    policy.worker_group = FakeGroup(session.acts)
    session.acts.clear()
    policy.finalize_async_save()
    assert session.acts[0] == "grant" and session.acts[-1] == "release"


def test_the_workers_end_after_the_pipeline_has_left(policy: Any, session: FakeSession) -> None:
    assert policy.shutdown() is True
    assert session.acts == ["leave", "workers end"]


def test_a_half_built_policy_can_be_collected(session: FakeSession) -> None:
    from nemo_rl_rlix.nemo_rl.policy import TimeSharedPolicy

    half: Any = object.__new__(TimeSharedPolicy)
    half.__del__()
    assert session.acts == []


def test_the_constructor_builds_in_its_turn(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl.models.policy import lm_policy

    from nemo_rl_rlix.nemo_rl.policy import TimeSharedPolicy

    made: Any = session

    @contextlib.contextmanager
    def trainer_turn() -> Iterator[None]:
        session.acts.append("turn")
        yield
        session.acts.append("over")

    made.trainer_turn = trainer_turn
    made.bind_trainer = lambda policy: session.acts.append("bind")

    def build(self: Any, *args: Any, name_prefix: str, **kwargs: Any) -> None:
        session.acts.append(f"build {name_prefix}")
        self.worker_group = FakeGroup(session.acts)

    monkeypatch.setattr(lm_policy.Policy, "__init__", build)
    monkeypatch.setattr(lm_policy.ray, "get", lambda futures: [{"w": 1}])
    policy = TimeSharedPolicy(cluster=None, config={}, tokenizer=None)
    assert session.acts == ["turn", "build p1-lm_policy", "bind", "prepare_refit_info", "over"]
    assert policy.prepare_refit_info() == {"w": 1}


# -- synchronizer --------------------------------------------------------------------


def test_the_first_refit_starts_generation_and_later_ones_hand_over(
    session: FakeSession,
) -> None:
    from nemo_rl_rlix.nemo_rl.synchronizer import TimeSharingSynchronizer

    run: Any = session
    synchronizer = TimeSharingSynchronizer(run)
    assert synchronizer.is_stale
    assert synchronizer.sync_weights()["rlix_weights_version"] == 0
    assert not synchronizer.is_stale
    assert synchronizer.sync_weights()["rlix_weights_version"] == 1
    with pytest.raises(SettingError, match="kv_cache_dtype"):
        synchronizer.sync_weights(kv_scales={"layer": 1.0})
    synchronizer.shutdown()
    assert session.acts == ["start", "after", "leave"]


def test_a_refit_goes_through_the_synchronizer(session: FakeSession, version: NemoRl) -> None:
    """NeMo RL's own function, as swapped in the release and unchanged in main."""
    from nemo_rl.algorithms import grpo

    from nemo_rl_rlix.nemo_rl.refit import ask_synchronizer_first
    from nemo_rl_rlix.nemo_rl.synchronizer import TimeSharingSynchronizer

    run: Any = session
    generation = SimpleNamespace(weight_synchronizer=TimeSharingSynchronizer(run))
    refit: Callable[..., Any] = grpo.refit_policy_generation
    if version is NemoRl.V0_7_0:
        refit = ask_synchronizer_first(refit)
    assert refit(None, generation, False)["rlix_weights_version"] == 0
    assert session.acts == ["start"]


# -- clusters ------------------------------------------------------------------------


def cluster(name: str, gpus: int, **more: Any) -> Any:
    """As ``setup`` makes it."""
    from nemo_rl_rlix.nemo_rl.virtual_cluster import SharedVirtualCluster

    return SharedVirtualCluster(
        name=name,
        bundle_ct_per_node_list=[gpus],
        use_gpus=True,
        num_gpus_per_node=gpus,
        max_colocated_worker_groups=1,
        port_range_low=None,
        port_range_high=None,
        segment_size=None,
        node_resource_constraints=None,
        **more,
    )


def test_the_views_follow_the_device_mapping(session: FakeSession) -> None:
    train, infer = cluster("grpo_train_cluster", 1), cluster("grpo_inference_cluster", 4)
    # The policy looks at the bundles before anything asks for the groups.
    assert train._sorted_bundle_indices == [2]
    assert train._init_placement_groups() == ["group"]
    infer._init_placement_groups(strategy="PACK", use_unified_pg=False)
    assert infer._sorted_bundle_indices == [2, 0, 3, 1]
    assert infer.worker_bundles() == [(0, [2]), (0, [0]), (0, [3]), (0, [1])]
    assert infer.world_size() == 4
    # A worker takes a share of a card, so that those of all pipelines fit.
    assert infer.max_colocated_worker_groups == 20
    assert train.port_range_low == infer.port_range_low


def test_a_view_never_removes_the_shared_group(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl.distributed import virtual_cluster

    monkeypatch.setattr(virtual_cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(
        virtual_cluster, "remove_placement_group", lambda group: pytest.fail("removed")
    )
    view = cluster("grpo_train_cluster", 1)
    view._init_placement_groups()
    assert view.shutdown() and view.shutdown()
    assert view._init_placement_groups() == ["group"]
    view.__del__()


def test_a_cluster_of_another_name_is_nemo_rls_own(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nemo_rl.distributed.virtual_cluster import RayVirtualCluster

    monkeypatch.setattr(RayVirtualCluster, "_init_placement_groups", lambda *args: ["own"])
    own = cluster("teachers", 3)
    assert not own.shared and own.max_colocated_worker_groups == 1
    assert own._init_placement_groups() == ["own"]


def test_a_colocated_cluster_is_refused(session: FakeSession) -> None:
    with pytest.raises(SettingError, match="colocated"):
        cluster("grpo_policy_cluster", 4)


def test_sizes_that_do_not_agree_are_refused(session: FakeSession) -> None:
    with pytest.raises(SettingError, match="NeMo RL gives grpo_train_cluster 2 GPUs"):
        cluster("grpo_train_cluster", 2)


@pytest.mark.parametrize("given", [None, [(0, [3, 1])]])
def test_engines_run_on_the_bundles_of_the_mapping(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch, given: list[Any] | None
) -> None:
    from nemo_rl.distributed.worker_groups import RayWorkerGroup

    from nemo_rl_rlix.nemo_rl.worker_group import MappedWorkerGroup

    seen: list[Any] = []
    monkeypatch.setattr(
        RayWorkerGroup,
        "_create_workers_from_bundle_indices",
        lambda self, builder, bundles, env_vars: seen.extend(bundles),
    )
    infer = cluster("grpo_inference_cluster", 4)
    MappedWorkerGroup(infer, "builder", name_prefix="x", bundle_indices_list=given, env_vars={})
    assert seen == (given or infer.worker_bundles())


def test_tied_engines_follow_the_mapping_too(
    session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NeMo RL's own choice of bundles for tensor parallelism, on the view."""
    from nemo_rl.models.generation.vllm import vllm_generation

    shape = {"tensor_parallel": 2, "pipeline_parallel": 1}
    generation: Any = SimpleNamespace(
        sharding_annotations=SimpleNamespace(get_axis_size=shape.__getitem__)
    )
    monkeypatch.setattr(
        vllm_generation.ray.util,
        "placement_group_table",
        lambda group: {"bundles_to_node_id": dict.fromkeys(range(4), "node")},
    )
    infer = cluster("grpo_inference_cluster", 4)
    monkeypatch.setattr(type(infer), "get_placement_groups", lambda self: ["group"])
    infer._init_placement_groups()
    groups = vllm_generation.VllmGeneration._get_tied_worker_bundle_indices(generation, infer)
    assert groups == [(0, [2, 0]), (0, [3, 1])]
