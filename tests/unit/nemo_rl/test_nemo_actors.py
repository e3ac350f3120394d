"""How the collector and the buffer are created by a driver that knows nothing of this."""

from __future__ import annotations

from typing import Any

import pytest

from nemo_rl_rlix.nemo_rl import actors
from nemo_rl_rlix.nemo_rl.actors import ActorFactory


class ActorClass:
    note = "of the class"

    def __init__(self, options: dict[str, Any] | None = None) -> None:
        self.with_options = options or {}

    def options(self, **options: Any) -> ActorClass:
        return ActorClass(options)

    def remote(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return (self.with_options, args, kwargs)


def test_arguments_are_added_and_the_handle_is_told() -> None:
    made: list[Any] = []
    factory = ActorFactory(ActorClass(), lambda: {"hooks": 1}, made.append)
    handle = factory.options(num_cpus=0).remote(2, key="value")
    assert handle == ({"num_cpus": 0}, (2,), {"key": "value", "hooks": 1})
    assert factory.remote() == ({}, (), {"hooks": 1})
    assert made[0] == handle and len(made) == 2
    assert factory.note == "of the class"


def test_without_a_session_nothing_is_added() -> None:
    assert actors._hooks() == {}


def test_validation_is_noted_where_there_is_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(actors, "_buffer", None)
    assert not actors.note_validation(8)
    noted: list[int] = []

    class Buffer:
        class rlix_note_extra:
            remote = staticmethod(noted.append)

    actors._keep_buffer(Buffer)
    assert actors.note_validation(8) and actors.note_validation(0)
    assert noted == [8, 0]
