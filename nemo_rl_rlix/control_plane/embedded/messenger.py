"""Sends progress and heartbeats from a thread of its own, so that no caller waits."""

from __future__ import annotations

import threading
from collections.abc import Callable

from nemo_rl_rlix.control_plane.protocol import ProgressReport
from nemo_rl_rlix.errors import ControlPlaneLostError, DeadlineExceededError, RLixError


class Messenger:
    """Keeps only the newest demand; one message is under way at a time.

    A report that is overtaken by a newer one before it is sent is dropped, since
    reports are snapshots; the newest is always sent.

    Args:
        send: Delivers a snapshot, or ``None`` for "nothing wanted".
        beat: Delivers a heartbeat.
        interval_s: Seconds between heartbeats; ``None``: this process sends none.
    """

    def __init__(
        self,
        send: Callable[[ProgressReport | None], None],
        beat: Callable[[], None],
        interval_s: float | None,
    ) -> None:
        self._send = send
        self._beat = beat
        self._interval_s = interval_s
        self._condition = threading.Condition()
        self._unsent: list[ProgressReport | None] = []
        self._stopped = False
        self._failure: RLixError | None = None
        self._thread = threading.Thread(target=self._run, name="rlix-messenger", daemon=True)
        self._thread.start()

    def post(self, report: ProgressReport | None) -> None:
        """Replace what is to be sent next; returns at once.

        Raises:
            RLixError: An earlier message showed that the pipeline or the control
                plane is gone.
        """
        with self._condition:
            if self._failure is not None:
                raise self._failure
            self._unsent[:] = [report]
            self._condition.notify()

    def discard(self) -> None:
        """Forget what has not been sent."""
        with self._condition:
            self._unsent.clear()

    def stop(self, timeout_s: float) -> None:
        """End the thread; nothing more is sent."""
        with self._condition:
            self._stopped = True
            self._unsent.clear()
            self._condition.notify()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._condition:
                if not self._unsent and not self._stopped:
                    self._condition.wait(self._interval_s)
                if self._stopped:
                    return
                message = self._unsent.copy()
                self._unsent.clear()
            try:
                if message:
                    self._send(message[0])
                elif self._interval_s is not None:
                    self._beat()
            except DeadlineExceededError:
                continue  # the control plane is slow; the next message shows how it is
            except RLixError as error:
                with self._condition:
                    self._failure = error
                return
            except Exception as error:  # noqa: BLE001 - kept for the next caller; a thread has nobody to raise to
                with self._condition:
                    self._failure = ControlPlaneLostError(f"reports cannot be sent: {error!r}")
                return
