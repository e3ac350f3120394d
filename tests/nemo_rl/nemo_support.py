"""What the tests of this folder have in common."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

RunPython = Callable[..., subprocess.CompletedProcess[str]]
