"""Reports of worker processes, features, options, addresses: decisions over plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_rl_rlix.errors import RLixError, SettingError
from nemo_rl_rlix.vllm.ipc import MAX_PATH_BYTES, ipc_address
from nemo_rl_rlix.vllm.options import (
    EXTENSION_CLS,
    SETTINGS_KEY,
    WORKER_CLS,
    ShardSettings,
    derive_kv_cache_bytes,
    engine_arguments,
)
from nemo_rl_rlix.vllm.receive import WorkerReceive, merge
from nemo_rl_rlix.vllm.update_features import UpdateFacts, refuse_unsupported

GIB = 1 << 30
AB, A = frozenset({"a", "b"}), frozenset({"a"})


def worker(loaded: frozenset[str], expected: frozenset[str], version: int = 3) -> WorkerReceive:
    return WorkerReceive(version, loaded, expected, 10, 0.5)


def test_under_tensor_parallelism_each_process_has_to_write_its_part() -> None:
    report = merge([worker(AB, AB), worker(A, AB)])
    assert report.missing == ["b"]
    assert report.nbytes == 20
    assert merge([worker(AB, AB), worker(AB, AB)]).missing == []


def test_under_pipeline_parallelism_each_process_has_its_own() -> None:
    report = merge([worker(A, A), worker(frozenset({"b"}), frozenset({"b"}))])
    assert (report.loaded, report.expected) == (AB, AB)


def test_processes_must_agree_on_the_version() -> None:
    with pytest.raises(RLixError, match=r"\[3, 4\]"):
        merge([worker(A, A, 3), worker(A, A, 4)])
    with pytest.raises(RLixError):
        merge([])


@pytest.mark.parametrize(
    ("facts", "level", "setting"),
    [
        (UpdateFacts(), 2, None),
        (UpdateFacts(quantization="fp8"), 2, "precision"),
        (UpdateFacts(quantization="fp8", lifecycle=True), 2, None),
        (UpdateFacts(kv_cache_dtype="fp8_e4m3"), 1, "kv_cache_dtype"),
        (UpdateFacts(draft_method="eagle3", draft_has_weights=True), 2, "speculative_config"),
        (UpdateFacts(draft_method="ngram"), 2, None),
        (UpdateFacts(draft_method="mtp", draft_has_weights=True, lifecycle=True), 2, None),
        (
            UpdateFacts(
                draft_method="mtp", draft_has_weights=True, draft_from_disk=True, lifecycle=True
            ),
            2,
            "speculative_config",
        ),
        (
            UpdateFacts(
                draft_method="mtp", draft_has_weights=True, draft_from_disk=True, lifecycle=True
            ),
            1,
            None,
        ),
    ],
)
def test_features_without_an_update_are_refused_by_name(
    facts: UpdateFacts, level: int, setting: str | None
) -> None:
    if setting is None:
        refuse_unsupported(facts, level)
        return
    with pytest.raises(SettingError) as caught:
        refuse_unsupported(facts, level)
    assert setting in caught.value.setting
    assert caught.value.remedy


def arguments(**changes: Any) -> dict[str, Any]:
    return {"model": "m", "enable_sleep_mode": True, "worker_extension_cls": "theirs", **changes}


def test_engine_arguments_of_a_shared_card() -> None:
    given = arguments()
    chosen = engine_arguments(
        given, ShardSettings("p"), extension_cls=EXTENSION_CLS, kv_cache_bytes=5 * GIB
    )
    assert chosen["worker_cls"] == WORKER_CLS
    assert chosen["worker_extension_cls"] == EXTENSION_CLS
    assert chosen["kv_cache_memory_bytes"] == 5 * GIB
    assert given == arguments()
    recipe = arguments(kv_cache_memory_bytes=7)
    kept = engine_arguments(recipe, ShardSettings("p"), extension_cls="e", kv_cache_bytes=5)
    assert kept["kv_cache_memory_bytes"] == 7


@pytest.mark.parametrize(
    "changes", [{"enable_sleep_mode": False}, {"worker_cls": "somebody.Else"}], ids=str
)
def test_engine_arguments_that_cannot_be(changes: dict[str, Any]) -> None:
    with pytest.raises(SettingError):
        engine_arguments(
            arguments(**changes), ShardSettings("p"), extension_cls="e", kv_cache_bytes=1
        )


@pytest.mark.parametrize(
    ("total", "share", "weights", "expected"),
    [(140 * GIB, 0.5, 15 * GIB, 53 * GIB), (140 * GIB, 0.12, 15 * GIB, None)],
)
def test_kv_cache_gets_what_is_left(
    total: int, share: float, weights: int, expected: int | None
) -> None:
    if expected is None:
        with pytest.raises(SettingError, match="gpu_memory_utilization"):
            derive_kv_cache_bytes(total, share, weights)
    else:
        assert derive_kv_cache_bytes(total, share, weights) == expected


def test_settings_travel_as_plain_data() -> None:
    settings = ShardSettings("p", sleep_level=1)
    assert ShardSettings.from_config({SETTINGS_KEY: settings.to_config()}) == settings
    with pytest.raises(SettingError, match=SETTINGS_KEY):
        ShardSettings.from_config({})


def test_two_pipelines_on_one_gpu_have_two_sockets(tmp_path: Path) -> None:
    uuid = "GPU-6e54d2a8-86a3-4f55-9d7c-1d0d0c6c9f2c"
    names = {ipc_address(pipeline, uuid) for pipeline in ("one", "two")}
    assert len(names) == 2
    assert ipc_address("one", uuid) in names
    assert all(len(name) - len("ipc://") <= MAX_PATH_BYTES for name in names)
    with pytest.raises(ValueError, match="107"):
        ipc_address("one", uuid, "/" + "d" * 90)
