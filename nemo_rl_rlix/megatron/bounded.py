"""Calls into C++ that may never return, given a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import torch

from nemo_rl_rlix.errors import DeadlineExceededError


def within(timeout_s: float, what: str, *calls: Callable[[], None]) -> None:
    """Run calls at once, each on a thread of its own, and stop waiting at the deadline.

    A call that hangs goes on hanging on its (daemon) thread: the caller must give up
    whatever it was working on.

    Args:
        timeout_s: Deadline in seconds.
        what: The act, for the error.
        calls: The calls.

    Raises:
        DeadlineExceededError: One did not return in time.
    """
    failures: list[BaseException] = []
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(call: Callable[[], None]) -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)  # it is a property of the thread
            call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            failures.append(error)

    end = time.monotonic() + timeout_s
    threads = [
        threading.Thread(target=run, args=(call,), name=f"rlix {what}", daemon=True)
        for call in calls
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))
    if failures:
        raise failures[0]
    if any(thread.is_alive() for thread in threads):
        raise DeadlineExceededError(what, timeout_s)
