"""The vLLM rows of the GPU table, measured through the core's own owner.

    python benchmarks/gpu_vllm.py --out benchmarks/results/gpu_vllm.json
    python benchmarks/gpu_vllm.py --only big noisy

One GPU that nothing else uses; PYTHONPATH=. where the package is not installed. NeMo RL
has to be importable for ``big`` and ``small``, whose engines take its worker extension. Sections and about how long they take on an H200:
``big`` (7B shape: sync, sleep, wake, drain, refresh, CUDA IPC; 170 s), ``asleep`` (7B: sync with
smaller buckets, memory asleep; 95 s), ``small`` (0.5B:
sync; 60 s), ``graphs`` (7B with CUDA graphs: memory asleep; 90 s), ``noisy`` (100 cycles
beside a process that allocates; 110 s), ``equal`` (token equality of tiny models; 100 s).
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from vllm_models import (
    QWEN2_SIZES,
    TINY,
    qwen2_shapes,
    random_weights,
    write_config,
)
from vllm_stand import ENVIRONMENT, MIB, Stand, ray_of_its_own, seconds_of, stand

from nemo_rl_rlix.observe.records import (
    Record,
    collect_versions,
    command_line,
    describe_hardware,
    utc_now,
    write_records,
)

logger = logging.getLogger("gpu_vllm")

REPEATS = 7
NOISY_CYCLES = 100
IN_FLIGHT = 256
HERE = Path(__file__).resolve().parent
NEMO_EXTENSION = "nemo_rl_rlix.nemo_rl.vllm_extension.RlixVllmExtension"


class Results:
    """Collects records and writes each section's as soon as it is done."""

    def __init__(self, path: Path, section: str) -> None:
        self._path = path
        self._command = command_line([sys.argv[0], "--only", section])
        self._versions = collect_versions()
        self._hardware = {**describe_hardware(), **_gpu()}

    def add(
        self,
        metric: str,
        values: Sequence[float],
        unit: str,
        reference: float | None = None,
        **params: Any,
    ) -> None:
        """Record the median of some values."""
        record = Record(
            metric=metric,
            value=statistics.median(values),
            unit=unit,
            reference=reference,
            spread=(min(values), max(values)) if len(values) > 1 else None,
            n=len(values),
            params=params,
            versions=self._versions,
            hardware=self._hardware,
            command=self._command,
            date=utc_now(),
        )
        logger.info("%s %s = %.4g %s (n=%d)", metric, params, record.value, unit, record.n)
        write_records(self._path, [record])


def _gpu() -> dict[str, Any]:
    import torch

    return {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count()}


def card_used_bytes() -> int:
    """Bytes in use on the card, by all processes."""
    from vllm.third_party import pynvml

    pynvml.nvmlInit()
    try:
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle).used)
    finally:
        pynvml.nvmlShutdown()


def measure_residue(results: Results, place: Stand, model: str, bar: float, graphs: bool) -> None:
    """What the card has more while the engine sleeps than once it has been ended.

    This process has a context, kernels and pinned memory too: they stay for the second
    reading, so that they are not taken for the engine's. The engine is gone afterwards.
    """
    asleep = []
    for _ in range(5):
        cycle(place)
        asleep.append(card_used_bytes())
    place.owner.close()
    idle = card_used_bytes()
    residue = [(used - idle) / (1 << 30) for used in asleep]
    results.add("sleep_residue_gib", residue, "GiB", bar, model=model, graphs=graphs)


def specs(shapes: dict[str, tuple[int, ...]]) -> list[Any]:
    """Tensor specs of bf16 tensors."""
    import math

    from nemo_rl_rlix.weights.types import TensorSpec

    return [
        TensorSpec(name, shape, "bfloat16", 2 * math.prod(shape)) for name, shape in shapes.items()
    ]


