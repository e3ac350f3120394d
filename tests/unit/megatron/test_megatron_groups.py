"""Taking groups down and up again, in gloo worlds of several processes."""

import group_programs as programs
import pytest
from fakes.ranks import preload, run_ranks, values

preload("torch.distributed", "group_programs")

TP2 = [[[0, 1]]]
TP2_PP2 = [[[0, 1], [2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]], [[0, 1, 2, 3]]]


@pytest.mark.parametrize(("world", "partitions"), [(2, TP2), (4, TP2_PP2)])
def test_every_handle_works_after_each_of_three_generations(
    world: int, partitions: list[list[list[int]]]
) -> None:
    for found in values(run_ranks(programs.cycles, world, partitions, 3, timeout_s=90)):
        assert found["freed"] == [True] * 3, "something holds the inner group"
        threads, files, groups = zip(*found["up"], strict=True)
        # Gloo opens connections between pairs as it needs them: the first generation
        # may have fewer, none may have more than the one after the first.
        assert max(threads[1:]) <= max(threads[:2]) and max(files[1:]) <= max(files[:2]), found
        assert len(set(groups)) == 1, found
        assert len(set(found["down"])) == 1, found
        assert found["down"][0][0] < threads[1] and found["down"][0][1] < files[1], found


def test_collective_while_down_names_the_group_and_the_remedy() -> None:
    for errors, total in values(run_ranks(programs.down_errors, 2)):
        assert [name for name, _ in errors] == ["GroupDownError"] * 2
        assert "TENSOR_MODEL_PARALLEL_GROUP" in errors[0][1]
        assert "allreduce" in errors[0][1] and "actor_train" in errors[0][1]
        assert total == 2.0


@pytest.mark.parametrize("moment", ["destroy", "reinit"])
def test_dead_peer_ends_in_bounded_time_and_is_named(moment: str) -> None:
    outcomes = run_ranks(programs.dead_peer, 4, 3, moment, timeout_s=60)
    assert not outcomes[3].ended
    for name, ranks, seconds, up in values(outcomes[:3]):
        assert (name, ranks) == ("PeersMissingError", [3])
        assert seconds < 6.0
        assert not any(up)


def test_dead_holder_of_the_store_ends_in_bounded_time() -> None:
    outcomes = run_ranks(programs.dead_peer, 4, 0, "destroy", timeout_s=60)
    for name, _, seconds, up in values(outcomes[1:]):
        assert name == "PeersMissingError"
        assert seconds < 6.0
        assert not any(up)


def test_warm_up_that_hangs_ends_at_the_deadline() -> None:
    name, seconds, up = values(run_ranks(programs.lost_in_warm_up, 2, timeout_s=40)[:1])[0]
    assert name in ("DeadlineExceededError", "WarmUpError")
    assert seconds < 5.0
    assert not up


def test_groups_from_before_the_install_are_refused_before_anything_is_destroyed() -> None:
    for name, text, still_up in values(run_ranks(programs.old_groups, 2)):
        assert name == "UnmanagedGroupError"
        assert "before the install" in text and "init_process_group" in text
        assert still_up


def test_gloo_groups_are_left_alone_by_default() -> None:
    assert values(run_ranks(programs.gloo_stays, 2)) == [((), 2.0)] * 2
