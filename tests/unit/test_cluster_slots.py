"""Numbering of logical GPUs, names and CPU shares."""

from __future__ import annotations

import pickle
import random
import re

import pytest

from nemo_rl_rlix.cluster.names import PipelineNames, new_pipeline_id
from nemo_rl_rlix.cluster.slots import (
    GpuMismatchError,
    GpuSlot,
    PhysicalGpu,
    cpu_share,
    map_explicitly,
    order_slots,
)
from nemo_rl_rlix.errors import SettingError


def bundle(index, node, device):
    return GpuSlot(-1, node, -1, index, "group", device)


def test_ids_follow_node_then_card_in_whatever_order_ray_placed_them():
    bundles = [bundle(i, "ba"[i % 2], str(i // 2)) for i in range(24)]
    expected = order_slots(bundles)
    random.Random(1).shuffle(bundles)
    assert order_slots(bundles) == expected
    assert [slot.gpu_id for slot in expected] == list(range(24))
    assert [slot.node_rank for slot in expected] == [0] * 12 + [1] * 12
    assert [slot.physical_id for slot in expected[:12]] == [str(i) for i in range(12)]


def test_one_card_can_stand_for_two_ids():
    slots = order_slots([bundle(0, "a", "3"), bundle(1, "b", "0")])
    mapped = map_explicitly(slots, {0: PhysicalGpu(0, "3"), 1: PhysicalGpu(0, "3")})
    assert [(slot.gpu_id, slot.bundle_index) for slot in mapped] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(
    ("physical", "message"),
    [
        ({0: PhysicalGpu(0, "7")}, "0/3, 1/0"),
        ({1: PhysicalGpu(0, "3")}, "0 to n-1"),
        ({0: PhysicalGpu(2, "3")}, "no such card"),
    ],
)
def test_wrong_maps_are_refused(physical, message):
    slots = order_slots([bundle(0, "a", "3"), bundle(1, "b", "0")])
    with pytest.raises(SettingError, match=message):
        map_explicitly(slots, physical)


@pytest.mark.parametrize(
    ("nodes", "share"),
    [
        ([{"CPU": 8, "GPU": 2}], 2),
        ([{"CPU": 192, "GPU": 8}, {"CPU": 64, "GPU": 8}], 4),
        ([{"CPU": 192, "GPU": 8}, {"CPU": 64}], 12),
        ([{"CPU": 2, "GPU": 2}], 0),
        ([{"GPU": 2}], 0),
        ([], 0),
    ],
)
def test_cpu_share(nodes, share):
    assert cpu_share(nodes) == share


def test_mismatch_names_both_and_survives_pickling():
    error = pickle.loads(pickle.dumps(GpuMismatchError("w", ("n1", "0"), ("n2", ("1", "3")))))
    assert error.expected == ("n1", "0")
    assert "GPU 0 of node n1" in str(error)
    assert "GPUs 1, 3 of node n2" in str(error)


def test_two_pipelines_of_one_recipe_share_no_name():
    first, second = (PipelineNames(new_pipeline_id("my run:1")) for _ in range(2))
    assert re.fullmatch(r"my_run_1_[0-9a-f]{12}", first.pipeline_id)
    assert first.namespace != second.namespace
    assert first.actor("shard", 0) != second.actor("shard", 0)
    assert first.actor("shard", 0) != first.actor("shard", 1) != first.actor("trainer")
    assert first.options("shard", 1) == {
        "name": f"rlix:shard:{first.pipeline_id}:1",
        "namespace": f"pipeline_{first.pipeline_id}_NS",
    }
