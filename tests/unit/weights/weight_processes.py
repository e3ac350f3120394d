"""What the processes of ``test_weights_processes`` run; importable by spawn."""

from __future__ import annotations

import hashlib
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection

import torch

from nemo_rl_rlix.errors import RLixError
from nemo_rl_rlix.settings import WeightCacheSettings
from nemo_rl_rlix.weights.cache import CpuWeightCache
from nemo_rl_rlix.weights.dtypes import spec_of
from nemo_rl_rlix.weights.transports.shm import ShmReceiver
from nemo_rl_rlix.weights.types import CacheHandle

NODE = "this-node"


def weights(seed: int) -> dict[str, torch.Tensor]:
    """Tensors of several dtypes, one of them larger than a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(501, 33, generator=generator).to(torch.bfloat16),
        "large": torch.randn(555, 1001, generator=generator),
        "bias": torch.randn(7, generator=generator, dtype=torch.float64),
    }


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over names and bytes."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode())
        total.update(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def write(pipe: Connection, directory: str | None) -> None:
    """Build versions on request; ``die`` ends the process in the middle of a build."""
    settings = WeightCacheSettings(bucket_mib=1, directory=directory)
    cache = CpuWeightCache("p", settings, NODE)
    cache.plan([spec_of(name, tensor) for name, tensor in weights(0).items()])
    while True:
        command, version, slot = pipe.recv()
        if command == "build":
            pipe.send(cache.build(version, slot, weights(version).items()))
        elif command == "die":
            cache.build(version, slot, _killed_half_way(version))
        else:
            cache.close()
            pipe.send("closed")
            return


def _killed_half_way(version: int) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(weights(version).items())[:2]
    os.kill(os.getpid(), signal.SIGKILL)


def read(pipe: Connection) -> None:
    """Answer each handle with a digest of what was received, or the error's name."""
    receiver = ShmReceiver(NODE)
    while True:
        handle: CacheHandle | None = pipe.recv()
        if handle is None:
            receiver.close()
            return
        params: dict[str, torch.Tensor] = {}

        def load(batch: list[tuple[str, torch.Tensor]], params: dict = params) -> list[str]:
            params.update({name: tensor.clone() for name, tensor in batch})
            return [name for name, _ in batch]

        try:
            receiver.receive(handle, load, timeout_s=30)  # type: ignore[arg-type]
            pipe.send(digest(params))
        except RLixError as error:
            pipe.send(type(error).__name__)
