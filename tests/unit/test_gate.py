"""The switch, and that nothing heavy is imported where it is off."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from nemo_rl_rlix import gate

LIGHT = (
    "nemo_rl_rlix",
    "nemo_rl_rlix.gate",
    "nemo_rl_rlix.hooks",
    "nemo_rl_rlix.errors",
    "nemo_rl_rlix.settings",
    "nemo_rl_rlix.topology",
    "nemo_rl_rlix.features",
    "nemo_rl_rlix.shards",
    "nemo_rl_rlix.shards.protocol",
    "nemo_rl_rlix.shards.requests",
    "nemo_rl_rlix.shards.snapshot",
    "nemo_rl_rlix.shards.state",
    "nemo_rl_rlix.shards.router",
    "nemo_rl_rlix.weights",
    "nemo_rl_rlix.weights.types",
    "nemo_rl_rlix.control_plane",
    "nemo_rl_rlix.control_plane.protocol",
    "nemo_rl_rlix.training",
    "nemo_rl_rlix.training.protocol",
    "nemo_rl_rlix.cluster",
    "nemo_rl_rlix.observe",
    "nemo_rl_rlix.reference",
    "nemo_rl_rlix.reference.demo_cli",
    "nemo_rl_rlix.cli",
)

IMPORT_EACH = """
import importlib, json, sys
heavy = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    heavy[name] = [m for m in ("torch", "ray", "vllm", "megatron", "nemo_rl") if m in sys.modules]
print(json.dumps(heavy))
"""


def python(*args: str, control_plane: str | None) -> str:
    environment = {k: v for k, v in os.environ.items() if k != gate.CONTROL_PLANE_ENV}
    if control_plane is not None:
        environment[gate.CONTROL_PLANE_ENV] = control_plane
    done = subprocess.run(
        [sys.executable, "-c", *args],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


def test_light_modules_import_neither_torch_nor_ray():
    heavy = json.loads(python(IMPORT_EACH, *LIGHT, control_plane=None))
    assert heavy == {name: [] for name in LIGHT}


def test_the_check_itself_sees_a_heavy_import():
    heavy = json.loads(python(IMPORT_EACH, "json", "nemo_rl_rlix.ray_errors", control_plane=None))
    assert heavy["json"] == []
    assert "ray" in heavy["nemo_rl_rlix.ray_errors"]


VALUES = [(None, False), ("", False), ("1", False), ("RLIX", False), ("embedded", False)]


@pytest.mark.parametrize(("value", "on"), [*VALUES, ("rlix", True)])
def test_only_the_exact_value_turns_time_sharing_on(monkeypatch, value, on):
    monkeypatch.delenv(gate.CONTROL_PLANE_ENV, raising=False)
    if value is not None:
        monkeypatch.setenv(gate.CONTROL_PLANE_ENV, value)
    assert gate.time_sharing_enabled() is on


@pytest.mark.parametrize(("value", "on"), [(None, False), ("rlix", True)])
def test_the_constant_is_the_switch_at_import(value, on):
    code = "from nemo_rl_rlix.gate import DO_TIME_SHARING as on; print(on)"
    assert python(code, control_plane=value).strip() == str(on)
