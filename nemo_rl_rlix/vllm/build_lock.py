"""One engine at a time is built on a card, whichever pipeline it belongs to.

A build measures the card's memory and takes far more of it for a while than later.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
from collections.abc import Iterator, Sequence

from nemo_rl_rlix.errors import DeadlineExceededError

DIRECTORY = "/tmp"
POLL_S = 0.05


@contextlib.contextmanager
def build_lock(
    device_ids: Sequence[str], *, timeout_s: float, directory: str = DIRECTORY
) -> Iterator[None]:
    """Hold the build locks of some cards; the kernel frees them with the process.

    Args:
        device_ids: UUIDs of the cards; empty when they are not known yet, as for an
            engine over several GPUs: then no other engine of the node is built.
        timeout_s: Deadline of the wait, in seconds.
        directory: Directory of the lock files.

    Raises:
        DeadlineExceededError: Another build holds one of them.
    """
    end = time.monotonic() + timeout_s
    with contextlib.ExitStack() as held:
        whole_node = not device_ids
        _take(held, "node", fcntl.LOCK_EX if whole_node else fcntl.LOCK_SH, end, directory)
        for device in sorted(set(device_ids)):  # everyone in the same order
            _take(held, device, fcntl.LOCK_EX, end, directory)
        yield


def _take(held: contextlib.ExitStack, name: str, how: int, end: float, directory: str) -> None:
    started = time.monotonic()
    digest = hashlib.sha256(name.encode()).hexdigest()[:16]
    path = os.path.join(directory, f"rlix-build-{os.getuid()}-{digest}.lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    held.callback(os.close, fd)
    while True:
        try:
            fcntl.flock(fd, how | fcntl.LOCK_NB)
            return
        except BlockingIOError as error:
            if time.monotonic() > end:
                raise DeadlineExceededError(
                    f"wait for another build on {name}", time.monotonic() - started
                ) from error
            time.sleep(POLL_S)
