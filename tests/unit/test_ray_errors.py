"""Unwrapping, without a cluster: Ray's own classes around our errors."""

from __future__ import annotations

import pytest
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    NodeDiedError,
    RayTaskError,
    TaskCancelledError,
    WorkerCrashedError,
)

from nemo_rl_rlix.errors import (
    ControlPlaneLostError,
    DeadlineExceededError,
    PartialGeneration,
    ShardFailedError,
    ShardPreemptedError,
)
from nemo_rl_rlix.ray_errors import MAX_CAUSE_CHARS, Callee, unwrap

SHARD = Callee("sleep of shard 3", dp_rank=3, timeout_s=20.0)
SCHEDULER = Callee("request of actor_train", timeout_s=5.0)


def wrapped(cause: BaseException) -> BaseException:
    """What ``ray.get`` raises for a remote ``cause``."""
    task_error = RayTaskError("f", "Traceback ...", cause, proctitle="p", pid=1, ip="127.0.0.1")
    return task_error.as_instanceof_cause()


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_the_remote_error_comes_out_of_any_number_of_wrappers(layers):
    cause = ShardPreemptedError(3, PartialGeneration((1,), (-0.5,)), 8)
    error: BaseException = cause
    for _ in range(layers):
        error = wrapped(error)
    assert unwrap(error) is cause
    assert unwrap(error, SHARD) is cause


def test_a_text_attribute_called_cause_is_readable_after_unwrapping():
    """On Ray's instance ``cause`` is the error itself, which hides ours."""
    error = wrapped(ShardFailedError(3, "out of memory"))
    assert isinstance(error.cause, ShardFailedError)
    assert unwrap(error).cause == "out of memory"


GONE = [
    ActorDiedError(),
    ActorUnavailableError("connection reset", b"\x00" * 16),
    WorkerCrashedError(),
    NodeDiedError("node x"),
]


@pytest.mark.parametrize("error", GONE, ids=lambda e: type(e).__name__)
def test_a_process_that_is_gone_gets_the_name_of_what_was_called(error):
    shard = unwrap(error, SHARD)
    assert isinstance(shard, ShardFailedError)
    assert shard.dp_rank == 3
    assert shard.cause.startswith(f"sleep of shard 3: {type(error).__name__}")
    scheduler = unwrap(error, SCHEDULER)
    assert isinstance(scheduler, ControlPlaneLostError)
    assert "request of actor_train" in str(scheduler)
    assert unwrap(error) is error


def test_a_process_that_died_behind_another_call_is_named_all_the_same():
    assert isinstance(unwrap(wrapped(WorkerCrashedError()), SHARD), ShardFailedError)


def test_a_missed_deadline_says_what_was_waited_for():
    error = unwrap(GetTimeoutError("timed out"), SHARD)
    assert isinstance(error, DeadlineExceededError)
    assert (error.what, error.timeout_s) == ("sleep of shard 3", 20.0)


def test_a_deadline_missed_in_the_remote_process_is_not_ours():
    remote = DeadlineExceededError("wake", 1.0)
    assert unwrap(wrapped(remote), SHARD) is remote


@pytest.mark.parametrize("error", [TaskCancelledError(), ValueError("x"), KeyboardInterrupt()])
def test_everything_else_passes_through(error):
    assert unwrap(error, SHARD) is error


def test_long_texts_of_ray_are_cut_in_the_middle_and_lose_their_colours():
    text = f"\x1b[36mray::Shard.__init__()\x1b[39m\n{'x' * 5000}\nOutOfMemory: end"
    death = ActorDiedError(
        RayTaskError("f", text, ValueError(), proctitle="p", pid=1, ip="127.0.0.1")
    )
    cause = unwrap(death, SHARD).cause
    assert len(cause) < MAX_CAUSE_CHARS + 100
    assert "creation task, ray::Shard.__init__() x" in cause
    assert cause.endswith("OutOfMemory: end")
    assert "\x1b" not in cause
