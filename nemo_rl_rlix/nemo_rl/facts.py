"""Single facts about NeMo RL's sources, each checked without an import.

A fact that does not hold answers with a reason; who asks adds file, symbol and version.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_rl_rlix.nemo_rl.source import (
    Definition,
    Found,
    SourceTree,
    decorators,
    instance_attributes,
    parameters,
)


@dataclass(frozen=True)
class Fact:
    """What is expected of one symbol.

    Every field that is given is checked; with none, only that the symbol exists.

    Attributes:
        module: Module through which the symbol is reached.
        symbol: ``name`` or ``Class.method``.
        kind: ``class``, ``function`` or empty for anything that binds the name.
        parameters: The parameters, all of them and in this order, ``self`` left out.
        accepts: Parameters that it takes, among others; a ``**`` parameter takes any.
        attributes: Attributes of its instances, inherited ones included.
        mentions: Code that its body contains, compared after normalisation.
        omits: Code that its body does not contain.
        order: Marks that its body has in this order, see :func:`marks`.
        returns: Keys that it returns in a dict, or one number: the length of a tuple.
        decorated: Decorators that it has.
        absent: The symbol must not exist; what tells one version from another.
    """

    module: str
    symbol: str
    kind: str = ""
    parameters: tuple[str, ...] | None = None
    accepts: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    mentions: tuple[str, ...] = ()
    omits: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    returns: tuple[str, ...] = ()
    decorated: tuple[str, ...] = ()
    absent: bool = False


@dataclass(frozen=True)
class Drift:
    """A fact that does not hold.

    Attributes:
        file: File in which the symbol is, or ought to be.
        symbol: ``module.symbol``.
        reason: What was expected and what was found.
    """

    file: str
    symbol: str
    reason: str


def check(tree: SourceTree, fact: Fact) -> list[Drift]:
    """Check one fact.

    Args:
        tree: Sources of a NeMo RL.
        fact: The fact.

    Returns:
        What does not hold; empty when all does.
    """
    found = tree.find(fact.module, fact.symbol)
    symbol = f"{fact.module}.{fact.symbol}"
    if fact.absent:
        return [Drift(str(found.path), symbol, "exists")] if found else []
    if found is None:
        return [Drift(str(tree.path(fact.module)), symbol, "does not exist")]
    reasons: list[str] = []
    for holds in _CHECKS:
        reasons += holds(tree, found, fact)
    return [Drift(str(found.path), symbol, reason) for reason in reasons]


def check_all(tree: SourceTree, facts: tuple[Fact, ...]) -> list[Drift]:
    """Everything that does not hold, in the order of the facts."""
    return [drift for fact in facts for drift in check(tree, fact)]


def marks(function: ast.AST) -> Iterator[str]:
    """The events of a function body in source order.

    ``call policy.train`` for a call, ``set step`` for an assignment, ``add step`` for
    ``step += ...``, ``import a.b`` for an import, ``with timer.time('x')`` for a context
    manager, ``return`` for a return.
    """
    nodes = [node for node in ast.walk(function) if isinstance(node, ast.stmt | ast.expr)]
    # An inner call comes before the call it is an argument of, as it is evaluated.
    for node in sorted(nodes, key=lambda n: (n.lineno, n.col_offset, -(n.end_col_offset or 0))):
        match node:
            case ast.Call():
                yield f"call {ast.unparse(node.func)}"
            case ast.Assign():
                for target in node.targets:
                    yield f"set {ast.unparse(target)}"
            case ast.AugAssign(op=ast.Add()):
                yield f"add {ast.unparse(node.target)}"
            case ast.ImportFrom():
                yield f"import {node.module}"
            case ast.With():
                for item in node.items:
                    yield f"with {ast.unparse(item.context_expr)}"
            case ast.Return():
                yield "return"


def _definition(found: Found) -> Definition | None:
    node = found.node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node
    return None


def _kind(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if not fact.kind:
        return []
    node = found.node
    is_class = isinstance(node, ast.ClassDef)
    is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if (fact.kind == "class" and is_class) or (fact.kind == "function" and is_function):
        return []
    return [f"is not a {fact.kind}"]


def _parameters(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if fact.parameters is None and not fact.accepts:
        return []
    node = found.node
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return ["is not a function"]
    actual = parameters(node)
    reasons = []
    if fact.parameters is not None and actual != list(fact.parameters):
        expected = ", ".join(fact.parameters)
        reasons.append(f"takes ({', '.join(actual)}), expected ({expected})")
    if not any(name.startswith("**") for name in actual):
        missing = [name for name in fact.accepts if name not in actual]
        if missing:
            reasons.append(f"does not take {', '.join(missing)}; it takes ({', '.join(actual)})")
    return reasons


def _attributes(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if not fact.attributes:
        return []
    known: set[str] = set()
    for owner in tree.bases(found):
        if isinstance(owner.node, ast.ClassDef):
            known |= instance_attributes(owner.node)
    missing = [name for name in fact.attributes if name not in known]
    return [f"instances have no {', '.join(missing)}"] if missing else []


def _mentions(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if not fact.mentions and not fact.omits:
        return []
    text = _text(found.node)
    reasons = [
        f"does not contain `{snippet}`"
        for snippet in fact.mentions
        if not any(form in text for form in _forms(snippet))
    ]
    reasons += [
        f"contains `{snippet}`"
        for snippet in fact.omits
        if any(form in text for form in _forms(snippet))
    ]
    return reasons


def _forms(snippet: str) -> list[str]:
    """A snippet as :func:`_text` would write it, in every reading that parses.

    It may be an expression, an entry of a dictionary, a keyword argument or statements.
    """
    forms = []
    for before, after in (("", ""), ("{", "}"), ("f(", ")")):
        try:
            text = ast.unparse(ast.parse(f"{before}{snippet}{after}", mode="eval"))
        except SyntaxError:
            continue
        forms.append(text[len(before) : len(text) - len(after)])
    try:
        module = ast.parse(snippet)
    except SyntaxError:
        return forms
    # A lone string would be written as a docstring.
    return forms if forms and isinstance(module.body[0], ast.Expr) else [*forms, _text(module)]


def _text(node: ast.AST) -> str:
    """Source of a node without its indentation, so that a block is found at any depth."""
    return "\n".join(line.strip() for line in ast.unparse(node).splitlines())


def _order(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if not fact.order:
        return []
    events = list(marks(found.node))
    position = 0
    for index, mark in enumerate(fact.order):
        try:
            position = events.index(mark, position) + 1
        except ValueError:
            after = f" after `{fact.order[index - 1]}`" if index else ""
            return [f"has no `{mark}`{after}"]
    return []


def _returns(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if not fact.returns:
        return []
    keys: set[str] = set()
    lengths: set[str] = set()
    for node in ast.walk(found.node):
        if not isinstance(node, ast.Return):
            continue
        match node.value:
            case ast.Dict(keys=names):
                keys |= {str(n.value) for n in names if isinstance(n, ast.Constant)}
            case ast.Tuple(elts=items):
                lengths.add(str(len(items)))
    missing = [name for name in fact.returns if name not in keys | lengths]
    if not missing:
        return []
    seen = ", ".join(sorted(keys | lengths)) or "neither a dict nor a tuple"
    return [f"does not return {', '.join(missing)}; it returns {seen}"]


def _decorated(tree: SourceTree, found: Found, fact: Fact) -> list[str]:
    if not fact.decorated:
        return []
    node = _definition(found)
    have = decorators(node) if node is not None else []
    missing = [name for name in fact.decorated if name not in have]
    return [f"is not decorated with {', '.join(missing)}"] if missing else []


_CHECKS: tuple[Callable[[SourceTree, Found, Fact], list[str]], ...] = (
    _kind,
    _parameters,
    _attributes,
    _mentions,
    _order,
    _returns,
    _decorated,
)
