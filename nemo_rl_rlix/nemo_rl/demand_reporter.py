"""A thread that reports demand, so that neither a push nor a poll waits for a report."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from nemo_rl_rlix.errors import DeadlineExceededError, RLixError
from nemo_rl_rlix.hooks import RLixHooks
from nemo_rl_rlix.nemo_rl.demand import Demand, worth_reporting

logger = logging.getLogger(__name__)

LOOK_S = 0.5
"""Seconds between two looks; polls of NeMo RL's training loop are as far apart."""

REPEAT_S = 5.0
"""Seconds after which an unchanged snapshot is sent again: what is sent may be lost."""

Observe = Callable[[], Demand | None]
"""The demand now; ``None`` when collection has ended. May block for seconds."""


class DemandReporter:
    """Looks at demand now and then, and when it is told that something has changed.

    Args:
        hooks: Where reports go; called from this thread only.
        observe: See :data:`Observe`. May raise ``DeadlineExceededError``: then nothing
            is known and nothing is reported.
        look_s: Seconds between two looks.
        repeat_s: Seconds after which a snapshot is repeated.
    """

    def __init__(
        self,
        hooks: RLixHooks,
        observe: Observe,
        *,
        look_s: float = LOOK_S,
        repeat_s: float = REPEAT_S,
    ) -> None:
        self._hooks, self._observe = hooks, observe
        self._look_s, self._repeat_s = look_s, repeat_s
        self._changed = threading.Event()
        self._stopped = threading.Event()
        self._last: Demand | None = None
        self._last_s = 0.0
        self._thread = threading.Thread(target=self._run, name="rlix-demand", daemon=True)

    def start(self) -> None:
        """Begin to report. A second call does nothing."""
        if self._thread.ident is None:
            self._thread.start()

    def poke(self) -> None:
        """Have a look soon; returns at once."""
        self._changed.set()

    def stop(self, timeout_s: float) -> None:
        """End, and withdraw what was reported."""
        self._stopped.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._changed.clear()
            try:
                now = self._observe()
            except DeadlineExceededError as error:
                logger.warning("demand is unknown: %s", error)
            else:
                if now is None:
                    break
                self._say(now)
            self._changed.wait(self._look_s)
        self._say(None)

    def _say(self, now: Demand | None) -> None:
        try:
            if now is None or now.remaining <= 0:
                if self._last is not None:
                    self._hooks.clear_progress()
                    self._last = None
                return
            old = time.monotonic() - self._last_s > self._repeat_s
            if old or worth_reporting(self._last, now):
                self._hooks.report_progress(now.collected, now.target)
                self._last, self._last_s = now, time.monotonic()
        except RLixError as error:
            logger.warning("demand was not reported: %s", error)
