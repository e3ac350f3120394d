"""The demo: two pipelines, first each alone on its half of two logical GPUs, then shared."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from rich.console import Console

from nemo_rl_rlix.cluster.names import new_pipeline_id
from nemo_rl_rlix.cluster.placement import shutdown_placement
from nemo_rl_rlix.control_plane.coordinator import CoordinatorStatus
from nemo_rl_rlix.control_plane.embedded.client import connect_scheduler, shutdown_scheduler
from nemo_rl_rlix.errors import DeadlineExceededError, GrantRequiredError, RLixError
from nemo_rl_rlix.observe.busy import Activity, share_by_activity
from nemo_rl_rlix.observe.switches import BROUGHT_IN, TAKEN
from nemo_rl_rlix.observe.trace import read_events
from nemo_rl_rlix.ray_errors import Callee, unwrap
from nemo_rl_rlix.reference.audit import TrainingAudit
from nemo_rl_rlix.reference.config import PipelineConfig
from nemo_rl_rlix.reference.device import LogicalGpu, LogicalGpuSpec, create_logical_gpus
from nemo_rl_rlix.reference.grpo import GrpoConfig
from nemo_rl_rlix.reference.live import LiveState, LiveView
from nemo_rl_rlix.reference.model import KVCache, ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.options import DemoMode, DemoOptions
from nemo_rl_rlix.reference.pipeline import PipelineProgress, ReferencePipeline
from nemo_rl_rlix.reference.report import (
    DemoResult,
    PipelineReport,
    RunMode,
    RunReport,
    TracedRun,
    quarter_means,
)
from nemo_rl_rlix.reference.task import Workload, make_task
from nemo_rl_rlix.reference.warmup import WarmupConfig, model_config
from nemo_rl_rlix.settings import RLixSettings, RoutingSettings, WeightCacheSettings

logger = logging.getLogger(__name__)

NUM_GPUS = 2
NAMES = ("p0", "p1")
POLL_S = 0.5
SETUP_TIMEOUT_S = 240.0
CLOSE_TIMEOUT_S = 120.0
WORKLOADS = {
    "p0": Workload(prompts_per_step=24, median_terms=7.0, terms_sigma=0.6, verifier_median_s=0.03),
    "p1": Workload(prompts_per_step=8, median_terms=4.0, verifier_median_s=0.8),
}
"""Both have long-tailed answers. p0's are long and checked at once: it could always use
another GPU. p1's are short and checked slowly, as by a sandbox: its GPU mostly waits."""

MAX_AGE = 1
MAX_NUM_SEQS = 8
MAX_IN_FLIGHT = 3 * MAX_NUM_SEQS
"""Enough in each shard's queue to keep it busy; the rest can go to a shard that arrives."""

STEP_S = 0.0025
TOKEN_S = 40e-6
"""Pace of a logical GPU: seconds of a decode step, and of a trained token. About twice what
the computation takes, so that neither the other core nor Ray's processes change it."""

GPU_HEADROOM = 1.25
"""Memory of a logical GPU over its largest resident: never enough for two of them."""


@dataclass(frozen=True)
class FinishedPipeline:
    """What is left of a pipeline that has run.

    Attributes:
        progress: Its final account.
        status: Its coordinator's.
        audit: What its trainer's process got.
    """

    progress: PipelineProgress
    status: CoordinatorStatus
    audit: TrainingAudit


def run_demo(options: DemoOptions) -> DemoResult:
    """Run what was asked for on a Ray cluster of its own.

    Raises:
        RLixError: A run failed, and why.
    """
    modes: list[RunMode] = []
    if options.mode is not DemoMode.SHARED:
        modes.append("alone")
    if options.mode is not DemoMode.ALONE:
        modes.append("shared")
    for workload in WORKLOADS.values():
        make_task(options.data, workload, options.seed)  # refuses a bad file before Ray starts
    options.out.mkdir(parents=True, exist_ok=True)
    state = LiveState(NAMES, range(NUM_GPUS), options.steps)
    reports: dict[RunMode, RunReport] = {}
    traces = []
    with private_ray() as directory, LiveView(state, Console(), plain=options.plain):
        for mode in modes:
            specs = make_gpus(Path(directory) / mode, options)
            configs = [pipeline_config(mode, index, specs, options) for index in range(len(NAMES))]
            report, trace = run_mode(mode, configs, options, state)
            reports[mode] = report
            traces.append(trace)
    return DemoResult(reports.get("alone"), reports.get("shared"), tuple(traces))