def plain_copy_seconds(place: Stand, handle: Any) -> list[float]:
    """H2D copies of the very bytes that a sync moves, pinned, bucket by bucket."""
    import torch

    from nemo_rl_rlix.weights.host_memory import SharedHostMemory

    memory = SharedHostMemory.attach(handle.memory)
    try:
        assert memory.register_cuda(), "the cache cannot be pinned, so nothing can be compared"
        target = torch.empty(max(handle.layout.bucket_nbytes), dtype=torch.uint8, device="cuda")
        seconds = []
        for _ in range(REPEATS + 1):
            torch.cuda.synchronize()
            started = time.perf_counter()
            for offset, size in zip(
                handle.layout.bucket_offsets, handle.layout.bucket_nbytes, strict=True
            ):
                target[:size].copy_(memory.tensor[offset : offset + size], non_blocking=True)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        return seconds[1:]
    finally:
        memory.close()
        torch.cuda.empty_cache()


def cycle(place: Stand) -> dict[str, float]:
    """One expand and one shrink; seconds of their parts."""
    place.shard.take_calls()
    started = time.perf_counter()
    report = place.owner.expand([0])
    expanded = time.perf_counter()
    calls = place.shard.take_calls()
    assert report.outcomes[0].state == "ACTIVE", report.outcomes[0].cause
    parts = [f"{method} {1e3 * (end - begin):.1f}" for method, begin, end in calls]
    logger.info("ms of an expand: %s", ", ".join(parts))
    wakes = seconds_of(calls, "wake")
    first_wake = next(start for method, start, _ in calls if method == "wake")
    report = place.owner.shrink([0])
    assert report.outcomes[0].state == "ASLEEP", report.outcomes[0].cause
    asleep = seconds_of(place.shard.take_calls(), "sleep")
    return {
        "expand_s": expanded - started,
        "wake_s": wakes,
        "sync_s": expanded - first_wake - wakes,
        "receive_s": seconds_of(calls, "receive"),
        "finalize_s": seconds_of(calls, "finalize_weights"),
        "probe_s": seconds_of(calls, "probe"),
        "sleep_s": asleep,
        "switch_s": asleep + wakes,
    }


def column(cycles: Iterable[dict[str, float]], name: str) -> list[float]:
    """One figure of every cycle."""
    return [one[name] for one in cycles]


def measure_sync(
    results: Results, place: Stand, model: str, shapes: dict[str, tuple[int, ...]], bucket_mib: int
) -> tuple[Any, list[float]]:
    """Cache -> engine by shared memory against the plain copy."""
    import torch

    handle = place.publish(random_weights(shapes, 0))

    torch.cuda.empty_cache()
    plain = plain_copy_seconds(place, handle)
    nbytes = sum(spec.nbytes for spec in handle.layout.tensors)
    params = {"model": model, "bucket_mib": bucket_mib, "gb": round(nbytes / 1e9, 2)}
    cycle(place)  # maps and registers the cache, proves the coverage
    cycles = [cycle(place) for _ in range(REPEATS)]
    reference = statistics.median(plain)
    results.add("plain_copy_s", plain, "s", **params)
    for name, bar in (("sync_s", 0.92 if model == "7b" else None), ("receive_s", None)):
        ratio = [reference / seconds for seconds in column(cycles, name)]
        metric = "sync_shm_ratio" if name == "sync_s" else "receive_shm_ratio"
        results.add(metric, ratio, "ratio", bar, **params)
    for name in ("expand_s", "finalize_s", "probe_s"):
        results.add(name, column(cycles, name), "s", **params)
    level = {"model": model, "level": 2}
    results.add("sleep_s", column(cycles, "sleep_s"), "s", **level)
    results.add("wake_s", column(cycles, "wake_s"), "s", **level)
    results.add("switch_s", column(cycles, "switch_s"), "s", 0.3, **level)
    return handle, plain


def folder_of(size: str) -> Path:
    """A folder with the configuration of a Qwen2 model."""
    folder = Path(tempfile.mkdtemp(prefix=f"qwen2-{size}-"))
    write_config(folder, "Qwen2Config", QWEN2_SIZES[size], tied=False)
    return folder


def request(number: int, tokens: int) -> Any:
    """A request that does not end early."""
    from nemo_rl_rlix.shards.requests import GenerationRequest

    prompt = tuple(range(5 + number % 97, 37 + number % 97))
    return GenerationRequest(f"r{number}", prompt, tokens, temperature=0.0)


