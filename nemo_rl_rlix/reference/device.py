"""A logical GPU on a machine that has none: a memory budget, a core and a grant.

Several processes of several pipelines use one logical GPU, as they would a real
one. What they share is a directory of small files:

* ``gpu<i>.grant``: two mapped 64-bit words, the granted owner's hash and the number
  of grants so far, which :meth:`LogicalGpu.compute` reads without a lock;
* ``gpu<i>.json``: the ledger (owner, bytes of each resident, violations, busy
  seconds), replaced atomically under ``gpu<i>.lock``.

A process that dies gives its memory back, as the CUDA driver would see to it: its
entries count no more as soon as its pid, or the pid's start time, is gone.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import tempfile
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from nemo_rl_rlix.errors import GrantRequiredError, RLixError, SettingError
from nemo_rl_rlix.reference.ledger import Ledger, process_start_time, used_bytes

if TYPE_CHECKING:
    import torch

BUSY_FLUSH_S = 0.25
"""Busy seconds are summed in the process and written to the ledger this often."""

MAX_VIOLATIONS = 256


class DeviceOutOfMemoryError(RLixError):
    """A logical GPU cannot hold what a resident asked for.

    Args:
        gpu_id: Logical GPU.
        resident: Who asked.
        asked: Bytes asked for.
        budget: Bytes the GPU has.
        used: Resident -> bytes it holds.
    """

    def __init__(
        self, gpu_id: int, resident: str, asked: int, budget: int, used: dict[str, int]
    ) -> None:
        total = sum(used.values())
        holders = ", ".join(f"{name} {nbytes}" for name, nbytes in sorted(used.items())) or "nobody"
        super().__init__(
            f"logical GPU {gpu_id} is out of memory: {resident} asked for {asked} bytes,"
            f" {budget - total} of {budget} are free, {total} are used ({holders})."
            " Make the other residents sleep or offload first, or raise the GPU's budget"
        )
        self.gpu_id = gpu_id
        self.resident = resident
        self.asked = asked
        self.budget = budget
        self.used = used

    @property
    def free(self) -> int:
        """Bytes that were free."""
        return self.budget - sum(self.used.values())


class GrantConflictError(RLixError):
    """A GPU was to be granted past the owner that holds it."""

    def __init__(self, gpu_id: int, owner: str, holder: str) -> None:
        super().__init__(f"logical GPU {gpu_id}: cannot grant it to {owner}, {holder} holds it")
        self.gpu_id = gpu_id
        self.owner = owner
        self.holder = holder


@dataclass(frozen=True)
class Violation:
    """A use of a GPU outside its grant.

    Attributes:
        gpu_id: Logical GPU.
        owner: Who used it.
        what: What it was doing.
        holder: Who held the grant then; empty for nobody.
        pid: Process that did it.
        unix_time: When, in seconds.
    """

    gpu_id: int
    owner: str
    what: str
    holder: str
    pid: int
    unix_time: float


@dataclass(frozen=True)
class LogicalGpuSpec:
    """Where a logical GPU's state lies; picklable.

    Attributes:
        directory: Private directory shared by the processes of one Ray cluster.
        gpu_id: Number of the GPU.
        budget_bytes: Memory in bytes.
    """

    directory: str
    gpu_id: int
    budget_bytes: int


def private_directory(cluster_key: str) -> Path:
    """Return the directory of one Ray cluster's logical GPUs, made if need be.

    Args:
        cluster_key: Names the cluster, e.g. Ray's session name.

    Raises:
        SettingError: Somebody else owns a directory of that name, or may enter it.
    """
    base = Path(tempfile.gettempdir()) / f"nemo-rl-rlix-{os.getuid()}"
    for directory in (base, base / cluster_key):
        directory.mkdir(mode=0o700, exist_ok=True)
        info = directory.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or info.st_mode & 0o077:
            raise SettingError(
                "TMPDIR", tempfile.gettempdir(), f"{directory} is not private to this user",
                "Remove that directory, or set TMPDIR to a directory of your own",
            )  # fmt: skip
    return base / cluster_key


def create_logical_gpus(
    directory: Path, count: int, budget_bytes: int
) -> tuple[LogicalGpuSpec, ...]:
    """Describe ``count`` logical GPUs of ``budget_bytes`` each in ``directory``.

    A second call attaches to the GPUs that the first one made.
    """
    directory.mkdir(mode=0o700, exist_ok=True)
    return tuple(LogicalGpuSpec(str(directory), gpu, budget_bytes) for gpu in range(count))


def tensor_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct storages behind ``tensors``; ties and views count once."""
    storages = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def _owner_word(owner: str) -> int:
    return int.from_bytes(hashlib.blake2b(owner.encode(), digest_size=8).digest(), "little") | 1


