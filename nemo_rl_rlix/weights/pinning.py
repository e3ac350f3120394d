"""Registration of shared host memory with CUDA, for copies at full speed.

Registering keeps the exact size, where pinned allocations of torch round up to
a power of two (pytorch/pytorch#150517), and each process that maps the memory
can register it for itself. Memory of a file on a disk cannot be registered;
a memfd and a file in a tmpfs can.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class CudaRuntime(Protocol):
    """The calls of the CUDA runtime that are needed; 0 means success."""

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """Page-lock a range; returns a CUDA error code."""
        ...

    def host_unregister(self, address: int) -> int:
        """Undo the former; returns a CUDA error code."""
        ...

    def clear_error(self) -> None:
        """Forget the last error, so that it is not blamed on the next kernel."""
        ...


class TorchCudaRuntime:
    """The runtime library that torch has loaded."""

    def host_register(self, address: int, nbytes: int, flags: int) -> int:
        """``cudaHostRegister``."""
        import torch

        return int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flags))

    def host_unregister(self, address: int) -> int:
        """``cudaHostUnregister``."""
        import torch

        return int(torch.cuda.cudart().cudaHostUnregister(address))

    def clear_error(self) -> None:
        """Launch a kernel and let it take the blame.

        CUDA keeps a failed call's code until somebody asks for it, which torch
        does after each launch: without this the next, innocent kernel raises.
        """
        import torch

        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")


def cuda_runtime() -> CudaRuntime | None:
    """The runtime of this process, or ``None`` where there is no CUDA."""
    import torch

    return TorchCudaRuntime() if torch.cuda.is_available() else None


def register(runtime: CudaRuntime, address: int, nbytes: int, name: str) -> bool:
    """Page-lock a range; on failure copies stay correct and become slow.

    Args:
        runtime: CUDA runtime.
        address: First byte, page-aligned.
        nbytes: Length in bytes.
        name: What to call the memory in the warning.

    Returns:
        Whether the range is registered.
    """
    reason = _failure(runtime, lambda: runtime.host_register(address, nbytes, _PORTABLE))
    if not reason:
        return True
    logger.warning(
        "%s: %.2f GiB stay pageable, weight transfers will be several times slower (%s); "
        "raise the memlock limit of the container, and keep rlix.weight_cache.directory unset "
        "or in a tmpfs",
        name,
        nbytes / 2**30,
        reason,
    )
    return False


def unregister(runtime: CudaRuntime, address: int) -> None:
    """Undo :func:`register`; a CUDA context that is gone has done so already."""
    reason = _failure(runtime, lambda: runtime.host_unregister(address))
    if reason:
        logger.debug("unregistering host memory: %s", reason)


def _failure(runtime: CudaRuntime, call: Callable[[], int]) -> str:
    try:
        code = call()
    except RuntimeError as error:  # some torch versions raise where others return the code
        reason = str(error)
    else:
        if code == 0:
            return ""
        reason = f"CUDA error {code}"
    runtime.clear_error()
    return reason
