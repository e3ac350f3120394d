"""Hypothesis, for every test: no time limit an example, and the same examples in CI."""

from __future__ import annotations

import os

from hypothesis import settings

# A busy machine makes single examples slow; pytest-timeout bounds the whole test. In
# CI the examples are fixed, so that a change is judged by what it changed.
settings.register_profile("desk", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
# A thread that outlives its cluster must fail, not start another cluster behind our back.
os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"

settings.load_profile("ci" if os.environ.get("CI") else "desk")
