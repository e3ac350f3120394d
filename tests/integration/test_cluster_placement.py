"""Shared placement groups on real Ray."""

from __future__ import annotations

import pickle

import pytest
import ray

from nemo_rl_rlix.cluster.placement import SharedCluster, shutdown_placement
from nemo_rl_rlix.cluster.slots import GpuMismatchError, PhysicalGpu
from nemo_rl_rlix.errors import DeadlineExceededError, SettingError

pytestmark = pytest.mark.ray


class Worker:
    pass


@pytest.fixture
def placement(ray_cluster):
    yield
    shutdown_placement()


def test_two_bundles_two_actors_each(placement):
    first = SharedCluster.connect("p1")
    second = pickle.loads(pickle.dumps(SharedCluster.connect("p2")))
    assert first.gpus == second.gpus
    assert [slot.physical_id for slot in first.gpus] == ["0", "1"]
    workers = {
        (cluster.user, gpu): ray.remote(Worker)
        .options(**cluster.actor_options([gpu], gpu_fraction=0.4))
        .remote()
        for cluster in (first, second)
        for gpu in (0, 1)
    }
    for (_, gpu), worker in workers.items():
        first.verify_worker(worker, first.gpus[gpu])
    with pytest.raises(GpuMismatchError, match=r"should be on GPU 1 .* but has GPUs 0"):
        first.verify_worker(workers["p1", 0], first.gpus[1])
    stray = ray.remote(Worker).options(num_cpus=0).remote()
    with pytest.raises(GpuMismatchError, match="has GPUs none"):
        first.verify_worker(stray, first.gpus[0])

    first.release()
    assert ray.available_resources().get("GPU", 0) == 0, "p2 still uses them"
    second.release()
    again = SharedCluster.connect(
        "p3", explicit_physical_map={0: PhysicalGpu(0, "1"), 1: PhysicalGpu(0, "1")}
    )
    assert [slot.physical_id for slot in again.gpus] == ["1", "1"]
    with pytest.raises(SettingError, match="no such logical GPU"):
        again.actor_options([2], gpu_fraction=0.1)
    with pytest.raises(SettingError, match="made with 2 GPUs"):
        SharedCluster.connect("p4", num_gpus=3)


def test_gpus_that_are_not_there_or_not_free(placement):
    with pytest.raises(SettingError, match="has 2 GPUs"):
        SharedCluster.connect("p", num_gpus=3)
    hog = ray.remote(Worker).options(num_gpus=1).remote()
    ray.get(hog.__ray_ready__.remote(), timeout=30)
    with pytest.raises(DeadlineExceededError, match="holds some"):
        SharedCluster.connect("p", timeout_s=0.5)
    ray.kill(hog)
    assert len(SharedCluster.connect("p").gpus) == 2
