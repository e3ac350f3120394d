"""Facts about NeMo RL that the binding relies on, recorded as data, against a checkout."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from nemo_rl_rlix.nemo_rl.facts import Fact, check
from nemo_rl_rlix.nemo_rl.seams import check_seams
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.versions import NemoRl, detect

CONTRACT = Path(__file__).resolve().parent / "contract"
FILES = {NemoRl.MAIN: "main", NemoRl.V0_7_0: "v0_7_0"}


def entries(name: str) -> list[dict[str, Any]]:
    facts: list[dict[str, Any]] = tomllib.loads(
        (CONTRACT / f"{name}.toml").read_text(encoding="utf-8")
    )["fact"]
    return facts


def as_fact(entry: dict[str, Any]) -> Fact:
    fields = {key: value for key, value in entry.items() if key != "because"}
    return Fact(**{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()})


CASES = [
    pytest.param(name, entry, id=f"{name}-{entry['symbol']}-{index}")
    for name in ("common", *FILES.values())
    for index, entry in enumerate(entries(name))
]


@pytest.fixture(scope="module")
def tree(checkout: Path) -> SourceTree:
    return SourceTree(checkout / "nemo_rl")


@pytest.mark.parametrize(("name", "entry"), CASES)
def test_fact(tree: SourceTree, name: str, entry: dict[str, Any]) -> None:
    if name not in ("common", FILES[detect(tree)]):
        pytest.skip(f"recorded for another version; this is {detect(tree)}")
    drifts = check(tree, as_fact(entry))
    assert not drifts, "\n".join(
        f"{d.file}: {d.symbol}: {d.reason}\n  relied on because: {entry['because']}" for d in drifts
    )


def test_every_seam_is_where_it_was(tree: SourceTree) -> None:
    assert check_seams(detect(tree), tree) == []


@pytest.mark.parametrize(("name", "entry"), CASES)
def test_the_records_say_why_and_what(name: str, entry: dict[str, Any]) -> None:
    fact = as_fact(entry)
    assert entry["because"]
    assert fact.module.startswith("nemo_rl.")