@contextmanager
def private_ray() -> Iterator[str]:
    """A Ray cluster that nothing else uses; yields its private folder.

    ``ray.init`` would otherwise join a cluster that it finds on the machine.
    """
    directory = tempfile.mkdtemp(prefix="nrr-")
    os.environ.setdefault("RAY_worker_niceness", "0")
    try:
        ray.init(
            address="local",
            num_cpus=16,
            num_gpus=NUM_GPUS,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace="demo",
            _temp_dir=directory,
        )
        with ended_in_order():
            yield directory
    finally:
        try:
            ray.shutdown()
        finally:  # a second Ctrl-C must not leave it
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def ended_in_order() -> Iterator[None]:
    """Clean up after SIGTERM, as after Ctrl-C; Ray's own handler aborts the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def make_gpus(directory: Path, options: DemoOptions) -> tuple[LogicalGpuSpec, ...]:
    """Logical GPUs that hold one trainer or one awake shard, not both."""
    config = pipeline_config("shared", 0, (), options)
    task = make_task(config.data, config.workload, config.seed)
    model = model_config(task, config.workload)
    return create_logical_gpus(directory, NUM_GPUS, gpu_budget(model, config))


def gpu_budget(model: ModelConfig, config: PipelineConfig) -> int:
    """Bytes of a logical GPU.

    Args:
        model: Size of the model.
        config: Sizes of the engine.
    """
    network = ReferenceModel(model)
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    buffers = sum(b.numel() * b.element_size() for b in network.buffers())
    trainer = 4 * weights + buffers  # parameters, gradients and two moments
    cache = KVCache.nbytes(model, config.max_num_seqs) + config.prefix_cache_bytes
    return int(GPU_HEADROOM * max(trainer, weights + buffers + cache))


def pipeline_config(
    mode: RunMode, index: int, specs: Sequence[LogicalGpuSpec], options: DemoOptions
) -> PipelineConfig:
    """One of the demo's pipelines: the same work in both modes, on other GPUs."""
    name = NAMES[index]
    return PipelineConfig(
        name=name,
        pipeline_id=new_pipeline_id(f"{name}-{mode}"),
        train_gpus=(index,),
        infer_gpus=(index,) if mode == "alone" else tuple(range(NUM_GPUS)),
        gpus=tuple(specs),
        settings=RLixSettings(
            allow_shrink_to_zero=mode == "alone",
            trace_dir=str(options.out / f"trace-{mode}"),
            routing=RoutingSettings(
                preempted_requests=options.policy,
                max_in_flight_per_shard=MAX_IN_FLIGHT,
            ),
            weight_cache=WeightCacheSettings(bucket_mib=1),
        ),
        steps=options.steps,
        seed=options.seed * len(NAMES) + index,
        base_dir=options.out / "base",
        run_dir=options.out / f"{mode}-{name}",
        workload=WORKLOADS[name],
        max_num_seqs=MAX_NUM_SEQS,
        step_s=STEP_S,
        grpo=GrpoConfig(token_s=TOKEN_S),
        max_age=MAX_AGE,
        data=options.data,
        warmup=WarmupConfig(seed=options.seed),
    )


def run_mode(
    mode: RunMode, configs: Sequence[PipelineConfig], options: DemoOptions, state: LiveState
) -> tuple[RunReport, TracedRun]:
    """Run all pipelines of a mode at the same time.

    Raises:
        GrantRequiredError: Something computed on a GPU that it was not granted.
        RLixError: A pipeline failed.
    """
    title = "each alone on its half" if mode == "alone" else "sharing both GPUs"
    state.start_run(f"{title}: starting")
    driver_class = ray.remote(ReferencePipeline)
    drivers = {
        config.name: driver_class.options(num_cpus=0, max_concurrency=4).remote(config)
        for config in configs
    }
    gpus = [LogicalGpu(spec) for spec in configs[0].gpus]
    killed = False
    try:
        wait_all(drivers, "setup", SETUP_TIMEOUT_S)
        state.set_phase(title)
        started_s = time.time()
        runs = {driver.run.remote(): name for name, driver in drivers.items()}
        pending = list(runs)
        while pending:
            done, pending = ray.wait(pending, num_returns=len(pending), timeout=POLL_S)
            for finished in done:
                fetch(finished, f"run of {runs[finished]}", CLOSE_TIMEOUT_S)
            show(drivers, gpus, state)
            if options.kill_shard and mode == "shared" and not killed:
                killed = kill_when_due(drivers[NAMES[0]], configs[0], options.steps)
        ended_s = time.time()
        finished_runs = {name: finish(driver, name) for name, driver in drivers.items()}
        check_grants(gpus)
    finally:
        close_all(drivers)
    if options.kill_shard and mode == "shared" and not killed:
        raise DeadlineExceededError(
            "waiting for a shard to end", ended_s - started_s, "none was active half-way"
        )
    trace_dir = Path(str(configs[0].settings.trace_dir))
    busy = share_by_activity(read_events(trace_dir), started_s, ended_s, range(NUM_GPUS))
    report = RunReport(
        mode=mode,
        seed=options.seed,
        policy=options.policy.value,
        pipelines=tuple(
            pipeline_report(mode, name, finished) for name, finished in finished_runs.items()
        ),
        gpu_busy=busy,
        shard_killed=killed,
        data=options.data.name if options.data is not None else "",
    )
    return report, TracedRun(mode, trace_dir, started_s, ended_s)


