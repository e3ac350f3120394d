"""A fake NeMo RL for every machine, and the checkout in NEMO_RL_HOME for those that have one."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from nemo_support import RunPython

HOME = "NEMO_RL_HOME"
# A few packages that only NeMo RL needs; all of them come with its environment.
NEEDED = ("torchdata", "tensordict", "hydra", "transformers", "ray", "torch")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Folder of a NeMo RL checkout; the test is skipped without one."""
    home = os.environ.get(HOME, "")
    if not home:
        pytest.skip(f"{HOME} is not set: it names a checkout of NeMo RL")
    if not (Path(home) / "nemo_rl" / "algorithms" / "grpo.py").is_file():
        pytest.fail(f"{HOME}={home} is no checkout of NeMo RL")
    return Path(home).resolve()


@pytest.fixture(scope="session")
def importable(checkout: Path) -> Path:
    """A checkout whose dependencies are installed here."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"NeMo RL needs {', '.join(missing)}: use make test-nemo-rl")
    return checkout


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> RunPython:
    """Run code in a fresh interpreter: ``run_python(code, path=[...], env={...})``."""
    # Not the checkout of this package: its folders would be importable from there.
    somewhere = tmp_path_factory.mktemp("somewhere")

    def run(
        code: str | list[str],
        *,
        path: list[Path],
        env: dict[str, str | None] | None = None,
        cwd: Path | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess[str]:
        variables = {k: v for k, v in os.environ.items() if k != "RLIX_CONTROL_PLANE"}
        variables["PYTHONPATH"] = os.pathsep.join(str(folder) for folder in path)
        for name, value in (env or {}).items():
            if value is None:
                variables.pop(name, None)
            else:
                variables[name] = value
        arguments = ["-c", code] if isinstance(code, str) else code
        return subprocess.run(
            [sys.executable, *arguments],
            env=variables,
            cwd=cwd or somewhere,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    return run
