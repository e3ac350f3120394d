"""Device mappings and parallel sizes: a table of refusals, and oracles for the rules."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.topology import (
    INFER_MAPPING,
    INFER_PP,
    INFER_TP,
    TRAIN_CP,
    TRAIN_EP,
    TRAIN_ETP,
    TRAIN_MAPPING,
    TRAIN_PP,
    TRAIN_TP,
    InferenceLayout,
    Parallelism,
    Topology,
    validate_topology,
)


def validate(train, infer, tp=1, gpus=8, per_node=8, **kwargs) -> Topology:
    return validate_topology(
        train_device_mapping=train,
        infer_device_mapping=infer,
        infer_tp=tp,
        num_gpus=gpus,
        gpus_per_node=per_node,
        **kwargs,
    )


def refusal(*args, **kwargs) -> SettingError:
    with pytest.raises(SettingError) as caught:
        validate(*args, **kwargs)
    return caught.value


REFUSED = {
    "no training GPU": (([], [0, 1]), {}, TRAIN_MAPPING, "no GPU"),
    "no inference GPU": (([0], []), {}, INFER_MAPPING, "no GPU"),
    "negative": (([-1], [0, 1]), {}, TRAIN_MAPPING, "[-1] are negative"),
    "twice": (([0], [0, 1, 1]), {}, INFER_MAPPING, "[1] occur twice"),
    "beyond the cluster": (([0], [0, 8, 9]), {}, INFER_MAPPING, "[8, 9] do not exist"),
    "text": (([0], [0, "1"]), {}, INFER_MAPPING, "['1'] are not integers"),
    "truth value": (([True], [0, 1]), {}, TRAIN_MAPPING, "[True] are not integers"),
    "train outside infer": (([0, 2, 3], [0, 1]), {}, TRAIN_MAPPING, "[2, 3] are not inference"),
    "no whole shards": (([0], [0, 1, 2]), {"tp": 2}, INFER_MAPPING, "3 GPUs do not divide"),
    "group with a hole": (([0], [0, 1, 2, 4]), {"tp": 2}, INFER_MAPPING, "[2, 4] of shard 1"),
    "group over a node border": (
        ([1], [1, 2, 5, 6]),
        {"tp": 2, "per_node": 2},
        INFER_MAPPING,
        "[1, 2] of shard 0 cross the border",
    ),
    "many nodes, shifted": (
        ([1], [*range(1, 5), *range(6, 8), 8, 9]),
        {"tp": 4, "per_node": 2, "gpus": 10},
        INFER_MAPPING,
        "[1, 2, 3, 4] of shard 0 are not whole nodes",
    ),
    "many nodes, one left out": (
        ([0], [0, 1, 4, 5]),
        {"tp": 4, "per_node": 2},
        INFER_MAPPING,
        "[0, 1, 4, 5] of shard 0 are not consecutive",
    ),
    "size that RLix has not": (([0], range(6)), {"tp": 3}, INFER_TP, "no size that RLix"),
    "part of a second node": (
        ([0], range(4)),
        {"tp": 4, "per_node": 3, "gpus": 9},
        INFER_TP,
        "without filling them",
    ),
    "tp of zero": (([0], [0, 1]), {"tp": 0}, INFER_TP, "positive"),
    "stages make an odd size": (([0], range(6)), {"infer_pp": 3}, INFER_PP, "no size that RLix"),
    "no free shard": (([0, 1], [0, 1]), {}, INFER_MAPPING, "generation stands still"),
    "no free shard, shards half used": (
        ([0, 2], [0, 1, 2, 3]),
        {"tp": 2},
        INFER_MAPPING,
        "each of the 2 shards",
    ),
    "world not divisible": (
        ([0, 1, 2], range(8)),
        {"parallelism": Parallelism(tp=2)},
        TRAIN_MAPPING,
        "3 GPUs do not divide into replicas of 2",
    ),
    "world smaller than a replica": (
        ([0, 1], range(8)),
        {"parallelism": Parallelism(tp=2, pp=2, cp=2)},
        TRAIN_MAPPING,
        "replicas of 8",
    ),
    "ep does not divide": (
        (range(4), range(8)),
        {"parallelism": Parallelism(ep=3)},
        TRAIN_EP,
        "does not divide",
    ),
    "ep may not take tensor ranks": (
        (range(4), range(8)),
        {"parallelism": Parallelism(tp=2, ep=4)},
        TRAIN_EP,
        "2 with",
    ),
    "ep may not take another stage's ranks": (
        (range(4), range(8)),
        {"parallelism": Parallelism(pp=2, ep=4)},
        TRAIN_EP,
        "the 2 ranks of a pipeline stage",
    ),
    "etp does not divide": (
        (range(4), range(8)),
        {"parallelism": Parallelism(etp=3)},
        TRAIN_ETP,
        "does not divide",
    ),
    "zero tp": (([0], [0, 1]), {"parallelism": Parallelism(tp=0)}, TRAIN_TP, "positive"),
    "zero pp": (([0], [0, 1]), {"parallelism": Parallelism(pp=0)}, TRAIN_PP, "positive"),
    "zero cp": (([0], [0, 1]), {"parallelism": Parallelism(cp=0)}, TRAIN_CP, "positive"),
    "zero ep": (([0], [0, 1]), {"parallelism": Parallelism(ep=0)}, TRAIN_EP, "positive"),
    "zero etp": (([0], [0, 1]), {"parallelism": Parallelism(etp=0)}, TRAIN_ETP, "positive"),
    "no cluster": (([0], [0, 1]), {"gpus": 0}, "cluster.num_gpus", "no GPU"),
    "no node": (([0], [0, 1]), {"per_node": 0}, "cluster.gpus_per_node", "positive"),
    "unlike nodes": (([0], [0, 1]), {"per_node": 3}, "cluster.gpus_per_node", "whole number"),
}


@pytest.mark.parametrize(("args", "kwargs", "setting", "reason"), REFUSED.values(), ids=REFUSED)
def test_refusal_names_setting_value_reason_and_remedy(args, kwargs, setting, reason):
    error = refusal(*args, **kwargs)
    assert error.setting == setting
    assert reason in error.reason
    assert len(error.remedy) > 10
    for part in (error.setting, repr(error.value), error.reason, error.remedy):
        assert part in str(error)


ACCEPTED = {
    "the demo": (([0], [0, 1]), {"gpus": 2, "per_node": 2}, (0,), (1,)),
    "any order": (([3, 2], [3, 1, 0, 2]), {"tp": 2}, (1,), (0,)),
    "not contiguous": (([6], [0, 1, 4, 5, 6, 7]), {"tp": 2}, (2,), (0, 1)),
    "not aligned to its size": (([4], [1, 2, 4, 5]), {"tp": 2}, (1,), (0,)),
    "training in part of a shard": (([1], [0, 1, 2, 3]), {"tp": 2}, (0,), (1,)),
    "training not contiguous": (([0, 5], range(8)), {"tp": 2}, (0, 2), (1, 3)),
    "a shard a node": (([0, 1, 2, 3], range(8)), {"tp": 4, "per_node": 4}, (0,), (1,)),
    "shards of two nodes": (
        (range(4), [0, 1, 2, 3, 8, 9, 10, 11]),
        {"tp": 4, "per_node": 2, "gpus": 12},
        (0,),
        (1,),
    ),
    "three nodes a shard": (
        ([0], range(12)),
        {"tp": 6, "per_node": 2, "gpus": 12},
        (0,),
        (1,),
    ),
    "stages": (([0], range(8)), {"tp": 2, "infer_pp": 2}, (0,), (1,)),
    "shrink to zero": (([0, 1], [0, 1]), {"allow_shrink_to_zero": True}, (0, 1), ()),
    "ep inside dp": (
        (range(4), range(8)),
        {"parallelism": Parallelism(tp=2, ep=2)},
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ),
    "ep inside cp": (
        (range(4), range(8)),
        {"parallelism": Parallelism(tp=1, cp=4, ep=4)},
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ),
    "ep takes tensor ranks with etp 1": (
        (range(4), range(8)),
        {"parallelism": Parallelism(tp=4, ep=4, etp=1)},
        (0, 1, 2, 3),
        (4, 5, 6, 7),
    ),
}


@pytest.mark.parametrize(("args", "kwargs", "overlap", "free"), ACCEPTED.values(), ids=ACCEPTED)
def test_legal_mappings_and_their_overlap(args, kwargs, overlap, free):
    topology = validate(*args, **kwargs)
    assert topology.overlap_shards == overlap
    assert topology.free_shards == free
    assert topology.train_gpus == tuple(sorted(args[0]))


def test_rank_r_holds_the_rth_run_of_the_sorted_mapping():
    layout = InferenceLayout((9, 0, 8, 1, 5, 4), tp=2, gpus_per_node=4)
    assert [layout.shard_gpus(r) for r in range(layout.num_shards)] == [(0, 1), (4, 5), (8, 9)]
    assert layout.shards_on([5, 8]) == (1, 2)
    assert layout.shards_on([2, 3]) == ()
    assert [layout.node_of(g) for g in (0, 3, 4, 9)] == [0, 0, 1, 2]


@pytest.mark.parametrize("dp_rank", [-1, 3])
def test_a_rank_that_does_not_exist_has_no_gpus(dp_rank):
    with pytest.raises(IndexError, match="not one of 0..2"):
        InferenceLayout((0, 1, 2), tp=1, gpus_per_node=4).shard_gpus(dp_rank)


@st.composite
def clusters(draw) -> tuple[int, int]:
    per_node = draw(st.integers(1, 8))
    return per_node * draw(st.integers(1, 4)), per_node


@st.composite
def legal_pipelines(draw):
    """A cluster and a pipeline on it, built from slots that a shard may take."""
    gpus, per_node = draw(clusters())
    inside = [s for s in (1, 2, 4, 8) if s <= per_node]
    spanning = [per_node * n for n in range(2, gpus // per_node + 1)]
    size = draw(st.sampled_from(inside + spanning))
    slots, at = [], 0
    while at + size <= gpus:
        fits = at // per_node == (at + size - 1) // per_node if size <= per_node else True
        fits = fits and (size <= per_node or at % per_node == 0)
        if fits and draw(st.booleans()):
            slots.append(tuple(range(at, at + size)))
            at += size
        else:
            at += 1
    if not slots:
        slots = [tuple(range(size))]
    infer = draw(st.permutations([g for slot in slots for g in slot]))
    train = draw(st.lists(st.sampled_from(infer), min_size=1, unique=True))
    return gpus, per_node, size, slots, infer, train


@given(legal_pipelines())
def test_every_legal_pipeline_is_accepted_and_its_ranks_are_its_slots(case):
    gpus, per_node, size, slots, infer, train = case
    topology = validate(train, infer, size, gpus, per_node, allow_shrink_to_zero=True)
    layout = topology.inference
    assert [layout.shard_gpus(r) for r in range(layout.num_shards)] == slots
    touched = tuple(r for r, slot in enumerate(slots) if set(slot) & set(train))
    assert topology.overlap_shards == touched
    assert sorted(touched + topology.free_shards) == list(range(len(slots)))
    if topology.free_shards:
        assert validate(train, infer, size, gpus, per_node) == topology
    else:
        assert "allow_shrink_to_zero" in refusal(train, infer, size, gpus, per_node).remedy


def rlix_registers(mapping: list[int], size: int, per_node: int) -> bool:
    """RLix's registration rules for one cluster, written down a second time."""
    ids = sorted(mapping)
    if len(ids) % size or (size not in (1, 2, 4, 8) and size % per_node):
        return False
    groups = [ids[i : i + size] for i in range(0, len(ids), size)]
    for first, last in ((g[0], g[-1]) for g in groups):
        if last - first != size - 1:
            return False
        whole = first % per_node == 0 and (last + 1) % per_node == 0
        if not (first // per_node == last // per_node if size <= per_node else whole):
            return False
    return True


@given(clusters(), st.data())
def test_what_is_accepted_is_what_rlix_registers(cluster, data):
    gpus, per_node = cluster
    size = data.draw(st.integers(1, 9))
    infer = data.draw(st.lists(st.integers(0, gpus - 1), min_size=1, unique=True))
    try:
        validate([infer[0]], infer, size, gpus, per_node, allow_shrink_to_zero=True)
        accepted = True
    except SettingError as error:
        accepted = False
        assert error.setting in (INFER_MAPPING, INFER_TP)
    assert accepted == rlix_registers(infer, size, per_node)


@given(
    replicas=st.integers(1, 4),
    spare=st.sampled_from([0, 0, 0, 1]),
    tp=st.integers(1, 4),
    pp=st.integers(1, 4),
    cp=st.integers(1, 4),
    ep=st.integers(1, 8),
    etp=st.none() | st.integers(1, 4),
)
def test_parallel_sizes_are_accepted_as_megatron_accepts_them(replicas, spare, tp, pp, cp, ep, etp):
    world = replicas * tp * pp * cp + spare
    # initialize_model_parallel: both grids, dense and expert, divide the world.
    megatron = world % (tp * pp * cp) == 0 and world % ((etp or tp) * ep * pp) == 0
    sizes = Parallelism(tp=tp, pp=pp, cp=cp, ep=ep, etp=etp)
    try:
        validate(range(world), range(world + 1), 1, 512, 512, parallelism=sizes)
        accepted = True
    except SettingError as error:
        accepted = False
        assert error.setting in (TRAIN_MAPPING, TRAIN_EP, TRAIN_ETP)
    assert accepted == megatron


@given(
    train=st.lists(st.integers(-2, 10), max_size=6),
    infer=st.lists(st.integers(-2, 10), max_size=10),
    tp=st.integers(-1, 9),
    per_node=st.integers(0, 9),
)
def test_any_input_ends_in_a_topology_or_a_setting_error(train, infer, tp, per_node):
    try:
        topology = validate(train, infer, tp, 8, per_node)
    except SettingError as error:
        assert error.setting and error.reason and error.remedy
    else:
        assert topology.free_shards
        assert set(topology.train_gpus) <= set(topology.inference.device_mapping)
