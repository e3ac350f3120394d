"""NeMo RL's policy facade, whose GPUs are granted before they are used."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from nemo_rl.models.policy.lm_policy import Policy

from nemo_rl_rlix.nemo_rl import session as sessions
from nemo_rl_rlix.nemo_rl.session import Session

NEEDS_GPUS = (
    "train",
    "get_logprobs",
    "get_reference_policy_logprobs",
    "get_topk_logits",
    "get_full_logits_ipc",
    "generate",
    "score",
    "calibrate_qkv_fp8_scales",
    "finish_inference",
    "offload_before_refit",
    "offload_after_refit",
    "stream_weights_via_ipc_zmq",
    "stream_weights_via_http",
    "broadcast_weights_for_collective",
    "swap_weights_via_reshard",
    "nccl_reshard_refit",
    "start_gpu_profiling",
)
"""Methods, of any version, that use the training GPUs and are refused without them."""

_FINALIZES = "finalize_async_save" in dir(Policy)
"""Main has asynchronous saves, v0.7.0 does not."""


def _guarded(name: str) -> Callable[..., Any]:
    base = getattr(Policy, name)

    @functools.wraps(base)
    def method(self: TimeSharedPolicy, *args: Any, **kwargs: Any) -> Any:
        self._rlix_open_session().require_grant(name)
        return base(self, *args, **kwargs)

    return method


class TimeSharedPolicy(Policy):
    """A policy that holds its GPUs from its first use in a step to the weight hand-over."""

    # The destructor runs on half-built objects too.
    _rlix_session: Session | None = None
    _rlix_refit_info: dict[str, Any] | None = None
    _rlix_save_pending = False

    def __init__(self, *args: Any, name_prefix: str = "lm_policy", **kwargs: Any) -> None:
        """As the base class, under a grant; the GPUs are free again when it returns.

        The metadata of a refit is asked for now, since later the GPUs may be another's.
        """
        session = sessions.current()
        self._rlix_session = session
        with session.trainer_turn():
            super().__init__(*args, name_prefix=f"{session.pipeline_id}-{name_prefix}", **kwargs)
            session.bind_trainer(self)
            self._rlix_refit_info = super().prepare_refit_info()

    # -- training step ------------------------------------------------------------

    def prepare_for_lp_inference(self, *args: Any, **kwargs: Any) -> None:
        """As the base class, once the GPUs are granted: the first use of a step."""
        self._rlix_open_session().before_training()
        super().prepare_for_lp_inference(*args, **kwargs)

    def prepare_for_training(self, *args: Any, **kwargs: Any) -> None:
        """As the base class; the first use of a step that skips log-probabilities."""
        self._rlix_open_session().before_training()
        super().prepare_for_training(*args, **kwargs)

    def prepare_refit_info(self) -> dict[str, Any] | None:
        """What was asked for when the trainer was built."""
        return self._rlix_refit_info

    def init_collective(self, *args: Any, **kwargs: Any) -> list[Any]:
        """No group of trainer and engines: it would hold two ranks on one GPU."""
        return []

    # -- checkpoint ---------------------------------------------------------------

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the base class, under a grant of its own, complete when it returns.

        It is called after the weights were handed over, when the GPUs are another's.
        An asynchronous save reads tensors of the device, so it ends before they go.
        """
        with self._rlix_open_session().grant():
            self._rlix_save_pending = True
            super().save_checkpoint(*args, **kwargs)
            self._rlix_finalize()

    def finalize_async_save(self) -> None:
        """Nothing, except after a save that failed half way."""
        if self._rlix_save_pending:
            with self._rlix_open_session().grant():
                self._rlix_finalize()

    def _rlix_finalize(self) -> None:
        if _FINALIZES:
            super().finalize_async_save()
        self._rlix_save_pending = False

    # -- end ----------------------------------------------------------------------

    def shutdown(self) -> bool:
        """Leave the scheduler, then end the workers."""
        if self._rlix_session is not None:
            self._rlix_session.leave()
        return bool(super().shutdown())

    def _rlix_open_session(self) -> Session:
        return self._rlix_session if self._rlix_session is not None else sessions.current()


for _name in NEEDS_GPUS:
    if _name in dir(Policy):
        setattr(TimeSharedPolicy, _name, _guarded(_name))