class LogicalGpu:
    """One process's view of a logical GPU. Picklable: it attaches again elsewhere."""

    def __init__(self, spec: LogicalGpuSpec) -> None:
        self.spec = spec
        stem = os.path.join(spec.directory, f"gpu{spec.gpu_id}")
        self._ledger = Ledger(stem)
        with open(os.open(f"{stem}.grant", os.O_RDWR | os.O_CREAT, 0o600), "r+b") as words:
            if os.fstat(words.fileno()).st_size < 16:
                words.truncate(16)
            self._words = memoryview(mmap.mmap(words.fileno(), 16)).cast("Q")
        self._busy: dict[str, float] = {}
        self._busy_lock = threading.Lock()
        self._last_flush = time.monotonic()

    def __reduce__(self) -> tuple[type[LogicalGpu], tuple[LogicalGpuSpec]]:
        return (LogicalGpu, (self.spec,))

    @property
    def gpu_id(self) -> int:
        """Number of the GPU."""
        return self.spec.gpu_id

    # -- memory ---------------------------------------------------------------

    def charge(self, resident: str, label: str, nbytes: int) -> None:
        """Set what ``resident`` holds under ``label`` to ``nbytes`` (0 frees it).

        Raises:
            DeviceOutOfMemoryError: The budget cannot hold it; nothing has changed.
        """
        with self._ledger.open() as ledger:
            entry = ledger["residents"].setdefault(
                f"{os.getpid()}:{resident}",
                {
                    "name": resident,
                    "pid": os.getpid(),
                    "start": process_start_time(os.getpid()),
                    "bytes": {},
                },
            )
            used = used_bytes(ledger)
            more = nbytes - entry["bytes"].get(label, 0)
            if more > 0 and sum(used.values()) + more > self.spec.budget_bytes:
                raise DeviceOutOfMemoryError(
                    self.gpu_id, resident, more, self.spec.budget_bytes, used
                )
            entry["bytes"][label] = nbytes
            if nbytes == 0:
                del entry["bytes"][label]

    def held_bytes(self, resident: str) -> int:
        """Bytes that living processes hold in the name of ``resident``."""
        return self.residents().get(resident, 0)

    def residents(self) -> dict[str, int]:
        """Name of each resident that holds memory -> bytes."""
        with self._ledger.open() as ledger:
            return used_bytes(ledger)

    def processes(self, resident: str) -> dict[int, int]:
        """Pid -> start time of the living processes that charged for ``resident``."""
        with self._ledger.open() as ledger:
            entries = ledger["residents"].values()
            return {e["pid"]: e["start"] for e in entries if e["name"] == resident}

    # -- grant ----------------------------------------------------------------

    def grant(self, owner: str) -> None:
        """Give the GPU to ``owner``; a no-op when it has it.

        Raises:
            GrantConflictError: Another owner holds it.
        """
        with self._ledger.open() as ledger:
            if ledger["owner"] == owner:
                return
            if ledger["owner"]:
                raise GrantConflictError(self.gpu_id, owner, ledger["owner"])
            ledger["owner"] = owner
            self._words[1] += 1
            self._words[0] = _owner_word(owner)

    def revoke(self, owner: str) -> None:
        """Take the GPU from ``owner``; a no-op when ``owner`` does not have it."""
        with self._ledger.open() as ledger:
            if ledger["owner"] != owner:
                return
            ledger["owner"] = ""
            self._words[0] = 0
            self._words[1] += 1

    def holder(self) -> str:
        """Owner that holds the GPU; empty for nobody."""
        with self._ledger.open() as ledger:
            return str(ledger["owner"])

    def compute(self, owner: str, what: str, at_least_s: float = 0.0) -> Compute:
        """Context of a computation on the GPU; its wall time counts as busy.

        Raises:
            GrantRequiredError: On entry, when ``owner`` is not granted. Use after
                the grant ended inside the context is recorded on exit, not raised.
        """
        return Compute(self, owner, what, at_least_s)

    def violations(self) -> list[Violation]:
        """Uses outside a grant, oldest first (the first 256)."""
        with self._ledger.open() as ledger:
            return [Violation(**entry) for entry in ledger["violations"]]

    def busy_seconds(self) -> dict[str, float]:
        """Owner -> seconds of computation, other processes' last 0.25 s left out."""
        self.flush()
        with self._ledger.open() as ledger:
            return dict(ledger["busy"])

    def flush(self) -> None:
        """Write the busy seconds of this process to the ledger."""
        with self._busy_lock:
            pending, self._busy = self._busy, {}
            self._last_flush = time.monotonic()
        if not pending:
            return
        with self._ledger.open() as ledger:
            for owner, seconds in pending.items():
                ledger["busy"][owner] = ledger["busy"].get(owner, 0.0) + seconds

    # -- core -----------------------------------------------------------------

    def pin(self) -> int:
        """Tie every thread of this process to the GPU's core, torch to one thread.

        Returns:
            The core, ``gpu_id`` modulo the cores that this process may use.
        """
        import torch

        cores = sorted(os.sched_getaffinity(0))
        core = cores[self.gpu_id % len(cores)]
        for task in os.listdir("/proc/self/task"):
            try:
                os.sched_setaffinity(int(task), {core})
            except ProcessLookupError:
                continue
        torch.set_num_threads(1)
        return core

    # -- internals ------------------------------------------------------------

    def _record_violation(self, owner: str, what: str) -> None:
        with self._ledger.open() as ledger:
            if len(ledger["violations"]) < MAX_VIOLATIONS:
                ledger["violations"].append(
                    {
                        "gpu_id": self.gpu_id,
                        "owner": owner,
                        "what": what,
                        "holder": ledger["owner"],
                        "pid": os.getpid(),
                        "unix_time": time.time(),
                    }
                )

    def _add_busy(self, owner: str, seconds: float) -> None:
        with self._busy_lock:
            self._busy[owner] = self._busy.get(owner, 0.0) + seconds
            due = time.monotonic() - self._last_flush > BUSY_FLUSH_S
        if due:
            self.flush()


