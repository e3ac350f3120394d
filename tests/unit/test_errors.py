"""Errors cross process boundaries; what they say must arrive."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator

import pytest

from nemo_rl_rlix import errors
from nemo_rl_rlix.errors import PartialGeneration, RLixError, Segment, ShardPreemptedError

PARTIAL = PartialGeneration(
    token_ids=(5, 6, 7), logprobs=(-0.5, -0.25, -1.0), segments=(Segment(3, 2), Segment(4, 1))
)

EXAMPLES: dict[type[RLixError], RLixError] = {
    type(error): error
    for error in (
        RLixError("plain"),
        errors.SettingError("rlix.sleep_level", 3, "no such level", "Write 1 or 2"),
        errors.HostMemoryError("rlix.weight_cache.slots", 2, "too little", "Write 1"),
        errors.IllegalTransitionError(1, "ASLEEP", "ACTIVE"),
        errors.DeadlineExceededError("sleep of shard 1", 20.0, "2 requests left"),
        errors.ShardPreemptedError(1, PARTIAL, 7),
        errors.ShardFailedError(1, "process ended"),
        errors.NoLiveShardError("no heartbeat"),
        errors.CoverageError(1, ["b", "a"], ["c"]),
        errors.CacheNotReadyError("no build yet"),
        errors.GrantRequiredError("p_actor_train", [0, 1], "train"),
        errors.ControlPlaneLostError("scheduler"),
        errors.PipelineClosedError("p"),
        errors.UnsupportedVersionError(
            "vLLM", "0.1", places=[("a.py", "f", "is missing")], remedy="Install 0.25.1"
        ),
    )
}


def subclasses(of: type[RLixError]) -> Iterator[type[RLixError]]:
    yield of
    for cls in of.__subclasses__():
        yield from subclasses(cls)


def test_every_error_of_the_module_has_an_example():
    assert {c for c in subclasses(RLixError) if c.__module__ == errors.__name__} == set(EXAMPLES)


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_attributes_and_text(error, protocol):
    again = pickle.loads(pickle.dumps(error, protocol))
    assert type(again) is type(error)
    assert vars(again) == vars(error)
    assert (str(again), again.args) == (str(error), error.args)
    assert vars(pickle.loads(pickle.dumps(again))) == vars(error)


@pytest.mark.parametrize("error", EXAMPLES.values(), ids=lambda e: type(e).__name__)
def test_copies_and_notes_survive_too(error):
    noted = copy.copy(error)
    noted.add_note("seen by the router")
    again = pickle.loads(pickle.dumps(noted))
    assert again.__notes__ == ["seen by the router"]
    assert not hasattr(error, "__notes__")


def test_a_preempted_request_brings_its_tokens_or_none():
    assert ShardPreemptedError(2).partial == PartialGeneration()
    assert ShardPreemptedError(2).epoch == -1
    kept = pickle.loads(pickle.dumps(ShardPreemptedError(2, PARTIAL, 9))).partial
    assert kept == PARTIAL
    assert sum(s.num_tokens for s in kept.segments) == len(kept.token_ids) == len(kept.logprobs)


def test_messages_name_what_they_are_about():
    text = {cls: str(error) for cls, error in EXAMPLES.items()}
    assert "rlix.sleep_level=3: no such level. Write 1 or 2" in text[errors.SettingError]
    assert "within 20 s (2 requests left)" in text[errors.DeadlineExceededError]
    assert "shard 1: ASLEEP -> ACTIVE" in text[errors.IllegalTransitionError]
    assert "\n  a.py: f: is missing\nInstall 0.25.1" in text[errors.UnsupportedVersionError]
    assert "missing ['a', 'b'] (2), unexpected ['c'] (1)" in text[errors.CoverageError]
