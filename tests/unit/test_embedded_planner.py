"""The embedded planner: tables of situations, then properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planner_world import World, layout

from nemo_rl_rlix.control_plane.embedded.planner import PlanError, make_plan, validate_plan
from nemo_rl_rlix.control_plane.embedded.shares import Claim, fair_targets, gain
from nemo_rl_rlix.control_plane.embedded.snapshot import Grant, PipelineLayout, Plan
from nemo_rl_rlix.control_plane.protocol import PipelineSpec, Priority
from nemo_rl_rlix.errors import SettingError

INIT, TRAIN, CRITIC, GEN = (
    Priority.INITIALIZATION,
    Priority.ACTOR_TRAINING,
    Priority.CRITIC_TRAINING,
    Priority.GENERATION,
)


def two(**more):
    return World(layout("p1", [0, 1], [0]), layout("p2", [0, 1], [1]), **more)


# --- the sequence of two pipelines on two GPUs ---------------------------


def test_sequence_of_two_pipelines():
    world = two()
    for pid in ("p1", "p2"):
        for cluster in ("actor_train", "actor_infer"):
            world.request(pid, cluster, INIT)
            world.settle()
            world.release(pid, cluster)
    assert not [entry for entry in world.log if entry[0] != "grant"]
    world.log.clear()

    world.generate("p1")
    world.settle()
    assert world.log == [("expand", "p1", (0, 1)), ("grant", "p1", "actor_infer", (0, 1))]
    world.generate("p2")
    world.settle()
    assert world.active("p1") == [1]
    assert world.active("p2") == [0]

    world.request("p1", "actor_train", TRAIN)
    world.settle()
    assert world.active("p2") == []
    assert world.views["p1"].held == {"actor_train"}
    assert world.active("p1") == [1]

    world.release("p1")
    world.settle()
    assert world.active("p2") == [0]

    world.set("p1", wants_generation=False, demand=0)
    world.settle()
    assert world.active("p1") == []
    assert world.active("p2") == [0, 1]


# --- training requests ---------------------------------------------------


def test_training_preempts_generation_of_anyone_and_is_granted_when_it_is_gone():
    world = World(layout("p1", [0, 1, 2], [0, 1]), layout("p2", [0, 1, 2], [2]))
    world.generate("p1")
    world.generate("p2")
    world.settle()
    world.request("p1", "actor_train", TRAIN)
    plan = world.start()
    assert not plan.grants
    taken = {world.views[p].layout.shards[r][0] for p, rs in plan.shrinks.items() for r in rs}
    assert taken >= {0, 1}
    assert world.start().empty, "no act while the shrinks run"
    world.finish()
    assert [grant.gpus for grant in world.step().grants] == [(0, 1)]


def test_priority_then_arrival():
    world = World(*(layout(p, [0], [0]) for p in ("a", "b", "c")))
    world.request("a", "actor_train", CRITIC)
    world.request("b", "actor_train", TRAIN)
    world.request("c", "actor_train", TRAIN)
    order = []
    for _ in range(3):
        world.settle()
        (holder,) = [pid for pid, view in world.views.items() if view.held]
        order.append(holder)
        world.release(holder)
    assert order == ["b", "c", "a"]


def test_training_is_not_preempted_by_initialization():
    world = two()
    world.request("p1", "actor_train", TRAIN)
    world.settle()
    world.request("p2", "actor_infer", INIT)
    assert world.step().empty


def test_blocked_request_shrinks_nobody_and_reserves():
    big, small = layout("big", [0, 1, 2], [0, 1]), layout("small", [0, 1, 2], [0])
    other = layout("other", [0, 1, 2], [1])
    world = World(big, small, other)
    world.generate("other", demand=9)
    world.settle()
    world.request("small", "actor_train", TRAIN)
    world.settle()
    assert world.active("other") == [1, 2]
    world.request("big", "actor_train", TRAIN)
    plan = world.step()
    assert plan.empty, "GPU 0 is held: taking the shard on GPU 1 would help nobody"
    assert "held by small_actor_train" in plan.blocked["big_actor_train@ACTOR_TRAINING"]
    world.request("other", "actor_train", TRAIN)
    plan = world.step()
    assert plan.empty, "a later, smaller request does not overtake the large one"
    assert "reserved" in plan.blocked["other_actor_train@ACTOR_TRAINING"]
    world.release("small")
    world.settle()
    assert world.views["big"].held == {"actor_train"}


def test_large_mapping_does_not_starve_between_two_small_ones():
    world = World(layout("big", [0, 1], [0, 1]), layout("s0", [0], [0]), layout("s1", [1], [1]))
    world.request("s0", "actor_train", TRAIN)
    world.request("s1", "actor_train", TRAIN)
    world.settle()
    world.request("big", "actor_train", TRAIN)
    for pid in ("s0", "s1"):
        world.release(pid)
        world.request(pid, "actor_train", TRAIN)
        world.settle()
    assert world.views["big"].held == {"actor_train"}


def test_reservation_never_blocks_a_pipeline_that_the_reserving_one_waits_for():
    world = World(layout("holder", [0, 1], [0], critic=(1,)), layout("waiter", [0, 1], [0, 1]))
    world.request("holder", "actor_train", TRAIN)
    world.settle()
    world.request("waiter", "actor_train", TRAIN)
    world.request("holder", "critic", CRITIC)
    world.settle()
    assert world.views["holder"].held == {"actor_train", "critic"}


def test_idle_reserved_gpu_serves_only_who_has_nothing():
    world = World(
        layout("trainer", [0], [0]), layout("waiter", [0, 1, 2], [0, 1]), layout("gen", [1, 2], [2])
    )
    world.request("trainer", "actor_train", TRAIN)
    world.settle()
    world.request("waiter", "actor_train", TRAIN)
    world.generate("gen")
    world.settle()
    assert world.active("gen") == [1], "GPU 2 is free; GPU 1 is kept for the waiter"
    world.request("gen", "actor_train", TRAIN)
    world.settle()
    assert world.views["gen"].held == {"actor_train"}
    assert world.active("gen") == [0], "with nothing else, a reserved GPU may be lent"


def test_request_waits_for_a_running_expand_and_takes_it_then():
    world = two()
    world.generate("p1")
    world.start()
    world.request("p2", "actor_train", TRAIN)
    plan = world.start()
    assert not plan.shrinks and not plan.grants
    world.finish("p1")
    assert world.step().shrinks == {"p1": (1,)}
    assert [g.pipeline_id for g in world.step().grants] == ["p2"]


def test_no_second_shrink_while_one_runs():
    world = World(layout("p", [0, 1]), layout("a", [0], [0]), layout("b", [1], [1]))
    world.generate("p")
    world.settle()
    world.request("a", "actor_train", TRAIN)
    assert world.start().shrinks == {"p": (0,)}
    world.request("b", "actor_train", TRAIN)
    assert world.start().empty
    world.finish("p")
    assert world.start().shrinks == {"p": (1,)}


def test_gpus_of_an_ended_pipeline_are_nobodys():
    world = two()
    world.generate("p1")
    world.request("p2", "actor_train", TRAIN)
    snapshot = replace(world.snapshot(), lost_gpus=frozenset({1}))
    plan = make_plan(snapshot)
    assert plan.expands == {"p1": (0,)}
    assert not plan.grants
    assert "being ended" in plan.blocked["p2_actor_train@ACTOR_TRAINING"]


# --- generation shares ---------------------------------------------------


@pytest.mark.parametrize(
    ("gpus", "demands", "expected"),
    [
        (2, {"a": 8, "b": 2}, {"a": 1, "b": 1}),
        (4, {"a": 8, "b": 2}, {"a": 3, "b": 1}),
        (8, {"a": 8, "b": 8}, {"a": 4, "b": 4}),
        (8, {"a": 30, "b": 10}, {"a": 6, "b": 2}),
        (4, {"a": 1000, "b": 1}, {"a": 3, "b": 1}),
        (4, {"a": 2, "b": 0}, {"a": 2, "b": 0}),
        (3, {"a": 9, "b": None}, {"a": 2, "b": 1}),
        (3, {"a": None}, {"a": 3}),
        (6, {"a": 10, "b": 10, "c": 10}, {"a": 2, "b": 2, "c": 2}),
    ],
)
def test_shares(gpus, demands, expected):
    """From rest and from one pipeline that had everything, the same shares follow."""
    for first in demands:
        world = World(*(layout(pid, range(gpus)) for pid in demands))
        if demands[first] != 0:
            world.generate(first, demands[first])
            world.settle()
        for pid, demand in demands.items():
            if pid != first and demand != 0:
                world.generate(pid, demand)
        world.settle()
        assert {pid: len(world.active(pid)) for pid in demands} == expected, first


def test_weight_and_tp_count():
    world = World(layout("a", range(8), tp=2), layout("b", range(8), tp=1, weight=2.0))
    world.generate("a", 10)
    world.generate("b", 10)
    world.settle()
    assert len(world.active("a")) == 2
    assert len(world.active("b")) == 4


def test_idle_gpus_come_before_donors():
    world = World(layout("a", [0, 1]), layout("b", [1, 2]))
    world.generate("a")
    world.settle()
    world.generate("b")
    plan = world.start()
    assert plan.expands == {"b": (1,)}
    assert not plan.shrinks


def test_first_donor_is_the_one_without_demand():
    world = World(layout("idle", [0, 1]), layout("busy", [2, 3]), layout("new", [0, 1, 2, 3]))
    world.generate("idle")
    world.generate("busy")
    world.settle()
    world.set("idle", demand=0)
    assert world.step().empty, "nobody else wants them: it keeps its shards"
    world.generate("new")
    plan = world.step()
    assert set(plan.shrinks) == {"idle"}


def test_silent_holder_is_neither_skipped_nor_a_hog():
    world = World(layout("silent", range(4)), layout("loud", range(4)))
    world.generate("silent", demand=None)
    world.settle()
    assert len(world.active("silent")) == 4
    world.generate("loud", demand=8)
    world.settle()
    assert (len(world.active("silent")), len(world.active("loud"))) == (1, 3)
    world.set("loud", wants_generation=False, demand=0)
    world.settle()
    assert len(world.active("silent")) == 4


def test_small_differences_move_nothing():
    world = World(layout("a", range(8)), layout("b", range(8)))
    world.generate("a", 100)
    world.generate("b", 100)
    world.settle()
    for demand in (99, 90, 85, 95, 100, 88):
        world.set("b", demand=demand)
        assert world.step().empty
    world.set("b", demand=30)
    assert world.step().shrinks


def test_a_switch_that_gains_one_what_it_costs_the_other_is_not_made():
    world = World(layout("a", range(4)), layout("b", range(4)))
    for pid, ranks in (("a", {0, 1}), ("b", {2, 3})):
        world.set(pid, wants_generation=True, demand=50, active=frozenset(ranks))
    world.set("a", demand=65)
    world.set("b", demand=35)  # targets 2.6 and 1.4
    assert world.step().empty
    world.set("b", demand=20)
    assert [len(ranks) for ranks in world.step().shrinks.values()] == [1]


def test_more_pipelines_than_gpus_take_turns():
    pids = [f"p{i}" for i in range(5)]
    world = World(*(layout(pid, [0, 1]) for pid in pids))
    for pid in pids:
        world.generate(pid)
    served = dict.fromkeys(pids, 0)
    for _ in range(20):
        world.settle()
        for pid in pids:
            served[pid] += len(world.active(pid))
        world.now += 31
    assert sum(served.values()) == 40
    assert max(served.values()) - min(served.values()) <= 1


def test_shard_of_two_gpus_is_taken_from_two_donors_and_the_rest_is_handed_out():
    world = World(layout("a", [0, 1, 2, 3]), layout("b", [0, 1, 2, 3], tp=2))
    world.generate("a", 4)
    world.settle()
    world.generate("b", 4)
    world.settle()
    assert len(world.active("b")) == 1
    assert len(world.active("a")) == 2
    # and the other way round: one small shard frees two GPUs, both find a user
    world = World(layout("b", [0, 1, 2, 3], tp=2), layout("a", [0, 1, 2, 3]))
    world.generate("b", 4)
    world.settle()
    world.generate("a", 4)
    world.settle()
    assert len(world.active("b")) == 1
    assert len(world.active("a")) == 2


def test_freed_gpu_goes_to_whom_it_was_freed_for():
    world = World(layout("donor", [0, 1, 2, 3]), layout("new", [0]), layout("late", [0, 1]))
    world.generate("donor", 8)
    world.settle()
    world.generate("new")
    assert world.start().shrinks == {"donor": (0,)}
    world.generate("late", 1000)
    world.start()
    world.finish()
    world.settle()
    assert world.active("new") == [0]
    assert world.active("late") == [1]


def test_freed_gpu_is_not_diverted_by_a_demand_that_grows_meanwhile():
    world = World(layout("a", range(6)), layout("b", range(6)), layout("c", range(6)))
    for pid, ranks in (("a", {0, 1, 2, 3}), ("b", {4}), ("c", {5})):
        world.set(pid, wants_generation=True, demand=10, active=frozenset(ranks))
    world.set("b", demand=20)
    plan = world.start()
    assert set(plan.shrinks) == {"a"}
    world.set("c", demand=12)
    world.start()
    world.finish()
    world.start()
    assert world.views["b"].expanding == set(plan.promised["b"])


def test_pending_request_without_demand_is_served():
    world = two()
    world.generate("p1", 8)
    world.settle()
    world.generate("p2", 0)
    world.start()
    world.finish()
    world.start()
    world.finish()
    assert world.active("p2")
    assert ("grant", "p2", "actor_infer", (0,)) in world.log or world.step().grants


def test_own_training_gpu_is_the_last_choice():
    world = World(layout("a", [0, 1], [0]), layout("b", [0, 1], [1]))
    world.generate("a")
    world.generate("b")
    world.settle()
    assert (world.active("a"), world.active("b")) == ([1], [0])


# --- shares as numbers ---------------------------------------------------


def test_fair_targets_respect_floors_and_caps():
    targets = fair_targets({"a": Claim(8, 1, 8), "b": Claim(2, 1, 8)}, 2)
    assert targets == {"a": 1, "b": 1}
    targets = fair_targets({"a": Claim(90, 1, 2), "b": Claim(10, 1, 8)}, 8)
    assert targets["a"] == pytest.approx(2)
    assert targets["b"] == pytest.approx(6)
    assert fair_targets({}, 4) == {}


@given(
    st.lists(
        st.tuples(st.just(0.0) | st.floats(1e-3, 1e6), st.integers(0, 4), st.integers(0, 64)),
        max_size=12,
    ),
    st.integers(0, 200),
)
def test_targets_never_exceed_the_budget_unless_the_floors_do(rows, budget):
    claims = {str(i): Claim(w, f, f + more) for i, (w, f, more) in enumerate(rows)}
    targets = fair_targets(claims, budget)
    floors = sum(claim.floor for claim in claims.values())
    assert sum(targets.values()) <= max(budget, floors) + 1e-6
    assert all(claims[p].floor <= t <= claims[p].cap + 1e-9 for p, t in targets.items())


def test_gain_of_a_surplus_is_nothing():
    assert gain(5, 1, 4) == 0
    assert gain(5, -1, 4) == 0
    assert gain(3, 1, 4) > 0 > gain(4, -1, 4)


# --- registration and validation -----------------------------------------


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"pipeline_id": "a:b"}, "pipeline_id"),
        ({"device_mappings": {"actor_train": (0,)}}, "device_mappings"),
        ({"tp_sizes": {"actor_infer": 1}}, "tp_sizes"),
        ({"tp_sizes": {"actor_infer": 3, "actor_train": 1}}, "tp_sizes.actor_infer"),
        ({"device_mappings": {"actor_infer": (0, 0), "actor_train": (0,)}}, "actor_infer"),
        ({"device_mappings": {"actor_infer": (), "actor_train": (0,)}}, "actor_infer"),
        ({"device_mappings": {"actor_infer": (0, 4), "actor_train": (0,)}}, "actor_infer"),
        ({"priority_weight": 0.0}, "priority_weight"),
        ({"priority_weight": float("nan")}, "priority_weight"),
        ({"priority_weight": float("inf")}, "priority_weight"),
    ],
)
def test_registrations_that_are_refused(changes, setting):
    spec = PipelineSpec(
        "p",
        "ns",
        {"actor_infer": (0, 1), "actor_train": (0,)},
        {"actor_infer": 1, "actor_train": 1},
    )
    PipelineLayout.of(spec, 4)
    with pytest.raises(SettingError) as refusal:
        PipelineLayout.of(replace(spec, **changes), 4)
    assert setting in refusal.value.setting


def test_ranks_follow_the_sorted_mapping():
    assert layout("p", [5, 1, 4, 0], tp=2).shards == ((0, 1), (4, 5))


@pytest.mark.parametrize(
    "plan",
    [
        Plan(shrinks={"p1": (1,)}),
        Plan(shrinks={"p1": (0, 0)}),
        Plan(shrinks={"ghost": (0,)}),
        Plan(expands={"p1": (0,)}),
        Plan(expands={"p2": (0,)}),
        Plan(expands={"p1": (7,)}),
        Plan(expands={"p1": (1,), "p2": (1,)}),
        Plan(grants=(Grant("p2", "actor_train", TRAIN, (1,)),)),
        Plan(grants=(Grant("p1", "actor_train", TRAIN, (0,)),)),
        Plan(grants=(Grant("p2", "actor_infer", GEN, (0,)),)),
        Plan(grants=(Grant("p2", "actor_infer", GEN, ()),)),
    ],
)
def test_impossible_plans_are_caught(plan):
    world = two()
    for pid in ("p1", "p2"):
        world.set(pid, demand=8, wants_generation=True)
    world.set("p1", active=frozenset({0}))
    world.request("p1", "actor_train", TRAIN)
    world.request("p2", "actor_infer", GEN)
    with pytest.raises(PlanError):
        validate_plan(world.snapshot(), plan)


# --- properties ----------------------------------------------------------


@st.composite
def worlds(draw, max_gpus=8):
    gpus = draw(st.integers(1, max_gpus))
    pipelines = []
    for index in range(draw(st.integers(1, 5))):
        tp = draw(st.sampled_from([1, 1, 2])) if gpus > 1 else 1
        shards = draw(st.integers(1, gpus // tp))
        start = draw(st.integers(0, gpus - shards * tp))
        infer = range(start, start + shards * tp)
        train = draw(st.lists(st.integers(0, gpus - 1), unique=True, max_size=3))
        weight = draw(st.sampled_from([1.0, 1.0, 3.0]))
        pipelines.append(layout(f"p{index}", infer, train, tp=tp, weight=weight))
    return World(*pipelines)


def _act(world, data):
    pid = data.draw(st.sampled_from(sorted(world.views)))
    view = world.views[pid]
    act = data.draw(
        st.sampled_from(["generate", "train", "release", "demand", "stop", "tick", "finish"])
    )
    pending = {request.cluster for request in view.pending}
    if act == "generate" and not view.held & {"actor_infer"} and "actor_infer" not in pending:
        world.generate(pid, data.draw(st.sampled_from([None, 1, 5, 40])))
    elif (
        act == "train"
        and view.layout.clusters.get("actor_train")
        and "actor_train" not in (pending | view.held)
    ):
        world.request(pid, "actor_train", data.draw(st.integers(0, 5)))
    elif act == "release" and view.held:
        world.release(pid, sorted(view.held)[0])
    elif act == "demand" and view.wants_generation and "actor_infer" not in pending:
        world.set(pid, demand=data.draw(st.sampled_from([None, 0, 1, 5, 40, 400])))
    elif act == "stop" and "actor_infer" not in pending:
        world.set(pid, wants_generation=False, demand=0)
    elif act == "tick":
        world.now += data.draw(st.sampled_from([1.0, 31.0]))
    elif act == "finish":
        world.finish(pid)


QUICK = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


@QUICK
@given(worlds(), st.data())
def test_any_history_keeps_every_plan_valid_and_comes_to_rest(world, data):
    """No GPU twice, all-or-nothing, and rest: then nothing moves any more."""
    for _ in range(data.draw(st.integers(1, 12))):
        _act(world, data)
        world.start()  # validates
    world.finish()
    world.settle(limit=8)
    assert world.start().empty


@QUICK
@given(worlds(), st.data())
def test_one_disturbance_is_answered_without_going_back_and_forth(world, data):
    """After one change, no shard is taken and given back (or the reverse)."""
    for _ in range(data.draw(st.integers(1, 8))):
        _act(world, data)
    world.settle(limit=8)
    world.log.clear()
    _act(world, data)
    world.settle(limit=8)
    moves = [
        (kind, pid, rank) for kind, pid, ranks, *_ in world.log if kind != "grant" for rank in ranks
    ]
    for pid in world.views:
        for rank in range(len(world.views[pid].layout.shards)):
            seen = [kind for kind, *shard in moves if shard == [pid, rank]]
            assert len(seen) <= 1, (pid, rank, world.log)


@QUICK
@given(worlds(), st.data())
def test_whoever_wants_a_shard_gets_one_in_bounded_time(world, data):
    for _ in range(data.draw(st.integers(0, 8))):
        _act(world, data)
    for pid, view in world.views.items():
        world.set(pid, pending=(), held=frozenset())
        if data.draw(st.booleans()) and not view.pending:
            world.generate(pid, data.draw(st.sampled_from([None, 1, 50])))
    hungry = {pid for pid, view in world.views.items() if view.eager}
    fed = set()
    for _ in range(3 * len(world.views) + 3):
        world.settle(limit=8)
        fed |= {pid for pid in hungry if world.views[pid].active}
        world.now += 31
    assert fed == hungry


@QUICK
@given(worlds(), st.data())
def test_every_training_request_is_granted_in_bounded_time(world, data):
    asked = []
    for _ in range(data.draw(st.integers(1, 15))):
        _act(world, data)
        world.step()
    for pid, view in world.views.items():
        asked += [(pid, r.cluster) for r in view.pending if r.priority is not GEN]
    for _ in range(4 * len(world.views)):
        world.settle(limit=8)
        for pid, view in list(world.views.items()):
            if view.held:
                world.release(pid, sorted(view.held)[0])
                break
    assert all(r.priority is GEN for pid, _ in asked for r in world.views[pid].pending)
