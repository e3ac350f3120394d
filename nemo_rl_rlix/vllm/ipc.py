"""Names of the sockets by which a sender hands CUDA-IPC buffers to a worker. Pure."""

from __future__ import annotations

import hashlib

MAX_PATH_BYTES = 107
"""Longest path of a Unix socket on Linux."""


def ipc_address(pipeline_id: str, device_id: str, directory: str = "/tmp") -> str:
    """Address for one pipeline on one GPU.

    NeMo RL names it after the GPU alone, so that two pipelines on one GPU would meet
    on one socket. Sender and receiver both call this.

    Args:
        pipeline_id: Pipeline of both.
        device_id: UUID of the GPU.
        directory: Directory of the socket.

    Raises:
        ValueError: The directory's name leaves no room.
    """
    digest = hashlib.sha256(f"{pipeline_id}\0{device_id}".encode()).hexdigest()[:24]
    path = f"{directory.rstrip('/')}/rlix-{digest}.sock"
    if len(path.encode()) > MAX_PATH_BYTES:
        raise ValueError(f"{path}: a socket's path may have {MAX_PATH_BYTES} bytes")
    return f"ipc://{path}"
