"""One private Ray cluster per test module: 8 CPUs, 2 logical GPUs."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def _workers_can_import() -> str:
    """``PYTHONPATH`` under which workers find the package and the test modules."""
    known = [str(ROOT), str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return os.pathsep.join(dict.fromkeys(part for part in known if part))


@pytest.fixture(scope="module")
def ray_cluster(request: pytest.FixtureRequest) -> Iterator[str]:
    """Start Ray for this module and stop it afterwards.

    The directory is private and its path short (Unix sockets allow 107 bytes),
    so that a test never attaches to a cluster that somebody else started.

    Yields:
        The Ray namespace of the driver.
    """
    import ray

    namespace = f"test_{request.module.__name__.rpartition('.')[2]}"
    temp_dir = tempfile.mkdtemp(prefix="nrr-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", _workers_can_import())
        # A nicer worker is starved on a busy machine, and its deadlines pass.
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")
        patch.delenv("RAY_ADDRESS", raising=False)
        patch.syspath_prepend(str(ROOT))
        try:
            _init(namespace, temp_dir)
            yield namespace
        finally:
            ray.shutdown()
            shutil.rmtree(temp_dir, ignore_errors=True)


def _init(namespace: str, temp_dir: str, attempts: int = 3) -> None:
    """Start Ray; again when its 30 s for a start were too few on a busy machine."""
    import ray

    for attempt in range(1, attempts + 1):
        try:
            ray.init(
                address="local",
                num_cpus=8,
                num_gpus=2,
                object_store_memory=256 * 1024 * 1024,
                include_dashboard=False,
                namespace=namespace,
                log_to_driver=False,
                _temp_dir=temp_dir,
            )
            return
        except Exception as error:
            ray.shutdown()
            if attempt == attempts or "timed out during startup" not in str(error):
                raise
