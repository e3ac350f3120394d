"""How this package reaches Ray workers that run in other interpreters.

NeMo RL gives each kind of worker an environment of its own and hands the driver's
variables on, ``PYTHONPATH`` included. Neither a ``.pth`` nor an installation can be
counted on there, so one folder on ``PYTHONPATH`` carries the package.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from pathlib import Path

PYTHONPATH = "PYTHONPATH"


def carrier() -> Path:
    """The folder that makes this package importable and nothing else."""
    return Path(__file__).resolve().parent / "carrier"


def put_on_pythonpath(environment: MutableMapping[str, str]) -> bool:
    """Have the processes that inherit ``environment`` find this package.

    It goes last, so that it takes no name from a folder that is there already.

    Args:
        environment: The variables, changed in place.

    Returns:
        Whether anything was added.
    """
    folders = [item for item in environment.get(PYTHONPATH, "").split(os.pathsep) if item]
    if str(carrier()) in folders:
        return False
    environment[PYTHONPATH] = os.pathsep.join([*folders, str(carrier())])
    return True


def take_off_pythonpath(environment: MutableMapping[str, str]) -> None:
    """Undo :func:`put_on_pythonpath`."""
    folders = [item for item in environment.get(PYTHONPATH, "").split(os.pathsep) if item]
    rest = [item for item in folders if item != str(carrier())]
    if rest:
        environment[PYTHONPATH] = os.pathsep.join(rest)
    else:
        environment.pop(PYTHONPATH, None)