def measure_drain(results: Results, place: Stand, model: str) -> None:
    """Shrink with many requests in flight."""
    import ray

    from nemo_rl_rlix.errors import ShardPreemptedError

    seconds = []
    for turn in range(5):
        place.owner.expand([0])
        leader = place.shard.leader
        refs = [leader.generate.remote(request(n, 3000)) for n in range(IN_FLIGHT)]
        while ray.get(leader.callers.remote()) < IN_FLIGHT:
            time.sleep(0.05)
        time.sleep(1.5)
        place.shard.take_calls()
        report = place.owner.shrink([0])
        calls = place.shard.take_calls()
        assert report.outcomes[0].aborted == IN_FLIGHT, report
        seconds.append(max(e for _, _, e in calls) - min(s for _, s, _ in calls))
        for ref in refs:
            try:
                ray.get(ref, timeout=30)
            except ShardPreemptedError as error:
                assert error.partial.token_ids
            else:
                raise AssertionError(f"turn {turn}: a request outlived the shrink")
    results.add("abort_drain_sleep_s", seconds, "s", 0.3, model=model, in_flight=IN_FLIGHT)


def measure_refresh(
    results: Results, place: Stand, model: str, shapes: dict[str, tuple[int, ...]]
) -> None:
    """Update in place under load: how long it stands still, and what that costs."""
    import ray

    count, tokens, pauses, lost = 64, 160, [], []
    place.owner.expand([0])

    def load(publish: bool) -> float:
        if publish:  # before the clock: the build would take its share of this very card
            place.build(random_weights(shapes, place.versions))
        started = time.perf_counter()
        refs = [place.shard.leader.generate.remote(request(n, tokens)) for n in range(count)]
        if publish:
            time.sleep(1.0)
            place.shard.take_calls()
            report = place.refresh()
            assert report.outcomes[0].state == "ACTIVE", report.outcomes[0].cause
            calls = place.shard.take_calls()
            begin = next(s for m, s, _ in calls if m == "pause_keep")
            pauses.append(next(e for m, _, e in calls if m == "resume") - begin)
        answers = ray.get(refs, timeout=120)
        assert all(len(answer.token_ids) == tokens for answer in answers)
        return time.perf_counter() - started

    load(False)
    for _ in range(5):
        alone = load(False)
        lost.append(max(0.0, load(True) - alone) * count * tokens / alone)
    place.owner.shrink([0])
    params = {"model": model, "requests": count, "clear_cache": True}
    results.add("active_refresh_s", pauses, "s", **params)
    results.add("active_refresh_tokens_lost", lost, "tokens", **params)


def _send(memory: Any, handle: Any, sender: Any, failure: list[BaseException]) -> None:
    from nemo_rl.models.policy.utils import stream_weights_via_ipc_zmq_impl

    from nemo_rl_rlix.weights.slot import read_tensors

    try:
        tensors = read_tensors(memory, handle.layout, handle.weights_version)
        stream_weights_via_ipc_zmq_impl(tensors, 2 << 30, sender, 1, "bench")
    except BaseException as error:  # noqa: BLE001 - the main thread raises it
        failure.append(error)


def measure_ipc(
    results: Results, place: Stand, model: str, handle: Any, plain: list[float]
) -> None:
    """NeMo RL's own CUDA-IPC sender, from the cache's pinned memory."""
    import ray
    import torch
    import zmq

    from nemo_rl_rlix.weights.dtypes import dtype_of
    from nemo_rl_rlix.weights.host_memory import SharedHostMemory

    info = {s.name: (torch.Size(s.shape), dtype_of(s.dtype)) for s in handle.layout.tensors}
    place.shard.wake(tags=("weights",), timeout_s=30)
    address = ray.get(place.shard.leader.prepare_ipc.remote(info), timeout=30)
    memory = SharedHostMemory.attach(handle.memory)
    memory.register_cuda()
    names = sorted(info)
    nbytes = sum(spec.nbytes for spec in handle.layout.tensors)
    context = zmq.Context()
    sender = context.socket(zmq.REQ)
    sender.setsockopt(zmq.LINGER, 0)
    sender.setsockopt(zmq.RCVTIMEO, 60_000)
    sender.bind(address)
    seconds = []
    try:
        for _ in range(REPEATS):
            started = time.perf_counter()
            failure: list[BaseException] = []
            thread = threading.Thread(target=_send, args=(memory, handle, sender, failure))
            thread.start()
            report = place.shard.receive_by(
                "rlix_receive_ipc", handle.weights_version, names, nbytes, timeout_s=90
            )
            thread.join(30)
            if failure:
                raise failure[0]
            assert not report.missing, report.missing[:4]
            seconds.append(time.perf_counter() - started)
    finally:
        sender.close()
        context.term()
        memory.close()
        place.shard.sleep(level=2, timeout_s=30)
    reference = statistics.median(plain)
    ratios = [reference / one for one in seconds[1:]]
    results.add("sync_ipc_ratio", ratios, "ratio", model=model, staging_gib=2)


