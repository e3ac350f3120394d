"""Host memory that every process of a node can map.

An anonymous memfd by default, which others open as ``/proc/<pid>/fd/<fd>``: it is
not bounded by the size of /dev/shm (64 MiB in many containers) and vanishes with
its processes. A file in a given directory where processes of other PID namespaces
must map it. Either way one header page precedes the payload.

    memory = SharedHostMemory.create(nbytes, node_id=node)       # owner
    view = SharedHostMemory.attach(handle)                       # any other process
    view.tensor[:16]                                             # torch.uint8, no copy
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import secrets
import stat
import weakref
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from nemo_rl_rlix.errors import HostMemoryError, SettingError
from nemo_rl_rlix.weights import pinning
from nemo_rl_rlix.weights.errors import SharedMemoryError, StaleHandleError
from nemo_rl_rlix.weights.header import HEADER_BYTES, SlotHeader
from nemo_rl_rlix.weights.types import SharedMemoryHandle

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_FILE_PREFIX = "nemo-rl-rlix-"
_FILE_SUFFIX = ".weights"
_MAP_FLAGS = mmap.MAP_SHARED | mmap.MAP_POPULATE  # page faults now, not inside a resize


class SharedHostMemory:
    """A mapping of shared host memory. Use :meth:`create` or :meth:`attach`.

    Closing removes the file and ends the registration. A tensor over the memory
    that is still referenced keeps the mapping itself alive until it is dropped,
    so that closing never leaves a tensor over unmapped memory.

    Attributes:
        handle: How other processes map it.
        registered: Whether the memory is page-locked for CUDA in this process.
    """

    def __init__(
        self,
        mapping: mmap.mmap,
        handle: SharedMemoryHandle,
        *,
        fd: int,
        owned_path: str | None,
    ) -> None:
        self.handle = handle
        self.registered = False
        self._mapping: mmap.mmap | None = mapping
        self._header = SlotHeader(memoryview(mapping)[:HEADER_BYTES])
        self._tensor: torch.Tensor | None = None
        self._pins: list[tuple[pinning.CudaRuntime, int]] = []
        self._finalizer = weakref.finalize(
            self, _release, mapping, self._pins, fd, owned_path, os.getpid()
        )

    @classmethod
    def create(cls, nbytes: int, *, node_id: str, directory: str | None = None) -> SharedHostMemory:
        """Reserve memory of this exact size, zeroed, with an invalid header.

        Args:
            nbytes: Payload size in bytes.
            node_id: Node that the handle will be valid on.
            directory: Where to put a file; ``None`` for an anonymous memfd.

        Raises:
            HostMemoryError: The kernel or the directory's file system cannot hold it.
            SettingError: The directory cannot be used.
        """
        nonce = secrets.token_hex(16)
        total = HEADER_BYTES + nbytes
        path = None
        if directory is None:
            fd = os.memfd_create("nemo-rl-rlix-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        else:
            fd, path = _create_file(directory, total)
        try:
            _reserve(fd, total, directory)
            if directory is None:
                # Nobody can shrink it under a reader, who would die of SIGBUS.
                fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            mapping = mmap.mmap(fd, total, flags=_MAP_FLAGS)
        except BaseException:  # nothing may stay behind, whatever the reason
            os.close(fd)
            if path is not None:
                os.unlink(path)
            raise
        handle = SharedMemoryHandle(
            path=path or f"/proc/{os.getpid()}/fd/{fd}", nbytes=nbytes, nonce=nonce, node_id=node_id
        )
        memory = cls(mapping, handle, fd=fd, owned_path=path)
        memory.header.initialise(nonce, nbytes)
        return memory

    @classmethod
    def attach(cls, handle: SharedMemoryHandle, *, node_id: str | None = None) -> SharedHostMemory:
        """Map memory that another process of this node created.

        Args:
            handle: The creator's handle.
            node_id: This node; checked against the handle's when given.

        Raises:
            StaleHandleError: The memory is gone, or its path belongs to something else.
            SharedMemoryError: The memory is on another node or must not be opened.
        """
        if node_id is not None and node_id != handle.node_id:
            raise SharedMemoryError(
                f"the weight cache is on node {handle.node_id}, this is {node_id}; "
                "it needs a replica on this node"
            )
        total = HEADER_BYTES + handle.nbytes
        try:
            # Non-blocking: a reused descriptor may be a pipe or a terminal.
            fd = os.open(handle.path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM):
                raise SharedMemoryError(
                    f"{handle.path}: {error.strerror}; trainer and shards must run as the same "
                    "user, else set rlix.weight_cache.directory"
                ) from error
            raise StaleHandleError(handle.path, error.strerror or "cannot be opened") from error
        try:
            found = os.fstat(fd)
            if not stat.S_ISREG(found.st_mode) or found.st_size != total:
                raise StaleHandleError(handle.path, f"not a file of {total} bytes")
            mapping = mmap.mmap(fd, total, flags=_MAP_FLAGS)
        finally:
            os.close(fd)
        memory = cls(mapping, handle, fd=-1, owned_path=None)
        mismatch = memory.header.mismatch(handle.nonce, handle.nbytes)
        if mismatch:
            memory.close()
            raise StaleHandleError(handle.path, mismatch)
        return memory

    @property
    def header(self) -> SlotHeader:
        """The header page."""
        self._require_open()
        return self._header

    @property
    def buffer(self) -> memoryview:
        """The payload, writable, without copy."""
        return memoryview(self._require_open())[HEADER_BYTES:]

    @property
    def tensor(self) -> torch.Tensor:
        """The payload as a ``torch.uint8`` tensor of shape ``[nbytes]``, without copy."""
        self._require_open()
        if self._tensor is None:
            import torch

            # The tensor owns this memoryview, whose export keeps the mapping from
            # being closed; frombuffer over the mmap itself would not.
            self._tensor = (
                torch.frombuffer(self.buffer, dtype=torch.uint8)
                if self.handle.nbytes
                else torch.empty(0, dtype=torch.uint8)
            )
        return self._tensor

    def register_cuda(self, runtime: pinning.CudaRuntime | None = None) -> bool:
        """Page-lock the memory for CUDA in this process, once.

        Args:
            runtime: CUDA runtime; unset: that of torch, where there is CUDA.

        Returns:
            Whether the memory is page-locked now. ``False`` is no error: copies
            are correct from pageable memory too.
        """
        runtime = runtime or pinning.cuda_runtime()
        if runtime is None or self.registered or self.handle.nbytes == 0:
            return self.registered
        total = HEADER_BYTES + self.handle.nbytes
        address = self.tensor.data_ptr() - HEADER_BYTES
        self.registered = pinning.register(runtime, address, total, self.handle.path)
        if self.registered:
            self._pins.append((runtime, address))
        return self.registered

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        if self._mapping is None:
            return
        self._mapping = None
        self._header.release()
        self._tensor = None
        self.registered = False
        self._finalizer()

    def __enter__(self) -> SharedHostMemory:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _require_open(self) -> mmap.mmap:
        if self._mapping is None:
            raise SharedMemoryError(f"{self.handle.path} was closed in this process")
        return self._mapping


def _release(
    mapping: mmap.mmap,
    pins: list[tuple[pinning.CudaRuntime, int]],
    fd: int,
    owned_path: str | None,
    owner_pid: int,
) -> None:
    """Undo everything; runs at close, at collection or at exit, whichever is first."""
    forked = os.getpid() != owner_pid
    while pins:
        runtime, address = pins.pop()
        if not forked:  # a forked child has no use of its parent's CUDA context
            pinning.unregister(runtime, address)
    if fd >= 0:
        os.close(fd)
    if owned_path is not None and not forked:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(owned_path)
    with contextlib.suppress(BufferError):  # a tensor is alive: unmapped when it goes
        mapping.close()


def _create_file(directory: str, total: int) -> tuple[int, str]:
    """Open a new private file after checking that its file system can hold it."""
    root = Path(directory)
    if not root.is_dir():
        raise SettingError(
            "rlix.weight_cache.directory", directory, "not a directory", "Create it, or unset it"
        )
    _remove_orphans(root)
    free = free_bytes(root)
    if free < total:
        raise _no_space(directory, f"{free} bytes are free there, {total} are needed")
    path = str(root / f"{_FILE_PREFIX}{secrets.token_hex(16)}{_FILE_SUFFIX}")
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise SettingError(
            "rlix.weight_cache.directory",
            directory,
            f"no file can be created there ({error.strerror})",
            "Name a writable directory, or unset it",
        ) from error
    fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return fd, path


def free_bytes(directory: Path) -> int:
    """Bytes that an ordinary user can still store in a directory's file system."""
    figures = os.statvfs(directory)
    return figures.f_bavail * figures.f_frsize


