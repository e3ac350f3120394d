"""Two replacements, of which one is for a single version."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nemo_rl_rlix.nemo_rl import refit
from nemo_rl_rlix.nemo_rl.swap import Swap
from nemo_rl_rlix.nemo_rl.versions import NemoRl


def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    """Change nothing."""

    @functools.wraps(original)
    def setup(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    return setup


SWAPS = (
    Swap("setup", wrap),
    Swap("refit", refit.ask_synchronizer_first, frozenset({NemoRl.V0_7_0})),
)
