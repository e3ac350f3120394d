"""The import hook that registers the binding once NeMo RL's GRPO module has been imported.

Loaded at the start of every interpreter of a time-shared run, Ray's workers included,
so it imports nothing but ``sys``. Registration itself, and all that it needs, is
imported when the watched module has run.
"""

from __future__ import annotations

import sys

# As type checkers read it; importing typing would take most of the time of the start.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import ModuleType
    from typing import Any

DRIVER_MODULE = "nemo_rl.algorithms.grpo"
"""Module whose import starts the registration."""

WATCHED = frozenset({DRIVER_MODULE, "nemo_rl.algorithms.async_utils"})
"""Modules whose globals are replaced; each is reported when it has run."""


class _ReportingLoader:
    """Runs a module by its own loader, then reports it.

    It leaves no trace: the module and its spec name the own loader again before
    anyone can see them.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def create_module(self, spec: Any) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:
            spec.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        _report(module.__name__)


class ImportHook:
    """Finder that lets the others find, and has watched modules reported."""

    def __init__(self) -> None:
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a watched module, ``None`` for every other."""
        # Another hook of this kind asks all finders too, this one included.
        if name not in WATCHED or name in self._searching:
            return None
        self._searching.add(name)
        try:
            for finder in sys.meta_path:
                spec = None if finder is self else finder.find_spec(name, path, target)
                if spec is not None:
                    if spec.loader is not None:
                        spec.loader = _ReportingLoader(spec.loader)  # type: ignore[assignment]
                    return spec
            return None
        finally:
            self._searching.discard(name)


def _report(module: str) -> None:
    from nemo_rl_rlix.nemo_rl import registration

    registration.module_imported(module)


def install() -> bool:
    """Place the hook, once, and report what has been imported before.

    Returns:
        Whether it was placed now.
    """
    if any(isinstance(finder, ImportHook) for finder in sys.meta_path):
        return False
    # First, because the finder that finds a module is not followed by another.
    sys.meta_path.insert(0, ImportHook())
    if DRIVER_MODULE in sys.modules:
        _report(DRIVER_MODULE)
    return True


def remove() -> None:
    """Take the hook away; what has been registered stays."""
    sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, ImportHook)]
