"""Demand reports that do not come from the training loop: the collector's, and validation's."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from nemo_rl_rlix.control_plane.protocol import ControlPlane, ProgressReport
from nemo_rl_rlix.hooks import NoOpRLixHooks, RLixHooks


@dataclass(frozen=True)
class CollectorHooks(NoOpRLixHooks):
    """Hooks of the processes that collect. Picklable; no call blocks.

    Attributes:
        pipeline_id: The pipeline.
        control_plane: Its scheduler; a copy speaks for the same pipeline.
    """

    pipeline_id: str
    control_plane: ControlPlane

    def report_progress(self, collected: int, target: int) -> None:
        """Send a demand snapshot; a target of 0 says nothing and is not sent."""
        if target > 0:
            report = ProgressReport(self.pipeline_id, target, min(collected, target), time.time())
            self.control_plane.report_progress(report)

    def clear_progress(self) -> None:
        """Withdraw the demand snapshot."""
        self.control_plane.clear_progress()


@contextlib.contextmanager
def repeat_demand(hooks: RLixHooks, trajectories: int, *, interval_s: float) -> Iterator[None]:
    """Report that trajectories are wanted, again and again while the body runs.

    Repeated, because a report of the collector replaces it. Withdrawn at the end; what
    the collector wants then, it reports when it goes on.

    Args:
        hooks: Where to report.
        trajectories: How many are wanted.
        interval_s: Seconds between two reports.
    """
    done = threading.Event()

    def report() -> None:
        while not done.is_set():
            hooks.report_progress(0, trajectories)
            done.wait(interval_s)

    thread = threading.Thread(target=report, name="rlix-validation-demand", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        hooks.clear_progress()
