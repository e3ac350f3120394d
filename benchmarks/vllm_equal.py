"""Is an engine after a level-2 sleep and a sync the same as a fresh one? One model.

    python benchmarks/vllm_equal.py --arch qwen3_moe --tied --out result.json

The engine starts with the weights of version 1 from files. Then, each time asleep at
level 2 and woken: version 2, version 1 again. Greedy answers are compared token by token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import tempfile
from pathlib import Path
from typing import Any

from vllm_models import TINY, read_checkpoint, write_checkpoint, write_config

NODE = "this-node"
TOKENS = 64
PROMPTS = [list(range(5, 37)), [11, 7, 1999, 3], list(range(100, 400, 7))]


async def greedy(engine: Any, name: str) -> list[list[int]]:
    """Answers to the prompts, one after the other."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=TOKENS, temperature=0.0, ignore_eos=True, detokenize=False)
    answers = []
    for number, prompt in enumerate(PROMPTS):
        last = None
        async for output in engine.generate(
            prompt={"prompt_token_ids": prompt},
            sampling_params=params,
            request_id=f"{name}{number}",
        ):
            last = output
        assert last is not None
        answers.append(list(last.outputs[0].token_ids))
    return answers


async def compare(arch: str, tied: bool, eager: bool) -> dict[str, Any]:
    """Run the sequence; what was equal and what arrived."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from nemo_rl_rlix.settings import WeightCacheSettings
    from nemo_rl_rlix.vllm.engine_control import EngineControl
    from nemo_rl_rlix.vllm.extension import ExtensionConfig
    from nemo_rl_rlix.vllm.options import EXTENSION_CLS, ShardSettings, engine_arguments
    from nemo_rl_rlix.vllm.serving import Serving
    from nemo_rl_rlix.weights.cache import CpuWeightCache
    from nemo_rl_rlix.weights.dtypes import spec_of

    folders = {version: Path(tempfile.mkdtemp(prefix=f"{arch}-")) for version in (1, 2)}
    for version, folder in folders.items():
        config = write_config(folder, *TINY[arch], tied=tied)
        write_checkpoint(folder, config, seed=version)
    weights = {version: read_checkpoint(folder) for version, folder in folders.items()}
    cache = CpuWeightCache("equal", WeightCacheSettings(bucket_mib=1, slots=2), NODE)
    cache.plan([spec_of(name, tensor) for name, tensor in weights[1].items()])
    handles = {v: cache.build(v, v - 1, tensors.items()) for v, tensors in weights.items()}

    arguments = engine_arguments(
        {
            "model": str(folders[1]),
            "skip_tokenizer_init": True,
            "enable_sleep_mode": True,
            "enforce_eager": eager,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "gpu_memory_utilization": 0.05,
            "dtype": "bfloat16",
            "disable_log_stats": True,
        },
        ShardSettings("equal"),
        extension_cls=EXTENSION_CLS,
        kv_cache_bytes=1 << 28,
    )
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
    serving = Serving(0)
    control = serving.bind(
        engine,
        lambda gate: EngineControl(engine, dp_rank=0, gate=gate, sleeping_budget_bytes=2 << 30),
    )
    extension = ExtensionConfig("equal", 0, 2, {socket.gethostname(): NODE})
    await control.worker_rpc("rlix_attach", extension, timeout_s=30)
    control.weights_version = 1
    serving.open(0, 1)
    answers = {"fresh": await greedy(engine, "fresh")}
    missing: dict[str, list[str]] = {}
    memory = 0
    for step, version in enumerate((2, 1, 2, 1)):
        serving.gate.close(step)
        drained = await control.drain(timeout_s=10)
        assert drained.idle
        memory = (await control.sleep(level=2, timeout_s=20)).held_bytes
        await control.wake(tags=("weights",), timeout_s=20)
        report = await control.receive(handles[version], timeout_s=30)
        missing[f"{step}:{version}"] = report.missing
        await control.finalize_weights(timeout_s=30)
        await control.wake(tags=("kv_cache",), timeout_s=20)
        assert await control.reset_prefix_cache(timeout_s=10)
        await control.probe(timeout_s=30)
        if not report.missing:
            serving.open(step, version)
            answers[f"{step}:{version}"] = await greedy(engine, f"{step}-")
    await control.kill(timeout_s=20)
    cache.close()
    same = [answers.get(key) == answers["fresh"] for key in ("1:1", "3:1")]
    return {
        "arch": arch,
        "tied": tied,
        "eager": eager,
        "equal_to_fresh": all(same),
        "other_version_differs": answers.get("0:2") != answers["fresh"],
        "other_version_repeats": answers.get("0:2") == answers.get("2:2"),
        "missing": missing,
        "asleep_bytes": memory,
    }


def main() -> None:
    """Run one model and write what came of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", choices=sorted(TINY), required=True)
    parser.add_argument("--tied", action="store_true")
    parser.add_argument("--graphs", action="store_true", help="with CUDA graphs")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    result = asyncio.run(compare(args.arch, args.tied, not args.graphs))
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    os._exit(0)  # whatever vLLM's threads still do


if __name__ == "__main__":
    main()
