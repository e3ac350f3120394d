from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.settings import RLixSettings


def blocks(
    model: type[BaseModel] = RLixSettings, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], type[BaseModel]]]:
    """Every block of the settings with the path to it, the top included."""
    yield path, model
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from blocks(field.annotation, (*path, name))


BLOCKS = list(blocks())
FIELDS = [
    (*path, name)
    for path, model in BLOCKS
    for name, field in model.model_fields.items()
    if (*path, name) not in [inner for inner, _ in BLOCKS]
]


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """``{"a": {"b": value}}`` for the path ``a, b``."""
    block: Any = value
    for name in reversed(path):
        block = {name: block}
    return block


def ids(paths: list[tuple[str, ...]]) -> list[str]:
    return [".".join(path) or "rlix" for path in paths]


def test_the_walk_finds_the_nested_blocks():
    assert {path for path, _ in BLOCKS} >= {(), ("deadlines",), ("routing",), ("weight_cache",)}


@pytest.mark.parametrize("path", FIELDS, ids=ids(FIELDS))
def test_every_field_has_a_description_and_a_default(path):
    model = dict(BLOCKS)[path[:-1]]
    field = model.model_fields[path[-1]]
    assert not field.is_required()
    assert field.description and len(field.description) > 10


TIMES = [path for path in FIELDS if path[-1].endswith("_s")]


@pytest.mark.parametrize("path", TIMES, ids=ids(TIMES))
@pytest.mark.parametrize("value", [0, -1.0, "soon", None])
def test_every_time_is_a_positive_number_of_seconds(path, value):
    with pytest.raises(SettingError) as caught:
        RLixSettings.from_recipe(nested(path, value))
    assert caught.value.setting == ".".join(("rlix", *path))
    assert caught.value.value == value


@pytest.mark.parametrize("path", [p for p, _ in BLOCKS], ids=ids([p for p, _ in BLOCKS]))
def test_an_unknown_field_is_refused_at_each_level_by_name(path):
    with pytest.raises(SettingError) as caught:
        RLixSettings.from_recipe(nested((*path, "slep_level"), 7))
    assert caught.value.setting == ".".join(("rlix", *path, "slep_level"))
    assert caught.value.value == 7
    assert "Remove it" in caught.value.remedy


WRONG = {
    "level": ({"sleep_level": 3}, "rlix.sleep_level"),
    "scheduler": ({"control_plane": "slurm"}, "rlix.control_plane"),
    "policy": ({"routing": {"preempted_requests": "drop"}}, "rlix.routing.preempted_requests"),
    "slots": ({"weight_cache": {"slots": 3}}, "rlix.weight_cache.slots"),
    "bucket": ({"weight_cache": {"bucket_mib": 0}}, "rlix.weight_cache.bucket_mib"),
    "fraction": (
        {"weight_cache": {"host_memory_fraction": 1.5}},
        "rlix.weight_cache.host_memory_fraction",
    ),
    "name": ({"pipeline_name": "a:b"}, "rlix.pipeline_name"),
    "weight": ({"priority_weight": 0}, "rlix.priority_weight"),
    "mapping": ({"train_device_mapping": ["x"]}, "rlix.train_device_mapping.0"),
    "block": ({"deadlines": 3}, "rlix.deadlines"),
    "whole": (7, "rlix"),
}


@pytest.mark.parametrize(("block", "setting"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_refused_by_name(block, setting):
    with pytest.raises(SettingError) as caught:
        RLixSettings.from_recipe(block)
    assert caught.value.setting == setting
    assert isinstance(caught.value.__cause__, ValidationError)


@pytest.mark.parametrize("block", [None, {}])
def test_no_block_means_the_defaults(block):
    assert RLixSettings.from_recipe(block) == RLixSettings()


def test_settings_do_not_change_after_validation():
    with pytest.raises(ValidationError, match="frozen"):
        RLixSettings().sleep_level = 1
    with pytest.raises(ValidationError, match="frozen"):
        RLixSettings().deadlines.drain_s = 1.0


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "sleep_level": st.integers(1, 2),
            "train_device_mapping": st.lists(st.integers(0, 63)),
            "allow_shrink_to_zero": st.booleans(),
            "pipeline_name": st.text("aZ09_-", min_size=1, max_size=64),
            "deadlines": st.fixed_dictionaries({}, optional={"drain_s": st.floats(0.1, 1e4)}),
            "routing": st.fixed_dictionaries(
                {}, optional={"preempted_requests": st.sampled_from(["restart", "resume"])}
            ),
        },
    )
)
def test_settings_survive_being_written_and_read_again(block):
    settings = RLixSettings.from_recipe(block)
    assert RLixSettings.from_recipe(settings.model_dump(mode="json")) == settings
