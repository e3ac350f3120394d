"""Against a checkout: what importing NeMo RL does, with the variable and without."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from nemo_support import HERE, ROOT, RunPython

from nemo_rl_rlix.nemo_rl.binding import SWAPS
from nemo_rl_rlix.nemo_rl.source import SourceTree
from nemo_rl_rlix.nemo_rl.versions import NemoRl, detect

PTH = ROOT / "nemo_rl_rlix" / "nemo_rl" / "autoload.pth"
SITE = HERE / "site"
START = f"exec(open({str(PTH)!r}).read())\n"
IMPORT_S = 300.0

GLOBALS = """
import json, sys
import nemo_rl.algorithms.grpo as grpo, nemo_rl.algorithms.async_utils as async_utils
from nemo_rl.distributed import ray_actor_environment_registry as registry
from nemo_rl.models.generation.vllm import vllm_generation
from nemo_rl.models.policy import lm_policy
def origin(thing):
    code = getattr(thing, "__code__", None)
    return code.co_filename if code else f"{thing.__module__}.{thing.__qualname__}"
def look():
    return {
        "setup": origin(grpo.setup),
        "async_grpo_train": origin(grpo.async_grpo_train),
        "refit_policy_generation": origin(grpo.refit_policy_generation),
        "RayVirtualCluster": origin(grpo.RayVirtualCluster),
        "Policy": origin(grpo.Policy),
        "VllmGeneration": origin(grpo.VllmGeneration),
        "generation_worker": origin(vllm_generation.resolve_generation_worker_cls),
        "policy_worker": origin(lm_policy.resolve_policy_worker_cls),
        "registry": sorted(registry.ACTOR_ENVIRONMENT_REGISTRY),
        "collector": repr(async_utils.AsyncTrajectoryCollector).split(" object at")[0],
        "buffer": repr(async_utils.ReplayBuffer).split(" object at")[0],
    }
"""


@pytest.fixture(scope="module")
def version(importable: Path) -> NemoRl:
    return detect(SourceTree(importable / "nemo_rl"))


def look(run_python: RunPython, home: Path, code: str, **env: str) -> dict[str, object]:
    result = run_python(code, path=[home, SITE, ROOT], env=env, timeout_s=IMPORT_S)
    assert result.returncode == 0, result.stderr
    answer: dict[str, object] = json.loads(result.stdout.strip().splitlines()[-1])
    return answer


@pytest.fixture(scope="module")
def plain(run_python: RunPython, importable: Path) -> dict[str, object]:
    """What NeMo RL's globals are when nothing of this package has run."""
    return look(run_python, importable, GLOBALS + "print(json.dumps(look()))")


def test_without_the_variable_nothing_is_different(
    run_python: RunPython, importable: Path, plain: dict[str, object]
) -> None:
    hooked = look(
        run_python,
        importable,
        START
        + GLOBALS
        + "assert not [m for m in sys.modules if m.startswith('nemo_rl_rlix')]\n"
        + "print(json.dumps(look()))",
    )
    assert hooked == plain


@pytest.mark.parametrize("first", ["grpo", "async_utils"])
def test_registration_happens_once_and_is_undone(
    run_python: RunPython,
    importable: Path,
    version: NemoRl,
    plain: dict[str, object],
    first: str,
) -> None:
    code = (
        START
        + f"import nemo_rl.algorithms.{first}\n"
        + GLOBALS
        + """
from nemo_rl_rlix.nemo_rl import registration
before = look()
first = registration.current()
assert registration.register() is first
assert look() == before
now = [str(first.version), [d.seam.id for d in first.applied], len(first.pending)]
registration.unregister()
after = look()
print(json.dumps({"now": now, "before": before, "after": after}))
"""
    )
    seen: Any = look(run_python, importable, code, RLIX_CONTROL_PLANE="rlix")
    applied = {swap.seam for swap in SWAPS if version in swap.versions}
    number, done, pending = seen["now"]
    assert (number, set(done), pending) == (str(version), applied, 0)
    before, after = seen["before"], seen["after"]
    assert isinstance(before, dict) and isinstance(after, dict)
    grpo = str(importable / "nemo_rl" / "algorithms" / "grpo.py")
    assert before["setup"] == str(ROOT / "nemo_rl_rlix" / "nemo_rl" / "start.py")
    assert after["setup"] == after["refit_policy_generation"] == grpo
    assert after == plain


