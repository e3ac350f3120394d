"""Lets NeMo RL, which is written for Python 3.13, be imported on 3.11.

Pydantic takes a TypedDict of ``typing`` only from Python 3.12 on. Read by every
interpreter that has this folder on ``PYTHONPATH``, Ray's workers included.
"""

import sys
import typing

if sys.version_info < (3, 12):
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict
