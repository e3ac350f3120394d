"""One training step between two grants: the order, and every way out of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from fakes.shard import cache_handle

from nemo_rl_rlix.control_plane.protocol import Priority, ProgressReport
from nemo_rl_rlix.errors import DeadlineExceededError, GrantRequiredError
from nemo_rl_rlix.hooks import RLixHooks
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.shards.protocol import MemoryReport, ResizeReport
from nemo_rl_rlix.training.hooks import TimeSharingHooks, version_after
from nemo_rl_rlix.weights.types import CacheHandle

BEFORE = ["request", "grant", "onload"]
AFTER = ["begin", "build", "commit", "offload", "publish", "offload", "revoke", "release"]


@dataclass
class World:
    """Control plane, trainer, coordinator and guard in one, each call written down."""

    failing: str = ""
    error: BaseException = field(default_factory=lambda: RuntimeError("went wrong"))
    fail_once: bool = True
    log: list[str] = field(default_factory=list)
    details: dict[str, Any] = field(default_factory=dict)

    def note(self, name: str, detail: Any = None) -> None:
        self.log.append(name)
        self.details[name] = detail
        if self.failing == name:
            self.failing = "" if self.fail_once else name
            raise self.error

    def request_gpus(self, cluster: str, priority: Priority, **options: Any) -> list[int]:
        self.note("request", (cluster, priority, options))
        return [0]

    def release_gpus(self, cluster: str, *, global_step: int | None = None) -> None:
        self.note("release", (cluster, global_step))

    def report_progress(self, report: ProgressReport) -> None:
        self.note("progress", report)

    def clear_progress(self) -> None:
        self.note("clear")

    def onload(self, *, timeout_s: float) -> None:
        self.note("onload", timeout_s)

    def offload(self, *, timeout_s: float) -> MemoryReport:
        self.note("offload", timeout_s)
        return MemoryReport(0, 0)

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> CacheHandle:
        self.note("build", (step, slot, timeout_s))
        return cache_handle(step, slot=slot)

    def begin_cache_build(self) -> int:
        self.note("begin")
        return 1

    def commit_cache(self, handle: CacheHandle) -> None:
        self.note("commit", handle)

    def abort_cache(self, slot: int) -> None:
        self.note("abort", slot)

    def refresh_and_publish(self, version: int) -> ResizeReport:
        self.note("publish", version)
        return ResizeReport()

    def grant(self) -> None:
        self.note("grant")

    def revoke(self) -> None:
        self.note("revoke")


def hooks_of(world: World, *, guard: bool = True) -> TimeSharingHooks:
    return TimeSharingHooks(
        "p",
        control_plane=world,  # type: ignore[arg-type]
        trainer=world,
        keeper=world,
        settings=RLixSettings(),
        guard=world if guard else None,
    )


def test_they_are_the_hooks_of_the_protocol() -> None:
    assert isinstance(hooks_of(World()), RLixHooks)


def test_a_step_goes_in_the_order_of_the_design() -> None:
    world = World()
    hooks = hooks_of(world)
    hooks.before_training(4)
    assert world.log == BEFORE
    assert hooks.holds_training_gpus
    hooks.after_training(4)
    assert world.log == BEFORE + AFTER
    assert not hooks.holds_training_gpus
    cluster, priority, options = world.details["request"]
    assert (cluster, priority) == ("actor_train", Priority.ACTOR_TRAINING)
    assert options == {"global_step": 4, "timeout_s": 3600.0}
    assert world.details["build"] == (5, 1, 300.0)
    assert world.details["commit"].slot == 1
    assert world.details["publish"] == version_after(4) == 5
    assert world.details["release"] == ("actor_train", 4)


@pytest.mark.parametrize("error", [RuntimeError("oom"), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("failing", "log"),
    [
        ("request", ["request"]),
        ("grant", ["request", "grant", "offload", "revoke", "release"]),
        ("onload", ["request", "grant", "onload", "offload", "revoke", "release"]),
    ],
)
def test_a_failing_start_of_a_step_gives_back_what_it_got(
    failing: str, log: list[str], error: BaseException
) -> None:
    world = World(failing, error)
    hooks = hooks_of(world)
    with pytest.raises(type(error)):
        hooks.before_training(0)
    assert world.log == log
    assert not hooks.holds_training_gpus
    world.log.clear()
    hooks.before_training(0)  # the next try begins anew
    assert world.log == BEFORE


@pytest.mark.parametrize("error", [DeadlineExceededError("it", 1.0), KeyboardInterrupt()])
@pytest.mark.parametrize(
    ("failing", "before_the_end"),
    [
        ("begin", ["begin"]),
        ("build", ["begin", "build", "abort"]),
        ("commit", ["begin", "build", "commit", "abort"]),
        ("offload", ["begin", "build", "commit", "offload"]),
        ("publish", ["begin", "build", "commit", "offload", "publish"]),
    ],
)
def test_a_failing_end_of_a_step_still_frees_and_releases(
    failing: str, before_the_end: list[str], error: BaseException
) -> None:
    world = World()
    hooks = hooks_of(world)
    hooks.before_training(0)
    world.log.clear()
    world.failing, world.error = failing, error
    with pytest.raises(type(error)):
        hooks.after_training(0)
    assert world.log == [*before_the_end, "offload", "revoke", "release"]
    assert not hooks.holds_training_gpus


@pytest.mark.parametrize("failing", ["offload", "revoke"])
def test_gpus_are_released_even_where_giving_back_fails(failing: str) -> None:
    world = World()
    hooks = hooks_of(world)
    hooks.before_training(0)
    world.failing, world.fail_once = failing, False
    with pytest.raises(RuntimeError):
        hooks.after_training(0)
    assert world.log[-1] == "release"
    assert not hooks.holds_training_gpus


def test_a_failed_abort_still_shows_why_the_build_failed() -> None:
    class Deaf(World):
        def abort_cache(self, slot: int) -> None:
            raise DeadlineExceededError("abort", 1.0)

    hooks = hooks_of(Deaf("build", RuntimeError("no host memory")))
    with pytest.raises(DeadlineExceededError) as late:
        hooks.build_cache(1)
    assert str(late.value.__context__) == "no host memory"


def test_a_step_that_was_not_granted_does_not_end() -> None:
    world = World()
    with pytest.raises(GrantRequiredError, match="end training step 3"):
        hooks_of(world).after_training(3)
    assert world.log == []


def test_acquiring_and_releasing_are_idempotent() -> None:
    world = World()
    hooks = hooks_of(world)
    hooks.release(0)
    assert world.log == []
    hooks.acquire(0, Priority.INITIALIZATION)
    hooks.acquire(0)
    hooks.release(0)
    hooks.release(0)
    assert world.log == ["request", "grant", "offload", "revoke", "release"]
    assert world.details["request"][1] is Priority.INITIALIZATION


def test_a_host_without_a_book_of_devices_needs_none() -> None:
    world = World()
    hooks = hooks_of(world, guard=False)
    hooks.before_training(0)
    hooks.after_training(0)
    assert not {"grant", "revoke"} & set(world.log)


def test_progress_is_passed_on_unless_it_says_nothing() -> None:
    world = World()
    hooks = hooks_of(world)
    hooks.report_progress(0, 0)
    assert world.log == []
    hooks.report_progress(3, 8)
    report = world.details["progress"]
    assert (report.pipeline_id, report.completed, report.remaining) == ("p", 3, 5)
    hooks.clear_progress()
    assert world.log == ["progress", "clear"]
