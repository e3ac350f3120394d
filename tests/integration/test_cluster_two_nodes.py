"""Logical GPUs over two nodes, simulated by two raylets on this machine."""

from __future__ import annotations

import os
import shutil
import tempfile

import pytest
import ray
from ray.cluster_utils import Cluster

from nemo_rl_rlix.cluster.placement import SharedCluster, shutdown_placement
from nemo_rl_rlix.errors import SettingError

pytestmark = pytest.mark.ray


class Worker:
    pass


@pytest.fixture(scope="module")
def two_nodes():
    temp_dir = tempfile.mkdtemp(prefix="nrr-", dir="/tmp")
    memory = 100 * 1024 * 1024
    cluster = Cluster()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_worker_niceness", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.setenv("PYTHONPATH", os.path.dirname(__file__))
        try:
            cluster.add_node(
                num_cpus=2,
                num_gpus=1,
                object_store_memory=memory,
                include_dashboard=False,
                temp_dir=temp_dir,
            )
            cluster.add_node(num_cpus=2, num_gpus=2, object_store_memory=memory)
            ray.init(address=cluster.address, log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(temp_dir, ignore_errors=True)


def test_ids_are_contiguous_on_each_node_and_workers_land_there(two_nodes):
    cluster = SharedCluster.connect("p")
    ranks = [slot.node_rank for slot in cluster.gpus]
    assert ranks == sorted(ranks)
    sizes = {rank: ranks.count(rank) for rank in ranks}
    assert sorted(sizes.values()) == [1, 2]
    for slot in cluster.gpus:
        options = cluster.actor_options([slot.gpu_id], gpu_fraction=0.3)
        worker = ray.remote(Worker).options(**options).remote()
        cluster.verify_worker(worker, slot)
    with pytest.raises(SettingError, match="several nodes"):
        cluster.actor_options([0, 1, 2], gpu_fraction=0.3)
    shutdown_placement()
