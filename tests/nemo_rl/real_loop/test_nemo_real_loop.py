"""NeMo RL's own loop, collector, buffer and worker groups: two pipelines, no GPU.

Only the engine below ``generate_async`` and the trainer below the policy's workers are
the reference ones. The trainer refuses a response that nothing but an abort can have
ended, and the books of the logical GPUs record every use without a grant.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from nemo_support import HERE, ROOT

from nemo_rl_rlix.control_plane.embedded.events import EventKind
from nemo_rl_rlix.control_plane.embedded.scheduler import CONTROL_NAMESPACE, SCHEDULER_NAME
from nemo_rl_rlix.nemo_rl.stand_in.config import StandIn
from nemo_rl_rlix.nemo_rl.stand_in.job import Job
from nemo_rl_rlix.reference.device import LogicalGpu, create_logical_gpus

pytestmark = [pytest.mark.ray, pytest.mark.timeout(2400)]

STEPS = 5
PROMPTS, GENERATIONS = 2, 2
RUN_S = 900.0
GPU_BYTES = 64 * 2**20
PATIENT: dict[str, Any] = {
    "heartbeat_s": 10,
    "routing": {"liveness_s": 300},
    "deadlines": dict.fromkeys(
        ("drain_s", "sleep_s", "wake_s", "finalize_s", "probe_s", "control_s", "kill_s"), 60
    )
    | {"resize_s": 300},
}
"""Deadlines for a machine that starts two dozen interpreters on two cores."""
KEEP = "NEMO_RL_RLIX_KEEP"
"""Variable that keeps the folders of the runs."""


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster of two logical GPUs.

    Attributes:
        address: Its address.
        folder: Directory of its runs.
        environment: Variables of its drivers.
    """

    address: str
    folder: Path
    environment: dict[str, str]

    def job(self, name: str, steps: int, **more: Any) -> Job:
        """A pipeline; its folder is kept from run to run."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        stand_in = {
            "train_gpus": (0,),
            "infer_gpus": (0, 1),
            **more.pop("stand_in", {}),
        }
        made = StandIn(
            name=name,
            gpu_dir=str(self.folder / "gpus"),
            gpu_bytes=GPU_BYTES,
            base_dir=str(self.folder / "base"),
            record=str(folder / "record.jsonl"),
            prompts_per_step=PROMPTS,
            generations_per_prompt=GENERATIONS,
            step_s=0.02,
            **stand_in,
        )
        return Job(
            address=self.address,
            stand_in=made.to_config(),
            folder=str(folder),
            steps=steps,
            gpus=2,
            infer_gpus=1,
            rlix={**PATIENT, "pipeline_name": name, **more.pop("rlix", {})},
            **more,
        )

    def start(self, job: Job) -> subprocess.Popen[bytes]:
        """Start a driver; its output goes to ``out.txt``."""
        folder = Path(job.folder)
        (folder / "job.json").write_text(json.dumps(asdict(job)), encoding="utf-8")
        with (folder / "out.txt").open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "nemo_rl_rlix.nemo_rl.stand_in.run", f"{folder}/job.json"],
                env=self.environment,
                cwd=self.folder,
                stdout=output,
                stderr=subprocess.STDOUT,
            )


@pytest.fixture(scope="module")
def cluster(importable: Path) -> Iterator[Cluster]:
    import ray

    folder = Path(tempfile.mkdtemp(prefix="nrr-"))
    variables = {
        "PYTHONPATH": os.pathsep.join(map(str, (importable, HERE / "site", ROOT))),
        "HF_HUB_OFFLINE": "1",
        "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
        "TORCH_CUDA_ARCH_LIST": "9.0",
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",
    }
    before = dict(os.environ)
    os.environ.update(variables)
    os.environ.pop("RLIX_CONTROL_PLANE", None)
    context = start_ray(folder)
    (folder / "gpus").mkdir(mode=0o700)
    try:
        # What Ray has put there for its drivers is taken along.
        environment = {**os.environ, "RLIX_CONTROL_PLANE": "rlix"}
        yield Cluster(context.address_info["gcs_address"], folder, environment)
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(before)
        if KEEP not in os.environ:
            shutil.rmtree(folder, ignore_errors=True)


def start_ray(folder: Path) -> Any:
    """A cluster of two logical GPUs. Ray waits half a minute, which a busy machine can take."""
    import ray

    for attempt in range(3):
        try:
            return ray.init(
                num_cpus=16,
                num_gpus=2,
                include_dashboard=False,
                _temp_dir=str(folder / f"ray{attempt}"),
            )
        except Exception as error:  # Ray raises nothing narrower
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
    pytest.fail("Ray does not start on this machine within three attempts")


def finish(cluster: Cluster, *jobs: Job) -> None:
    """Run jobs side by side; each must end well."""
    running = [(job, cluster.start(job)) for job in jobs]
    try:
        for job, process in running:
            code = process.wait(RUN_S)
            text = (Path(job.folder) / "out.txt").read_text(encoding="utf-8", errors="replace")
            assert code == 0, f"{job.folder} ended with {code}:\n{text[-6000:]}"
    finally:
        for _, process in running:
            process.kill()


def record(job: Job) -> list[dict[str, Any]]:
    """What the trainer was trained on, a line a step."""
    lines = Path(job.stand_in["record"]).read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def assert_no_group_is_lost(job: Job, steps: int) -> None:
    """Each prompt of the data was trained on once, with all its answers, none skipped."""
    from nemo_rl_rlix.nemo_rl.stand_in.task import CountingData

    entries = record(job)
    assert [entry["step"] for entry in entries] == list(range(steps))
    trained = Counter(prompt for entry in entries for prompt in entry["prompts"])
    expected = CountingData(StandIn.from_config({"rlix_stand_in": job.stand_in}), steps * PROMPTS)
    assert trained == Counter({prompt: GENERATIONS for prompt, _ in expected.problems})


def assert_everything_is_free(cluster: Cluster) -> None:
    """The scheduler knows nobody, no GPU is held, and none was used without a grant."""
    import ray

    scheduler = ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE)
    status = ray.get(scheduler.status.remote(), timeout=30)
    assert not status["pipelines"], status
    for spec in create_logical_gpus(cluster.folder / "gpus", 2, GPU_BYTES):
        gpu = LogicalGpu(spec)
        assert gpu.violations() == []
        assert gpu.holder() == ""
        assert not any(gpu.residents().values()), gpu.residents()


def resizes(cluster: Cluster, name: str, kind: EventKind) -> list[tuple[int, ...]]:
    """Ranks of the resizes of a pipeline, in order."""
    import ray

    scheduler = ray.get_actor(SCHEDULER_NAME, namespace=CONTROL_NAMESPACE)
    events = ray.get(scheduler.events.remote(0), timeout=30)
    return [e.dp_ranks for e in events if e.kind is kind and e.pipeline_id.startswith(f"{name}_")]


def test_two_pipelines_share_their_gpus_and_resume(cluster: Cluster) -> None:
    """The second one trains on its only shard, so each of its steps shrinks it to zero."""
    first = cluster.job("first", STEPS, val_period=2, save_period=3)
    second = cluster.job(
        "second",
        STEPS,
        val_period=2,
        save_period=3,
        stand_in={"train_gpus": (1,), "infer_gpus": (1,)},
        rlix={
            "train_device_mapping": [1],
            "infer_device_mapping": [1],
            "allow_shrink_to_zero": True,
        },
    )
    finish(cluster, first, second)
    assert_no_group_is_lost(first, STEPS)
    assert_no_group_is_lost(second, STEPS)
    assert_everything_is_free(cluster)
    # A step finds its shard awake unless the other pipeline has taken it before.
    assert resizes(cluster, "second", EventKind.SHRINK_END).count((0,)) >= 2
    assert resizes(cluster, "first", EventKind.SHRINK_END)
    # From the checkpoint of step 3 or of the last step, whichever is newer.
    again = cluster.job("first", STEPS + 2, val_period=0, save_period=100)
    finish(cluster, again)
    assert [entry["step"] for entry in record(again)] == list(range(STEPS + 2))
    assert_everything_is_free(cluster)
