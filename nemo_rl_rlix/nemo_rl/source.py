"""Reading NeMo RL's sources without importing them.

Importing NeMo RL takes ten seconds and touches torch and Ray; a moved seam has to be
reported before that, and on a machine where half of its dependencies are missing.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PACKAGE = "nemo_rl"

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class Found:
    """Where a symbol is defined, or bound if its definition lies outside NeMo RL.

    Attributes:
        module: Dotted name of the module.
        path: Its file.
        node: Definition, assignment or import that binds the symbol.
    """

    module: str
    path: Path
    node: ast.AST


class SourceTree:
    """The sources of one NeMo RL.

    Args:
        package_dir: The folder ``nemo_rl`` itself.
    """

    def __init__(self, package_dir: Path) -> None:
        self.package_dir = package_dir

    @classmethod
    def installed(cls) -> SourceTree | None:
        """The NeMo RL that ``import nemo_rl`` would find, ``None`` without one."""
        spec = importlib.util.find_spec(PACKAGE)
        if spec is None or spec.origin is None:
            return None
        return cls(Path(spec.origin).parent)

    def path(self, module: str) -> Path:
        """File of a module; the path it ought to have if there is none."""
        parts = module.split(".")[1:]
        folder = self.package_dir.joinpath(*parts)
        package = folder / "__init__.py"
        return package if package.is_file() else folder.with_suffix(".py")

    def parse(self, module: str) -> ast.Module | None:
        """The syntax tree of a module, ``None`` if it has no file."""
        return _parse(self.path(module))

    def find(self, module: str, symbol: str) -> Found | None:
        """Where ``symbol`` is defined, following imports and base classes.

        Args:
            module: Module that binds the first part of the symbol.
            symbol: ``name`` or ``Class.method``.
        """
        first, _, rest = symbol.partition(".")
        found = self._global(module, first, frozenset())
        if found is None or not rest:
            return found
        return self._member(found, rest)

    def bases(self, found: Found) -> Iterator[Found]:
        """The class and its bases inside NeMo RL, nearest first."""
        yield found
        if not isinstance(found.node, ast.ClassDef):
            return
        for base in found.node.bases:
            if isinstance(base, ast.Name):
                parent = self._global(found.module, base.id, frozenset())
                if parent is not None and isinstance(parent.node, ast.ClassDef):
                    yield from self.bases(parent)

    def _member(self, found: Found, name: str) -> Found | None:
        for owner in self.bases(found):
            if isinstance(owner.node, ast.ClassDef):
                for statement in owner.node.body:
                    if name in bound_names(statement):
                        return Found(owner.module, owner.path, statement)
        return None

    def _global(self, module: str, name: str, seen: frozenset[str]) -> Found | None:
        tree = self.parse(module)
        if tree is None or module in seen:
            return None
        # The last binding is the one that an importer gets.
        for statement in reversed(list(_top_level(tree.body))):
            if name not in bound_names(statement):
                continue
            if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(
                f"{PACKAGE}."
            ):
                origin = next(a.name for a in statement.names if (a.asname or a.name) == name)
                source = str(statement.module)
                # A name that its own module does not have fails at import: it is not there.
                if self.parse(f"{source}.{origin}") is None:
                    return self._global(source, origin, seen | {module})
            return Found(module, self.path(module), statement)
        return None


@cache
def _parse(path: Path) -> ast.Module | None:
    if not path.is_file():
        return None
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements that bind names of a module, those under ``if`` and ``try`` included."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _top_level(statement.body)
            yield from _top_level(statement.orelse)
        elif isinstance(statement, ast.Try):
            yield from _top_level(statement.body)
            for handler in statement.handlers:
                yield from _top_level(handler.body)
        else:
            yield statement


def bound_names(statement: ast.stmt) -> set[str]:
    """Names that a statement binds in its own scope."""
    match statement:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return {statement.name}
        case ast.Import() | ast.ImportFrom():
            return {alias.asname or alias.name.split(".")[0] for alias in statement.names}
        case ast.Assign():
            return {target.id for target in statement.targets if isinstance(target, ast.Name)}
        case ast.AnnAssign(target=ast.Name(id=name)):
            return {name}
        case _:
            return set()


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Parameter names in order; variadic ones carry their stars, ``self`` is left out."""
    args = function.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args)]
    if args.vararg:
        names.append(f"*{args.vararg.arg}")
    names += [arg.arg for arg in args.kwonlyargs]
    if args.kwarg:
        names.append(f"**{args.kwarg.arg}")
    return [name for name in names if name not in ("self", "cls")]


def instance_attributes(cls: ast.ClassDef) -> set[str]:
    """Names that instances have: methods, class variables, and what ``self.x = `` sets."""
    names: set[str] = set()
    for statement in cls.body:
        names |= bound_names(statement)
    for node in ast.walk(cls):
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                match target:
                    case ast.Attribute(value=ast.Name(id="self"), attr=name):
                        names.add(name)
    return names


def decorators(definition: Definition) -> list[str]:
    """Decorators as source text, calls without their arguments."""
    return [
        ast.unparse(item.func if isinstance(item, ast.Call) else item)
        for item in definition.decorator_list
    ]
