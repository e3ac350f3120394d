"""These tests need Megatron-Core and Megatron Bridge, which have an environment of their own."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

_NEEDED = ("megatron.core", "megatron.bridge", "transformers")
_HERE = Path(__file__).parent


def _missing() -> list[str]:
    missing = []
    for name in _NEEDED:
        try:
            found = importlib.util.find_spec(name) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            missing.append(name)
    return missing


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = _missing()
    if not missing:
        return
    reason = f"not installed here: {', '.join(missing)}; run `make test-megatron-cpu`"
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=reason))
