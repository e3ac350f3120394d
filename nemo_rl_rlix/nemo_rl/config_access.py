"""Reading and changing NeMo RL's configuration object, whatever its sections are.

It is a pydantic model in every supported version; some of its sections are models in
one version and dictionaries in another, and unknown blocks such as ``rlix`` are kept.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any

_ABSENT = object()


def plain(master_config: Any) -> dict[str, Any]:
    """The whole configuration as plain data; a copy."""
    data: dict[str, Any] = master_config.model_dump()
    return data


def assign(master_config: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Change settings in place.

    Args:
        master_config: The configuration object.
        changes: Dotted setting -> value. Its section exists.

    Returns:
        What was there, for :func:`restore`.
    """
    before = {}
    for setting, value in changes.items():
        section, name = _section(master_config, setting)
        before[setting] = _get(section, name)
        _set(section, name, value)
    return before


def restore(master_config: Any, before: Mapping[str, Any]) -> None:
    """Undo :func:`assign`."""
    for setting, value in before.items():
        section, name = _section(master_config, setting)
        if value is _ABSENT and isinstance(section, MutableMapping):
            section.pop(name, None)
        else:
            _set(section, name, value)


@contextlib.contextmanager
def changed(master_config: Any, changes: Mapping[str, Any]) -> Iterator[None]:
    """Change settings while the body runs."""
    before = assign(master_config, changes)
    try:
        yield
    finally:
        restore(master_config, before)


def _section(master_config: Any, setting: str) -> tuple[Any, str]:
    *way, name = setting.split(".")
    section = master_config
    for part in way:
        section = section[part] if isinstance(section, Mapping) else getattr(section, part)
    return section, name


def _get(section: Any, name: str) -> Any:
    if isinstance(section, Mapping):
        return section.get(name, _ABSENT)
    return getattr(section, name)


def _set(section: Any, name: str, value: Any) -> None:
    if isinstance(section, MutableMapping):
        section[name] = value
    else:
        setattr(section, name, value)
