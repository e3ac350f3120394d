"""NeMo RL's trajectory collector, which also reports demand.

Runs in the collector's actor. A push only wakes the thread that reports.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import ray
from nemo_rl.algorithms.async_utils.trajectory_collector import AsyncTrajectoryCollector
from ray.exceptions import GetTimeoutError, RayError

from nemo_rl_rlix.errors import DeadlineExceededError
from nemo_rl_rlix.hooks import NoOpRLixHooks, RLixHooks
from nemo_rl_rlix.nemo_rl.demand import BufferView, Demand, measure, wanted_targets
from nemo_rl_rlix.nemo_rl.demand_reporter import DemandReporter
from nemo_rl_rlix.nemo_rl.failures import CollectionFailedError
from nemo_rl_rlix.nemo_rl.makers import plain_class
from nemo_rl_rlix.nemo_rl.recipe import lookup
from nemo_rl_rlix.shards.redispatch import DispatchCounts

logger = logging.getLogger(__name__)

VIEW_TIMEOUT_S = 10.0

_Base: Any = plain_class(AsyncTrajectoryCollector)


class PushedBuffer:
    """The buffer's handle, with something done before and after each push.

    Args:
        buffer: Actor handle of the buffer.
        before: Called before a push; what it raises stops the push.
        after: Called after the push has been sent; returns at once.
    """

    def __init__(self, buffer: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._buffer = buffer
        self.add = _Add(buffer.add, before, after)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)


class _Add:
    def __init__(self, method: Any, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._method, self._before, self._after = method, before, after

    def remote(self, *args: Any, **kwargs: Any) -> Any:
        self._before()
        pushed = self._method.remote(*args, **kwargs)
        self._after()
        return pushed


class ReportingCollector(_Base):
    """``AsyncTrajectoryCollector`` with reports; takes the arguments of its base.

    Args:
        rlix_hooks: Where demand is reported; without them nothing is.
    """

    replay_buffer: Any

    def __init__(self, *args: Any, rlix_hooks: RLixHooks | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        recipe = self.master_config.model_dump()
        self._rlix_groups = int(lookup(recipe, "grpo.num_prompts_per_step"))
        self._rlix_generations = int(lookup(recipe, "grpo.num_generations_per_prompt"))
        self._rlix_reports = rlix_hooks is not None
        self._rlix_reporter = DemandReporter(rlix_hooks or NoOpRLixHooks(), self._rlix_demand)
        self.replay_buffer = PushedBuffer(
            self.replay_buffer, self._rlix_refuse_after_failure, self._rlix_reporter.poke
        )

    # -- NeMo RL's own methods ----------------------------------------------------

    def start_collection(self, dataloader: Any) -> None:
        """As the base's, with reports from now on."""
        super().start_collection(dataloader)
        if self._rlix_reports:
            self._rlix_reporter.start()

    def set_weight_version(self, version: int) -> None:
        """As the base's; other target versions may be filled now."""
        super().set_weight_version(version)
        self._rlix_reporter.poke()

    # -- what is added ------------------------------------------------------------

    def rlix_dispatch_counts(self) -> DispatchCounts:
        """How the requests of this process have fared."""
        counts: DispatchCounts = self.policy_generation.rlix_dispatch_counts()
        return counts

    def _rlix_refuse_after_failure(self) -> None:
        """Keep groups with unanswered requests out of training.

        Rollouts swallow what a request raises and pass on what there is. The training
        loop hears of it through the buffer, which it polls in every version.

        Raises:
            CollectionFailedError: A request of this process could not be answered.
        """
        failure = self.policy_generation.rlix_failure
        if failure is None:
            return
        cause = f"{type(failure).__name__}: {failure}"
        self.replay_buffer.rlix_fail.remote(cause)
        raise CollectionFailedError(cause)

    def _rlix_demand(self) -> Demand | None:
        """The demand now, in the reporter's thread."""
        try:
            view: BufferView = ray.get(
                self.replay_buffer.rlix_view.remote(), timeout=VIEW_TIMEOUT_S
            )
        except GetTimeoutError as error:
            raise DeadlineExceededError("view of the replay buffer", VIEW_TIMEOUT_S) from error
        except RayError as error:
            logger.info("the replay buffer has ended: %s", type(error).__name__)
            return None
        generating = self._generating_targets.copy()
        targets: frozenset[int] = frozenset()
        if self.running:
            allowed = self._calculate_target_weights(self.current_weight_version)
            targets = wanted_targets(allowed, generating, view)
        elif generating:  # the data are at an end; what is being filled still is
            targets = wanted_targets((), generating, view)
        return measure(
            targets,
            view,
            groups_per_target=self._rlix_groups,
            generations=self._rlix_generations,
            open_requests=self.policy_generation.rlix_open_requests(),
        )