def section_big(results: Results) -> None:
    """7B shape, eager."""
    size, bucket_mib = "7b", 1024
    shapes, folder = qwen2_shapes(QWEN2_SIZES[size]), folder_of(size)
    with (
        ray_of_its_own(),
        stand(folder, specs(shapes), bucket_mib=bucket_mib, extension_cls=NEMO_EXTENSION) as place,
    ):
        handle, plain = measure_sync(results, place, size, shapes, bucket_mib)
        measure_drain(results, place, size)
        measure_ipc(results, place, size, handle, plain)
        measure_refresh(results, place, size, shapes)
        measure_level_1(results, place, size)


def section_asleep(results: Results) -> None:
    """7B shape, eager, smaller buckets: sync, and what a sleeping engine keeps."""
    size, bucket_mib = "7b", 256
    shapes, folder = qwen2_shapes(QWEN2_SIZES[size]), folder_of(size)
    with (
        ray_of_its_own(),
        stand(folder, specs(shapes), bucket_mib=bucket_mib, extension_cls=NEMO_EXTENSION) as place,
    ):
        measure_sync(results, place, size, shapes, bucket_mib)
        measure_residue(results, place, size, 1.0, graphs=False)


def measure_level_1(results: Results, place: Stand, model: str) -> None:
    """Sleep that keeps the weights in host memory; its first time apart."""
    place.owner.expand([0])
    shard, sleeps, wakes = place.shard, [], []
    shard.close_admission(epoch=10**6, timeout_s=10)
    for _ in range(6):
        assert shard.drain(timeout_s=10).idle
        shard.take_calls()
        shard.sleep(level=1, timeout_s=60)
        shard.wake(tags=("weights", "kv_cache"), timeout_s=60)
        calls = shard.take_calls()
        sleeps.append(seconds_of(calls, "sleep"))
        wakes.append(seconds_of(calls, "wake"))
    results.add("sleep_first_s", sleeps[:1], "s", model=model, level=1)
    results.add("sleep_s", sleeps[1:], "s", model=model, level=1)
    results.add("wake_s", wakes[1:], "s", model=model, level=1)


def section_small(results: Results) -> None:
    """0.5B shape, eager."""
    size, bucket_mib = "0.5b", 256
    shapes, folder = qwen2_shapes(QWEN2_SIZES[size]), folder_of(size)
    with (
        ray_of_its_own(),
        stand(folder, specs(shapes), bucket_mib=bucket_mib, extension_cls=NEMO_EXTENSION) as place,
    ):
        handle, plain = measure_sync(results, place, size, shapes, bucket_mib)
        measure_ipc(results, place, size, handle, plain)


def section_graphs(results: Results) -> None:
    """7B shape with CUDA graphs: what a sleeping engine keeps."""
    size = "7b"
    shapes, folder = qwen2_shapes(QWEN2_SIZES[size]), folder_of(size)
    with (
        ray_of_its_own(),
        stand(
            folder, specs(shapes), bucket_mib=1024, enforce_eager=False, max_num_seqs=64
        ) as place,
    ):
        place.publish(random_weights(shapes, 0))
        cycle(place)
        switches = [cycle(place)["switch_s"] for _ in range(5)]
        results.add("switch_s", switches, "s", 0.3, model=size, level=2, graphs=True)
        measure_residue(results, place, size, 1.4, graphs=True)


