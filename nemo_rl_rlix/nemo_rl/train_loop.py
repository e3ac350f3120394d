"""The wrappers around NeMo RL's training loop and its validation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from nemo_rl_rlix.nemo_rl import session as sessions
from nemo_rl_rlix.nemo_rl.actors import note_validation

logger = logging.getLogger(__name__)

Function = Callable[..., Any]


def guard(original: Function) -> Function:
    """Give everything back on every way out of the loop, and say why it ended.

    Symptom: a run whose weights could not be handed over ends with exit code 0.
    Cause: the loop returns when its first refit fails, and in release 0.7.0 it prints
    exceptions of a step and returns too.

    Args:
        original: ``async_grpo_train`` of the GRPO module.

    Returns:
        A function of the same signature, which raises what time sharing met.
    """

    @functools.wraps(original)
    def async_grpo_train(*args: Any, **kwargs: Any) -> Any:
        session = sessions.current()
        try:
            result = original(*args, **kwargs)
        except BaseException as error:
            session.fail(error)
            raise
        finally:
            session.close()
        if session.failure is not None:
            logger.error("%s ended early: %s", session.pipeline_id, session.failure)
            raise session.failure
        return result

    return async_grpo_train


def count_validation(original: Function) -> Function:
    """Have the scheduler know that a validation wants to generate.

    Symptom: validation stands still, since no shard is granted to a pipeline that has
    all its trajectories.
    Cause: demand is counted by the collector, which is paused meanwhile.

    Args:
        original: ``validate`` of the GRPO module.

    Returns:
        A function of the same signature.
    """

    @functools.wraps(original)
    def validate(*args: Any, **kwargs: Any) -> Any:
        session = sessions.find()
        if session is None or session.state is not sessions.State.RUNNING:
            return original(*args, **kwargs)
        if note_validation(session.validation_samples):
            try:
                return original(*args, **kwargs)
            finally:
                note_validation(0)
        with session.validation():
            return original(*args, **kwargs)

    return validate
