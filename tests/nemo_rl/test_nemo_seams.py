"""Seams and facts: whole on a fake NeMo RL, and each reported when it moves."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from fake_package import write_fake

from nemo_rl_rlix.nemo_rl.facts import Fact, check, marks
from nemo_rl_rlix.nemo_rl.seams import SEAMS, Seam, check_seams, seam
from nemo_rl_rlix.nemo_rl.source import SourceTree, parameters
from nemo_rl_rlix.nemo_rl.versions import NemoRl

VERSIONS = {NemoRl.MAIN: "main", NemoRl.V0_7_0: "v0.7.0"}
ALL_FACTS = [
    pytest.param(version, entry, fact, id=f"{VERSIONS[version]}-{entry.id}-{fact.symbol}")
    for version, seams in SEAMS.items()
    for entry in seams
    for fact in (Fact(entry.module, entry.symbol), *entry.facts)
]


def fake_tree(root: Path, version: str) -> SourceTree:
    return SourceTree(write_fake(root, version) / "nemo_rl")


@pytest.mark.parametrize("version", VERSIONS)
def test_the_fake_has_every_seam(tmp_path: Path, version: NemoRl) -> None:
    assert check_seams(version, fake_tree(tmp_path, VERSIONS[version])) == []


@pytest.mark.parametrize("version", VERSIONS)
def test_ids_are_unique_and_found(version: NemoRl) -> None:
    ids = [entry.id for entry in SEAMS[version]]
    assert len(set(ids)) == len(ids)
    assert all(seam(version, name).id == name for name in ids)
    with pytest.raises(KeyError, match="has no seam nothing"):
        seam(version, "nothing")


@pytest.mark.parametrize(("version", "entry", "fact"), ALL_FACTS)
def test_a_symbol_that_went_is_named(
    tmp_path: Path, version: NemoRl, entry: Seam, fact: Fact
) -> None:
    tree = fake_tree(tmp_path, VERSIONS[version])
    found = tree.find(fact.module, fact.symbol)
    assert found is not None
    name = fact.symbol.rpartition(".")[2]
    text = found.path.read_text(encoding="utf-8")
    found.path.write_text(text.replace(name, f"{name}_moved"), encoding="utf-8")
    # Sources are read once per file, so another folder stands for another start.
    moved = tmp_path.rename(tmp_path.with_name(f"{tmp_path.name}-moved"))
    problems = check_seams(version, SourceTree(moved / "nemo_rl"))
    symbol = f"{fact.module}.{fact.symbol}"
    assert (entry.id, symbol, "does not exist", version) in [
        (p.seam, p.symbol, p.reason, p.version) for p in problems
    ]
    assert all(Path(p.file).is_relative_to(moved) for p in problems)


SOURCE = """
class Base:
    inherited: int
    def __init__(self):
        self.set_in_base = 1

class Thing(Base):
    @staticmethod
    def plain(a, b=1, *rest, c, **more): ...
    def method(self, a, b): ...
    def steps(self):
        first(inner())
        with timer.time("x"):
            self.version += 1
        if odd:
            print(f"swallowed {error}")
            break_here()
        return {"one": 1, "two": 2}

@decorate(option=True)
def pair():
    return 1, 2
