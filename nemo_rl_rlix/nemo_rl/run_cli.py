"""``nemo-rl-rlix run``: start an unchanged NeMo RL script time-shared, without the ``.pth``.

Where only ``PYTHONPATH`` carries this package there is no console script either; then
``python -m nemo_rl_rlix.nemo_rl.run_cli script.py args`` is the same.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path
from typing import Annotated

import typer

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.gate import CONTROL_PLANE_ENV
from nemo_rl_rlix.nemo_rl import autoload


def run_script(command: list[str]) -> None:
    """Run a script, or ``-m module``, as Python would, with time sharing on.

    Args:
        command: The script and its arguments.

    Raises:
        SettingError: There is no such script.
    """
    # Ray's workers inherit it; what they do depends on it too.
    os.environ[CONTROL_PLANE_ENV] = "rlix"
    autoload.install()
    if command and command[0] == "-m":
        if len(command) == 1:
            raise SettingError("run", "-m", "a module has to follow", "Write: run -- -m MODULE")
        sys.argv = command[1:]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(command[1], run_name="__main__", alter_sys=True)
        return
    script = Path(command[0]) if command else Path()
    if not script.is_file():
        raise SettingError(
            "run", str(script), "there is no such script", "Write: run -- SCRIPT.py [ARGS]"
        )
    sys.argv = [str(script), *command[1:]]
    sys.path.insert(0, str(script.resolve().parent))
    runpy.run_path(str(script), run_name="__main__")


def run(
    command: Annotated[
        list[str],
        typer.Argument(metavar="SCRIPT [ARGS]...", help="The script and its arguments, after --."),
    ],
) -> None:
    """Run a NeMo RL script time-shared."""
    run_script(command)


if __name__ == "__main__":
    run_script(sys.argv[1:])
