"""The one switch: is this process part of a time-shared run?"""

import os

CONTROL_PLANE_ENV = "RLIX_CONTROL_PLANE"
"""Environment variable that turns time sharing on when it equals ``rlix``."""


def time_sharing_enabled() -> bool:
    """Read the switch now, for code that outlives a change of the environment."""
    return os.environ.get(CONTROL_PLANE_ENV) == "rlix"


DO_TIME_SHARING: bool = time_sharing_enabled()
"""The switch as it was when this module was imported (the RFC's name)."""