def _remove_orphans(root: Path) -> None:
    """Remove files whose owner was killed; a living owner holds a shared lock."""
    for path in root.glob(f"{_FILE_PREFIX}*{_FILE_SUFFIX}"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:  # another user's, or gone already
            continue
        try:
            # Empty: its owner is between creating and locking it.
            if os.fstat(fd).st_size and _lock_exclusive(fd):
                os.unlink(path)
                logger.warning("removed %s, left behind by a process that was killed", path)
        except FileNotFoundError:
            continue
        finally:
            os.close(fd)


def _lock_exclusive(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _reserve(fd: int, total: int, directory: str | None) -> None:
    """Allocate every page now: a lack of memory is an error here, and SIGBUS later."""
    try:
        os.posix_fallocate(fd, 0, total)
    except OSError as error:
        reason = f"{total} bytes cannot be reserved ({error.strerror})"
        if directory is not None:
            raise _no_space(directory, reason) from error
        raise HostMemoryError(
            "rlix.weight_cache.directory",
            directory,
            reason,
            "Give the host or the container more memory, or set rlix.weight_cache.slots=1",
        ) from error


def _no_space(directory: str, reason: str) -> HostMemoryError:
    return HostMemoryError(
        "rlix.weight_cache.directory",
        directory,
        reason,
        "Unset it (an anonymous memfd is used), or name a directory on a larger file system",
    )