def pipeline_report(mode: RunMode, name: str, finished: FinishedPipeline) -> PipelineReport:
    """The figures of one pipeline."""
    progress, switches = finished.progress, finished.status.switch_seconds
    start, end = quarter_means(progress.rewards)
    return PipelineReport(
        mode=mode,
        pipeline=name,
        steps=progress.step,
        reward_start=start,
        reward_end=end,
        rollout_tokens=progress.collector.tokens,
        wall_s=progress.ended_s - progress.started_s,
        preempted=progress.dispatch.preempted,
        redispatched=progress.dispatch.redispatched,
        tokens_kept=progress.dispatch.tokens_kept,
        tokens_dropped=progress.dispatch.tokens_dropped,
        lost_groups=finished.audit.lost_groups,
        duplicated_groups=finished.audit.duplicated_groups,
        aborted_tokens_trained=finished.audit.aborted_tokens,
        switch_in_seconds=tuple(switches[BROUGHT_IN]),
        switch_out_seconds=tuple(switches[TAKEN]),
    )


def finish(driver: Any, name: str) -> FinishedPipeline:
    """Collect the final accounts of a pipeline, before it is closed."""
    return FinishedPipeline(
        fetch(driver.progress.remote(), f"progress of {name}", CLOSE_TIMEOUT_S),
        fetch(driver.coordinator_status.remote(), f"status of {name}", CLOSE_TIMEOUT_S),
        fetch(driver.audit.remote(), f"audit of {name}", CLOSE_TIMEOUT_S),
    )


def show(drivers: dict[str, Any], gpus: Sequence[LogicalGpu], state: LiveState) -> None:
    """Bring the live view up to date; a driver that is busy is left as it was."""
    for name, driver in drivers.items():
        try:
            answers = [driver.progress.remote(), driver.coordinator_status.remote()]
            progress, status = ray.get(answers, timeout=POLL_S)
        except ray.exceptions.RayError as error:
            logger.debug("no progress of %s: %s", name, error)
            continue
        wall_s = max((progress.ended_s or time.time()) - progress.started_s, 1e-3)
        recent = progress.rewards[-5:]
        state.update_pipeline(
            name,
            step=progress.step,
            reward=sum(recent) / len(recent) if recent else 0.0,
            tokens_per_s=progress.collector.tokens / wall_s,
            preempted=progress.dispatch.preempted,
            redispatched=progress.dispatch.redispatched,
            tokens_kept=progress.dispatch.tokens_kept,
            switches=sum(len(seconds) for seconds in status.switch_seconds.values()),
        )
    for gpu in gpus:
        pipeline, _, what = gpu.holder().partition("/")
        activity = Activity.TRAIN if what == "trainer" else Activity.GENERATE
        state.update_gpu(gpu.gpu_id, pipeline, activity if pipeline else Activity.IDLE)


def kill_when_due(driver: Any, config: PipelineConfig, steps: int) -> bool:
    """End the process of one of the pipeline's serving shards, half-way through the run.

    Returns:
        Whether it has been ended.
    """
    progress: PipelineProgress = fetch(driver.progress.remote(), "progress", CLOSE_TIMEOUT_S)
    if progress.step < steps // 2:
        return False
    status: CoordinatorStatus = fetch(
        driver.coordinator_status.remote(), "coordinator status", CLOSE_TIMEOUT_S
    )
    layout = config.topology().inference
    for rank in sorted(status.routing.active):
        gpu = LogicalGpu(config.gpus[layout.shard_gpus(rank)[0]])
        for pid in gpu.processes(f"{config.pipeline_id}-shard-{rank}"):
            os.kill(pid, signal.SIGKILL)
            return True
    return False


def check_grants(gpus: Sequence[LogicalGpu]) -> None:
    """Fail the run if anything computed without a grant.

    Raises:
        GrantRequiredError: It did.
    """
    for gpu in gpus:
        for violation in gpu.violations():
            raise GrantRequiredError(violation.owner, [violation.gpu_id], violation.what)


def wait_all(drivers: dict[str, Any], method: str, timeout_s: float) -> None:
    """Call a method of every driver and wait for all of them."""
    calls = {name: getattr(driver, method).remote() for name, driver in drivers.items()}
    for name, reference in calls.items():
        fetch(reference, f"{method} of {name}", timeout_s)


def close_all(drivers: dict[str, Any]) -> None:
    """End every pipeline and what they shared, whatever state they are in."""
    for name, reference in {n: d.close.remote() for n, d in drivers.items()}.items():
        try:
            fetch(reference, f"close of {name}", CLOSE_TIMEOUT_S)
        except RLixError as error:
            logger.warning("%s", error)
    for driver in drivers.values():
        ray.kill(driver, no_restart=True)
    try:
        shutdown_scheduler(connect_scheduler(create=False))
    except RLixError as error:
        logger.debug("no scheduler to end: %s", error)
    shutdown_placement()


def fetch(reference: Any, what: str, timeout_s: float) -> Any:
    """Result of a call to a driver.

    Raises:
        DeadlineExceededError: It did not come in time.
        RLixError: What the call raised.
    """
    try:
        return ray.get(reference, timeout=timeout_s)
    except ray.exceptions.RayError as error:
        raise unwrap(error, Callee(what, timeout_s=timeout_s)) from error