"""


@pytest.fixture
def tree(tmp_path: Path) -> SourceTree:
    (tmp_path / "nemo_rl").mkdir()
    (tmp_path / "nemo_rl" / "__init__.py").touch()
    (tmp_path / "nemo_rl" / "origin.py").write_text(SOURCE, encoding="utf-8")
    (tmp_path / "nemo_rl" / "user.py").write_text(
        "try:\n    from nemo_rl.origin import Thing as T, pair\nexcept ImportError:\n    raise\n"
        "import outside\nKNOWN = {'a': 1}\n",
        encoding="utf-8",
    )
    return SourceTree(tmp_path / "nemo_rl")


@pytest.mark.parametrize(
    ("fact", "reason"),
    [
        (Fact("nemo_rl.user", "T", kind="class"), ""),
        (Fact("nemo_rl.user", "T", kind="function"), "is not a function"),
        (Fact("nemo_rl.user", "Thing"), "does not exist"),
        (Fact("nemo_rl.user", "outside"), ""),
        (Fact("nemo_rl.user", "KNOWN", mentions=("'a': 1",)), ""),
        (Fact("nemo_rl.user", "KNOWN", mentions=("'a': 2",)), "does not contain `'a': 2`"),
        (Fact("nemo_rl.nowhere", "x"), "does not exist"),
        (Fact("nemo_rl.user", "gone", absent=True), ""),
        (Fact("nemo_rl.user", "T", absent=True), "exists"),
        (Fact("nemo_rl.user", "T", attributes=("set_in_base", "inherited", "method")), ""),
        (Fact("nemo_rl.user", "T", attributes=("no", "nor")), "instances have no no, nor"),
        (Fact("nemo_rl.user", "T.method", parameters=("a", "b")), ""),
        (Fact("nemo_rl.user", "T.method", parameters=("a",)), "takes (a, b), expected (a)"),
        (Fact("nemo_rl.user", "T.method", parameters=("b", "a")), "takes (a, b), expected (b, a)"),
        (
            Fact("nemo_rl.user", "T.method", accepts=("b", "c")),
            "does not take c; it takes (a, b)",
        ),
        (Fact("nemo_rl.user", "T.plain", accepts=("anything",)), ""),
        (Fact("nemo_rl.user", "T.plain", parameters=("a", "b", "*rest", "c", "**more")), ""),
        (Fact("nemo_rl.user", "T.steps", returns=("one", "two")), ""),
        (
            Fact("nemo_rl.user", "T.steps", returns=("three",)),
            "does not return three; it returns one, two",
        ),
        (Fact("nemo_rl.user", "pair", returns=("2",), decorated=("decorate",)), ""),
        (Fact("nemo_rl.user", "pair", decorated=("other",)), "is not decorated with other"),
        (Fact("nemo_rl.user", "T.steps", omits=("first(outer())",)), ""),
        (Fact("nemo_rl.user", "T.steps", omits=("inner()",)), "contains `inner()`"),
        (
            Fact(
                "nemo_rl.user", "T.steps", mentions=("print(f'swallowed {error}')\nbreak_here()",)
            ),
            "",
        ),
        (
            Fact(
                "nemo_rl.user",
                "T.steps",
                order=("call first", "with timer.time('x')", "add self.version", "return"),
            ),
            "",
        ),
        (
            Fact("nemo_rl.user", "T.steps", order=("add self.version", "call first")),
            "has no `call first` after `add self.version`",
        ),
    ],
)
def test_facts(tree: SourceTree, fact: Fact, reason: str) -> None:
    drifts = check(tree, fact)
    assert [drift.reason for drift in drifts] == ([reason] if reason else [])
    assert all(drift.symbol == f"{fact.module}.{fact.symbol}" for drift in drifts)


def test_marks_follow_the_source() -> None:
    body = ast.parse("import a\nfrom b.c import d\nx = f(g())\nx += 1\nif x:\n    return h.i.j()\n")
    assert list(marks(body)) == [
        "import b.c",
        "set x",
        "call f",
        "call g",
        "add x",
        "return",
        "call h.i.j",
    ]


def test_parameters_leave_self_out() -> None:
    function = ast.parse("def f(self, a, /, b, *, c): ...").body[0]
    assert isinstance(function, ast.FunctionDef)
    assert parameters(function) == ["a", "b", "c"]


def test_a_cycle_of_imports_ends(tmp_path: Path) -> None:
    package = tmp_path / "nemo_rl"
    package.mkdir()
    (package / "a.py").write_text("from nemo_rl.b import x\n", encoding="utf-8")
    (package / "b.py").write_text("from nemo_rl.a import x\n", encoding="utf-8")
    assert SourceTree(package).find("nemo_rl.a", "x") is None


def test_a_module_that_is_imported_by_name_is_there(tmp_path: Path) -> None:
    package = tmp_path / "nemo_rl"
    (package / "b").mkdir(parents=True)
    (package / "b" / "c.py").touch()
    (package / "a.py").write_text("from nemo_rl.b import c\nfrom nemo_rl.b import d\n")
    tree = SourceTree(package)
    assert tree.find("nemo_rl.a", "c") is not None
    assert tree.find("nemo_rl.a", "d") is None
