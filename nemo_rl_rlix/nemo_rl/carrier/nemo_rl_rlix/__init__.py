"""Stands in for the package of this name where only ``PYTHONPATH`` leads to it.

The folder above is put on ``PYTHONPATH`` for interpreters that do not have the package
installed. Naming the folder that really holds it would bring every other package
installed there along, in versions that are not theirs.
"""

from pathlib import Path

_REAL = Path(__file__).resolve().parents[3]

__path__ = [str(_REAL)]
__file__ = str(_REAL / "__init__.py")
exec(compile(Path(__file__).read_text(encoding="utf-8"), __file__, "exec"))