class Compute:
    """See :meth:`LogicalGpu.compute`. A class, since it is entered on every engine step."""

    __slots__ = ("_at_least_s", "_gpu", "_grant", "_owner", "_started", "_what")

    def __init__(self, gpu: LogicalGpu, owner: str, what: str, at_least_s: float) -> None:
        self._gpu, self._owner, self._what = gpu, owner, what
        self._at_least_s = at_least_s
        self._grant, self._started = 0, 0.0

    def __enter__(self) -> None:
        words = self._gpu._words
        self._grant = words[1]
        if words[0] != _word_of(self._owner):
            self._gpu._record_violation(self._owner, self._what)
            raise GrantRequiredError(self._owner, [self._gpu.gpu_id], self._what)
        self._started = time.perf_counter()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        spent = time.perf_counter() - self._started
        if spent < self._at_least_s and error is None:
            time.sleep(self._at_least_s - spent)
            spent = time.perf_counter() - self._started
        self._gpu._add_busy(self._owner, spent)
        if self._gpu._words[1] != self._grant:
            self._gpu._record_violation(self._owner, f"{self._what} beyond the end of its grant")


_WORDS: dict[str, int] = {}


def _word_of(owner: str) -> int:
    word = _WORDS.get(owner)
    if word is None:
        word = _WORDS[owner] = _owner_word(owner)
    return word