def neighbour(stop: Any, ready: Any) -> None:
    """Allocate and free 6 GiB until told to stop."""
    import torch

    while not stop.is_set():
        held = torch.empty(6 << 30, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        ready.set()
        time.sleep(0.004)
        del held
        torch.cuda.empty_cache()
        time.sleep(0.004)


def section_noisy(results: Results) -> None:
    """Cycles beside a process that allocates and frees."""
    shapes, folder = qwen2_shapes(QWEN2_SIZES["tiny"]), folder_of("tiny")
    context = multiprocessing.get_context("spawn")
    stop, ready = context.Event(), context.Event()
    other = context.Process(target=neighbour, args=(stop, ready))
    dead, unknown, seconds = 0, 0, []
    with (
        ray_of_its_own(),
        stand(folder, specs(shapes), bucket_mib=64, kv_cache_memory_bytes=256 * MIB) as place,
    ):
        place.publish(random_weights(shapes, 0))
        other.start()
        assert ready.wait(60)
        try:
            for _ in range(NOISY_CYCLES):
                started = time.perf_counter()
                grown = place.owner.expand([0]).outcomes[0].state
                taken = place.owner.shrink([0]).outcomes[0].state
                seconds.append(time.perf_counter() - started)
                dead += "FAILED" in (grown, taken)
                unknown += grown not in ("ACTIVE", "FAILED") or taken not in ("ASLEEP", "FAILED")
        finally:
            stop.set()
            other.join(20)
            if other.is_alive():
                other.kill()
    params = {"cycles": NOISY_CYCLES, "neighbour_gib": 6}
    results.add("noisy_neighbour_dead_engines", [dead], "count", 0, **params)
    results.add("noisy_neighbour_unknown_states", [unknown], "count", 0, **params)
    results.add("noisy_neighbour_cycle_s", seconds, "s", **params)


def section_equal(results: Results, at_once: int = 8) -> None:
    """Token equality of tiny models, several engines at once on the card."""
    variants = [(arch, tied) for arch in sorted(TINY) for tied in (False, True)]
    environment = {**os.environ, **ENVIRONMENT}
    environment["PYTHONPATH"] = os.pathsep.join([str(HERE.parent), str(HERE)])
    folder = Path(tempfile.mkdtemp(prefix="equal-"))
    running: list[tuple[str, bool, Path, Any]] = []
    equal = 0
    for place in range(0, len(variants), at_once):
        for arch, tied in variants[place : place + at_once]:
            out = folder / f"{arch}-{tied}.json"
            command = [
                sys.executable,
                str(HERE / "vllm_equal.py"),
                "--arch",
                arch,
                "--out",
                str(out),
            ]
            log = out.with_suffix(".log").open("wb")
            process = subprocess.Popen(
                [*command, *(["--tied"] if tied else [])],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            running.append((arch, tied, out, process))
        for arch, tied, out, process in running:
            try:
                process.wait(150)
            except subprocess.TimeoutExpired:
                process.kill()
            found = json.loads(out.read_text()) if out.exists() else {}
            good = bool(
                found.get("equal_to_fresh")
                and found.get("other_version_differs")
                and found.get("other_version_repeats")
            )
            equal += good
            if not good:
                tail = out.with_suffix(".log").read_text(errors="replace")[-2000:]
                logger.error("%s tied=%s: %s\n%s", arch, tied, found, tail)
            results.add("level_2_equal_tokens", [float(good)], "bool", 1, arch=arch, tied=tied)
        running.clear()
    results.add("level_2_equal_models", [equal], "count", len(variants))


SECTIONS: dict[str, Callable[[Results], None]] = {
    "big": section_big,
    "asleep": section_asleep,
    "noisy": section_noisy,
    "equal": section_equal,
    "small": section_small,
    "graphs": section_graphs,
}
"""In the order of their importance, should the time run out."""


def main() -> int:
    """Run the sections; a section that fails does not stop the others."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--out", type=Path, default=HERE / "results" / "gpu_vllm.json")
    parser.add_argument("--section", choices=list(SECTIONS), help="run one in this process")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    if args.section:
        SECTIONS[args.section](Results(args.out, args.section))
        return 0
    failed = []
    for name in args.only:
        started = time.monotonic()
        # A process each: nothing that one leaves on the card counts for the next.
        command = [sys.executable, str(Path(__file__).resolve()), "--section", name]
        done = subprocess.run([*command, "--out", str(args.out)], check=False)
        logger.info("section %s: %.0f s", name, time.monotonic() - started)
        if done.returncode:
            failed.append(name)
    if failed:
        logger.error("failed: %s", ", ".join(failed))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
