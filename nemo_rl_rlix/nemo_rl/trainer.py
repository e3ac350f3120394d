"""The training workers of a policy object as one ``Trainer``."""

from __future__ import annotations

import logging
import time
from typing import Any, Protocol

import ray
from ray.exceptions import RayError

from nemo_rl_rlix.deadline import Deadline
from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.ray_errors import Callee, unwrap
from nemo_rl_rlix.settings import RLixSettings
from nemo_rl_rlix.shards.protocol import MemoryReport
from nemo_rl_rlix.training.protocol import Trainer
from nemo_rl_rlix.weights.types import CacheHandle

logger = logging.getLogger(__name__)

NOTHING = MemoryReport(0, 0)
RETURN_S = 5.0
"""Seconds for the way there and back; the workers keep the deadline themselves."""
POLL_S = 0.05


class EndableTrainer(Trainer, Protocol):
    """A trainer whose processes can be ended."""

    def end(self, *, timeout_s: float) -> None:
        """End the workers, whatever they do; returns when they are gone."""
        ...


class DeferredTrainer:
    """A trainer that is built later: it has nothing on a device until then.

    Once ended it has nothing there any more.
    """

    def __init__(self) -> None:
        self._trainer: EndableTrainer | None = None

    def bind(self, trainer: EndableTrainer) -> None:
        """Take the trainer."""
        self._trainer = trainer

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> CacheHandle:
        """See ``Trainer``."""
        return self._bound().build_cpu_weight_cache(step, slot=slot, timeout_s=timeout_s)

    def onload(self, *, timeout_s: float) -> None:
        """See ``Trainer``."""
        self._bound().onload(timeout_s=timeout_s)

    def offload(self, *, timeout_s: float) -> MemoryReport:
        """See ``Trainer``."""
        return NOTHING if self._trainer is None else self._trainer.offload(timeout_s=timeout_s)

    def end(self, *, timeout_s: float) -> None:
        """End the workers, whatever they do; returns when they are gone."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.end(timeout_s=timeout_s)

    def _bound(self) -> Trainer:
        if self._trainer is None:
            raise RLixError("the trainer has not been built, or has ended")
        return self._trainer


class WorkerGroupTrainer:
    """The ranks of a NeMo RL policy whose workers are of this package.

    Args:
        worker_group: ``policy.worker_group``; every worker has the ``rlix_`` methods of
            :class:`~nemo_rl_rlix.nemo_rl.megatron_workers.RlixMegatronPolicyWorkerImpl`.
        pipeline_id: The pipeline.
        settings: Its ``rlix:`` block.
    """

    def __init__(self, worker_group: Any, pipeline_id: str, settings: RLixSettings) -> None:
        self._workers: tuple[Any, ...] = tuple(worker_group.workers)
        self._run(
            "rlix_configure",
            pipeline_id,
            settings.model_dump(mode="json"),
            timeout_s=settings.deadlines.control_s,
        )

    def build_cpu_weight_cache(self, step: int, *, slot: int, timeout_s: float) -> CacheHandle:
        """Snapshot the weights; one rank stores and answers.

        Raises:
            RLixError: No rank or several ranks own the cache.
        """
        answers = self._run("build_cpu_weight_cache", step, slot, timeout_s, timeout_s=timeout_s)
        handles = [handle for handle in answers if handle is not None]
        if len(handles) != 1:
            raise RLixError(
                f"{len(handles)} of {len(answers)} training ranks own the weight cache, not 1"
            )
        found: CacheHandle = handles[0]
        return found

    def onload(self, *, timeout_s: float) -> None:
        """Make communication groups again, then move everything to the devices."""
        self._run("rlix_onload", timeout_s, timeout_s=timeout_s)

    def offload(self, *, timeout_s: float) -> MemoryReport:
        """Move everything to the host, then end the communication groups.

        The ranks have checked that nothing stayed, so nothing is reported as held.
        """
        self._run("rlix_offload", timeout_s, timeout_s=timeout_s)
        return NOTHING

    def end(self, *, timeout_s: float) -> None:
        """End the workers; returns when they are gone.

        Raises:
            DeadlineExceededError: One is still there.
        """
        deadline = Deadline("end of the training workers", timeout_s)
        for worker in self._workers:
            ray.kill(worker, no_restart=True)
        for worker in self._workers:
            while _lives(worker, deadline.left(timeout_s)):
                time.sleep(POLL_S)

    def _run(self, method: str, *args: object, timeout_s: float) -> list[Any]:
        answers = [getattr(worker, method).remote(*args) for worker in self._workers]
        try:
            results: list[Any] = ray.get(answers, timeout=timeout_s + RETURN_S)
        except RayError as error:
            callee = Callee(f"{method} of the training workers", timeout_s=timeout_s)
            typed = unwrap(error, callee)
            if isinstance(typed, RLixError):
                raise typed from error
            raise RLixError(f"{method} of the training workers: {typed}") from error
        return results


def _lives(worker: Any, timeout_s: float) -> bool:
    """Whether an actor that was killed still answers; Ray ends it a little later."""
    try:
        ray.get(worker.__ray_call__.remote(_nothing), timeout=timeout_s)
    except ray.exceptions.GetTimeoutError:
        return True
    except ray.exceptions.RayActorError:
        return False
    return True


def _nothing(worker: object) -> None:
    """A call that does nothing."""