def test_an_unsuitable_recipe_is_refused_by_the_real_setup(
    run_python: RunPython, importable: Path
) -> None:
    code = (
        START
        + """
import json
from pathlib import Path
from omegaconf import OmegaConf
import nemo_rl.algorithms.grpo as grpo
from nemo_rl.utils.config import load_config, register_omegaconf_resolvers
from nemo_rl_rlix.errors import SettingError
register_omegaconf_resolvers()
configs = Path(grpo.__file__).parents[2] / "examples" / "configs"
config = grpo.MasterConfig(**OmegaConf.to_container(
    load_config(str(configs / "grpo_math_1B.yaml")), resolve=True))
try:
    grpo.setup(config, None, None, None)
except SettingError as error:
    print(json.dumps({"setting": error.setting}))
"""
    )
    seen = look(run_python, importable, code, RLIX_CONTROL_PLANE="rlix")
    assert seen == {"setting": "grpo.async_grpo.enabled"}


@pytest.mark.ray
def test_workers_replace_nothing_and_find_classes_by_name(
    run_python: RunPython, importable: Path, tmp_path: Path
) -> None:
    """Only PYTHONPATH carries the package, and the worker's hook stays quiet."""
    (tmp_path / "counting.py").write_text(
        "from nemo_rl.algorithms.async_utils.replay_buffer import ReplayBuffer\n"
        "from nemo_rl_rlix.nemo_rl import autoload\n"
        "from nemo_rl_rlix.nemo_rl.makers import plain_class\n"
        "class CountingBuffer(plain_class(ReplayBuffer)):\n"
        "    def count(self):\n"
        "        return len(self.trajectories)\n"
        "    def registered(self):\n"
        "        autoload.install()\n"
        "        import nemo_rl.algorithms.grpo as grpo\n"
        "        from nemo_rl_rlix.nemo_rl import registration\n"
        "        return [registration.current() is None, hasattr(grpo.setup, '__wrapped__'),\n"
        "                type(self).__mro__[1].__module__]\n",
        encoding="utf-8",
    )
    code = (
        "from nemo_rl_rlix.nemo_rl import autoload\nautoload.install()\n"
        + """
import json, os, sys
import nemo_rl.algorithms.grpo as grpo, nemo_rl.algorithms.async_utils as async_utils
import ray
from nemo_rl_rlix.nemo_rl import registration, seams, swap, makers
now = registration.current()
registration.unregister()
done = swap.apply(
    swap.Swap("buffer", makers.actor("counting:CountingBuffer")),
    seams.seam(now.version, "buffer"),
    async_utils,
)
ray.init(num_cpus=2, include_dashboard=False, _temp_dir=os.environ["RAY_DIR"],
         runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"]}})
try:
    extra = {"drop_incomplete_targets_on_restore": False} if str(now.version)[0] == "m" else {}
    from nemo_rl.algorithms.async_utils import ReplayBuffer
    buffer = ReplayBuffer.options(runtime_env={
        "py_executable": sys.executable,
        "env_vars": {**os.environ},
    }).remote(max_size=3, **extra)
    assert ray.get(buffer.add.remote({"batch": 1}, 0, 0)) == "success"
    print(json.dumps([ray.get(buffer.count.remote()), ray.get(buffer.registered.remote())]))
finally:
    ray.shutdown()
"""
    )
    # A short path: Unix sockets allow 107 bytes.
    with tempfile.TemporaryDirectory(prefix="nrr-", dir="/tmp", ignore_cleanup_errors=True) as ray:
        result = run_python(
            code,
            path=[importable, SITE, tmp_path, ROOT],
            env={"RLIX_CONTROL_PLANE": "rlix", "RAY_DIR": ray},
            timeout_s=IMPORT_S,
        )
    assert result.returncode == 0, result.stderr
    count, (quiet, wrapped, module) = json.loads(result.stdout.strip().splitlines()[-1])
    assert count == 1
    assert quiet and not wrapped
    assert module.startswith("nemo_rl.")
