"""What a real engine does, and what the rules of sleeping and waking guard against."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from nemo_rl_rlix.errors import GrantRequiredError, PartialGeneration, Segment
from nemo_rl_rlix.reference.device import DeviceOutOfMemoryError, LogicalGpu, create_logical_gpus
from nemo_rl_rlix.reference.engine import (
    ContinuousBatchingEngine,
    EngineConfig,
    EngineDeadError,
    EngineOutput,
    EngineState,
    PauseMode,
    TokenDelta,
)
from nemo_rl_rlix.reference.memory import DeviceAccount, UnmappedMemoryError
from nemo_rl_rlix.reference.model import KVCache, ModelConfig, ReferenceModel
from nemo_rl_rlix.reference.prefix import PrefixCache
from nemo_rl_rlix.shards.preempt import drain_engine
from nemo_rl_rlix.shards.requests import GenerationRequest

MODEL = ModelConfig(vocab_size=32, width=32, layers=2, heads=4, hidden=48, max_len=64)
CONFIG = EngineConfig(model=MODEL, max_num_seqs=4, prefix_cache_bytes=64 * 1024)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small operations on several threads spend their time waiting for one another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def request(
    name: str, prompt: tuple[int, ...] = (1, 2, 3, 4), **changes: object
) -> GenerationRequest:
    return replace(GenerationRequest(name, prompt, 12, seed=sum(name.encode())), **changes)


def run(engine: ContinuousBatchingEngine) -> dict[str, EngineOutput]:
    while engine.step():
        pass
    return {o.request_id: o for o in engine.take_outputs() if isinstance(o, EngineOutput)}


def generate(engine: ContinuousBatchingEngine, **changes: object) -> EngineOutput:
    engine.add(request("one", **changes))
    return run(engine)["one"]


def weights(seed: int) -> list[tuple[str, torch.Tensor]]:
    return [(n, p.detach()) for n, p in ReferenceModel(MODEL, seed=seed).named_parameters()]


# -- generation -----------------------------------------------------------------


def test_logprobs_are_those_of_the_training_forward() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    for index in range(6):  # more than run at once, of several lengths and temperatures
        engine.add(request(f"r{index}", tuple(range(1, 3 + index)), temperature=0.5 + 0.25 * index))
    for index, output in enumerate(run(engine).values()):
        name = int(output.request_id[1:])
        prompt, tokens = tuple(range(1, 3 + name)), output.generation.token_ids
        logits = engine.memory.model(torch.tensor([prompt + tokens]))[0]
        logprobs = torch.log_softmax(logits / (0.5 + 0.25 * name), -1)
        expected = [float(logprobs[len(prompt) - 1 + i, t]) for i, t in enumerate(tokens)]
        assert output.generation.logprobs == pytest.approx(expected, abs=1e-4), index
        assert output.finish_reason == "length" and len(tokens) == 12


def test_greedy_takes_the_most_likely_token_at_temperature_one() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    output = generate(engine, temperature=0.0)
    sequence = [1, 2, 3, 4]
    for token, logprob in zip(output.generation.token_ids, output.generation.logprobs, strict=True):
        logprobs = torch.log_softmax(engine.memory.model(torch.tensor([sequence]))[0, -1], -1)
        assert token == int(logprobs.argmax()) and logprob == pytest.approx(
            float(logprobs.max()), abs=1e-4
        )
        sequence.append(token)


def test_a_seeded_answer_does_not_depend_on_what_else_runs() -> None:
    alone = generate(ContinuousBatchingEngine(CONFIG), seed=7)
    crowd = ContinuousBatchingEngine(CONFIG)
    for index in range(3):
        crowd.add(request(f"x{index}", (5, 6 + index), max_new_tokens=3 + 2 * index))
    crowd.step()
    crowd.add(request("one", seed=7))
    crowd.add(request("late", (9,), seed=3))
    together = run(crowd)["one"]
    assert together.generation.token_ids == alone.generation.token_ids
    assert together.generation.logprobs == pytest.approx(alone.generation.logprobs, abs=1e-5)


def test_sampling_follows_the_distribution() -> None:
    engine = ContinuousBatchingEngine(replace(CONFIG, max_num_seqs=64))
    for seed in range(1000):
        engine.add(request(f"r{seed}", max_new_tokens=1, seed=seed, temperature=0.5))
    counts = torch.zeros(32)
    for output in run(engine).values():
        counts[output.generation.token_ids[0]] += 1
    logits = engine.memory.model(torch.tensor([[1, 2, 3, 4]]))[0, -1]
    expected = torch.softmax(logits / 0.5, -1) * 1000
    # Chi-square with 31 degrees of freedom: 61 is its 99.9th percentile.
    assert float(((counts - expected) ** 2 / expected).sum()) < 61


def test_every_position_has_a_draw_of_its_own() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    tokens = generate(engine, temperature=1e6, max_new_tokens=60).generation.token_ids
    assert len(set(tokens)) > 16, "32 tokens are all but equally likely"


def test_resume_from_prior_tokens_continues_the_same_answer() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    whole = generate(engine, seed=5).generation
    for kept in (0, 1, 5, 11):
        prior = PartialGeneration(whole.token_ids[:kept], whole.logprobs[:kept])
        rest = generate(engine, seed=5, prior=prior)
        assert rest.generation.token_ids == whole.token_ids[kept:]
        assert rest.generation.logprobs == pytest.approx(whole.logprobs[kept:], abs=1e-5)


def test_a_prior_that_is_complete_ends_at_once() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    full = generate(engine, prior=PartialGeneration(tuple(range(12)), (0.0,) * 12))
    stopped = generate(engine, prior=PartialGeneration((1, 9), (0.0,) * 2), stop_ids=(9,))
    assert (full.finish_reason, full.generation.token_ids) == ("length", ())
    assert (stopped.finish_reason, stopped.generation.token_ids) == ("stop", ())


def test_stop_token_is_kept_and_max_len_ends_an_answer() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    whole = generate(engine, seed=5).generation.token_ids
    stop = whole[4]
    stopped = generate(engine, seed=5, stop_ids=(stop,))
    assert stopped.finish_reason == "stop"
    assert stopped.generation.token_ids == whole[: whole.index(stop) + 1]
    long = generate(engine, max_new_tokens=1000)
    assert long.finish_reason == "length" and len(long.generation.token_ids) == 60


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt_ids": ()}, "1 or more"),
        ({"prompt_ids": (32,)}, "below 32"),
        ({"prompt_ids": (1,) * 65}, "max_len=64"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_a_request_that_can_never_run_is_refused(changes: dict, message: str) -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    with pytest.raises(ValueError, match=message):
        engine.add(replace(request("bad"), **changes))
    assert engine.request_ids() == ()


def test_streamed_tokens_are_the_answer() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    internal = engine.add(request("s"), stream=True)
    while engine.step():
        pass
    *deltas, end = engine.take_outputs()
    assert all(isinstance(d, TokenDelta) and d.internal_id == internal for d in deltas)
    assert tuple(d.token_id for d in deltas) == end.generation.token_ids


# -- sleep, abort, drain ----------------------------------------------------------


def drain(engine: ContinuousBatchingEngine, abort: object = None, timeout_s: float = 5.0):
    return drain_engine(
        pause=lambda: engine.pause(PauseMode.KEEP),
        table=engine.request_ids,
        abort=abort or engine.abort,
        callers=lambda: 0,
        timeout_s=timeout_s,
    )


def test_a_step_under_unmapped_memory_kills_the_engine() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.add(request("a"))
    engine.step()
    engine.sleep(2)  # by force: nothing was drained
    with pytest.raises(UnmappedMemoryError, match="kv_cache"):
        engine.step()
    assert engine.state is EngineState.DEAD
    for act in (engine.step, engine.resume, engine.wake, lambda: engine.add(request("b"))):
        with pytest.raises(EngineDeadError, match="UnmappedMemoryError"):
            act()


def test_drained_first_it_lives_and_answers_afterwards() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    for name in ("a", "b"):
        engine.add(request(name, max_new_tokens=50))
    for _ in range(7):
        engine.step()
    assert drain(engine).idle
    aborted = engine.take_outputs()
    assert [o.finish_reason for o in aborted] == ["abort", "abort"]
    assert [len(o.generation.token_ids) for o in aborted] == [7, 7]
    engine.sleep(1)
    assert not engine.step(), "paused: it does not step"
    engine.wake()
    assert len(generate(engine).generation.token_ids) == 12


def test_pause_with_abort_ends_running_and_waiting_requests_as_ordinary_outputs() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    for index in range(6):
        engine.add(request(f"r{index}"))
    for _ in range(7):
        engine.step()
    engine.pause(PauseMode.ABORT)
    outputs = engine.take_outputs()
    assert sorted(len(o.generation.token_ids) for o in outputs) == [0, 0, 7, 7, 7, 7]
    assert {o.finish_reason for o in outputs} == {"abort"}
    assert engine.request_ids() == ()


def test_the_drain_does_not_look_at_the_gauge() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    for index in range(3):
        engine.add(request(f"r{index}"))
    engine.step()
    assert drain(engine).idle
    assert engine.running_gauge == 3, "it refreshes only on a step, and none comes"


def test_an_abort_by_the_callers_ids_does_nothing_and_the_drain_says_so() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    internal = engine.add(request("mine"))
    assert internal != "mine" and engine.abort(["mine"]) == 0
    report = drain(
        engine, abort=lambda ids: engine.abort([i.split("#")[0] for i in ids]), timeout_s=0.1
    )
    assert not report.idle and report.leftover == 1 and report.seconds < 1


def test_equal_ids_of_callers_are_two_requests() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    first, second = engine.add(request("same")), engine.add(request("same"))
    assert engine.abort([first]) == 1 and engine.request_ids() == (second,)


def test_a_request_to_a_sleeping_engine_waits_inside_and_runs_on_the_next_wake() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.pause(PauseMode.ABORT)
    engine.sleep(2)
    engine.add(request("early"))
    assert not engine.step()
    engine.wake()
    output = run(engine)["early"]  # that is why admission is closed first
    assert all(math.isnan(p) for p in output.generation.logprobs)


def test_an_abort_after_the_sleep_kills_the_engine() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.pause(PauseMode.ABORT)
    engine.sleep(2)
    internal = engine.add(request("stray"))
    with pytest.raises(UnmappedMemoryError, match="abort"):
        engine.abort([internal])
    assert engine.state is EngineState.DEAD


# -- wake, level 2 ----------------------------------------------------------------


def test_a_step_between_the_two_wakes_kills_the_engine() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.pause(PauseMode.ABORT)
    engine.sleep(1)
    engine.add(request("a"))
    engine.wake(["weights"])
    assert engine.state is EngineState.PAUSED and not engine.step(), "paused until all is awake"
    assert not engine.resume(engine.pause_epoch), "a conditional resume refuses"
    engine.resume()
    with pytest.raises(UnmappedMemoryError, match="kv_cache"):
        engine.step()


@pytest.mark.parametrize("level", [1, 2])
def test_greedy_output_over_a_cycle_is_bit_equal_to_a_fresh_engines(level: int) -> None:
    fresh = ContinuousBatchingEngine(replace(CONFIG, seed=11))
    cycled = ContinuousBatchingEngine(replace(CONFIG, seed=12))
    generate(cycled, temperature=0.0)
    cycled.load_weights(weights(11))
    cycled.pause(PauseMode.ABORT)
    cycled.sleep(level)
    gc.collect()
    cycled.wake(["weights"])
    if level == 2:
        assert cycled.load_weights(weights(11)) == cycled.expected_names()
    cycled.wake(["kv_cache"])
    assert cycled.reset_prefix_cache()
    assert (
        generate(cycled, temperature=0.0).generation == generate(fresh, temperature=0.0).generation
    )
    for (name, ours), (_, theirs) in zip(
        cycled.memory.model.named_buffers(), fresh.memory.model.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name


def test_level_two_without_a_sync_is_flagged_and_shows() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.sleep(2)
    engine.wake()
    assert engine.weights_discarded
    assert all(math.isnan(p) for p in generate(engine).generation.logprobs)
    *some, last = weights(1)
    engine.load_weights(some)
    assert engine.weights_discarded, "a partial sync does not count"
    engine.load_weights([last])
    assert not engine.weights_discarded
    engine.sleep(1)
    engine.wake()
    assert not engine.weights_discarded
    engine.sleep(2)
    engine.wake()
    engine.load_weights(some)
    assert engine.weights_discarded, "what came before the sleep does not count either"


def test_level_one_then_two_discards() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.sleep(1)
    engine.sleep(2)  # the second sleep is a no-op: the host copy stays
    engine.wake()
    assert not engine.weights_discarded
    assert not any(math.isnan(p) for p in generate(engine).generation.logprobs)


@pytest.mark.parametrize("level", [1, 2])
def test_sleep_really_frees_and_twice_is_a_no_op(level: int, tmp_path: Path) -> None:
    gpu = LogicalGpu(create_logical_gpus(tmp_path, 1, 10_000_000)[0])
    gpu.grant("p")
    engine = ContinuousBatchingEngine(CONFIG, DeviceAccount(gpu, "p", "shard"))
    generate(engine)
    tensors = [p.data for p in engine.memory.model.parameters()]
    assert engine.memory.cache is not None
    tensors += [*engine.memory.cache.layers, *engine.memory.prefixes._entries.values()]
    storages = [weakref.ref(t.untyped_storage()) for t in tensors]
    held = gpu.held_bytes("shard")
    assert held > KVCache.nbytes(MODEL, 4) + CONFIG.prefix_cache_bytes
    del tensors
    for _ in range(2):
        engine.sleep(level)
        gc.collect()
        assert gpu.held_bytes("shard") == 0
        assert [ref for ref in storages if ref() is not None] == []
    # Weights stay on the host at level 1; at level 2 only what no transfer brings.
    buffers = sum(b.nbytes for b in ContinuousBatchingEngine(CONFIG).memory.model.buffers())
    assert engine.memory.host_bytes == buffers if level == 2 else engine.memory.host_bytes > buffers
    for _ in range(2):
        engine.wake(["weights"])
    for _ in range(2):
        engine.wake(["kv_cache"])
    assert gpu.held_bytes("shard") == held and engine.memory.host_bytes == 0


def test_memory_is_flat_over_cycles() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    seen = set()
    for _ in range(5):
        generate(engine)
        engine.sleep(1)
        seen.add(engine.memory.host_bytes)
        engine.wake()
    assert len(seen) == 1


def test_wake_on_a_full_gpu_fails_and_can_be_tried_again(tmp_path: Path) -> None:
    gpu = LogicalGpu(create_logical_gpus(tmp_path, 1, 600_000)[0])
    gpu.grant("p")
    engine = ContinuousBatchingEngine(CONFIG, DeviceAccount(gpu, "p", "shard"))
    engine.sleep(1)
    gpu.charge("trainer", "weights", 600_000)
    for tag in ("weights", "kv_cache"):
        with pytest.raises(DeviceOutOfMemoryError, match="trainer 600000"):
            engine.wake([tag])
    gpu.charge("trainer", "weights", 600_000 - gpu.held_bytes("shard") - KVCache.nbytes(MODEL, 4))
    with pytest.raises(DeviceOutOfMemoryError):
        engine.wake(["kv_cache"])  # the keys fit, the prefixes do not
    assert gpu.held_bytes("shard") == 0
    gpu.charge("trainer", "weights", 0)
    engine.wake()
    assert len(generate(engine).generation.token_ids) == 12


def test_computing_without_the_grant_kills_the_engine_and_is_on_record(tmp_path: Path) -> None:
    gpu = LogicalGpu(create_logical_gpus(tmp_path, 1, 10_000_000)[0])
    gpu.grant("p")
    engine = ContinuousBatchingEngine(CONFIG, DeviceAccount(gpu, "p", "shard"))
    generate(engine)
    gpu.revoke("p")
    engine.add(request("a"))
    with pytest.raises(GrantRequiredError):
        engine.step()
    assert engine.state is EngineState.DEAD
    assert [v.what for v in gpu.violations()] == ["engine step"]


# -- weights and prefix cache -------------------------------------------------------


def test_a_stale_prefix_changes_the_answer_and_a_reset_cures_it() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    prompt = tuple(range(1, 20))
    generate(engine, prompt_ids=prompt)
    engine.load_weights(weights(21))
    stale = generate(engine, prompt_ids=prompt, temperature=0.0).generation
    assert engine.memory.prefixes.hits == 1
    assert engine.reset_prefix_cache()
    clean = generate(engine, prompt_ids=prompt, temperature=0.0).generation
    fresh = ContinuousBatchingEngine(replace(CONFIG, seed=21))
    assert clean == generate(fresh, prompt_ids=prompt, temperature=0.0).generation
    assert stale.logprobs != pytest.approx(clean.logprobs, abs=1e-3)


def test_a_prefix_hit_changes_nothing_else() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    first, second = generate(engine, seed=3), generate(engine, seed=3)
    assert engine.memory.prefixes.hits == 1
    assert second.generation == first.generation
    off = ContinuousBatchingEngine(replace(CONFIG, prefix_cache_bytes=0))
    generate(off, seed=3)
    assert generate(off, seed=3).generation.token_ids == first.generation.token_ids
    assert off.memory.prefixes.hits == 0


def test_reset_answers_false_while_a_request_holds_a_prefix() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    internal = engine.add(request("holder"))
    engine.step()
    assert not engine.reset_prefix_cache() and engine.memory.prefixes.nbytes > 0
    engine.abort([internal])
    assert engine.reset_prefix_cache() and engine.memory.prefixes.nbytes == 0


def test_a_held_prefix_is_not_evicted() -> None:
    prefixes, kv = PrefixCache(2 * 40), torch.zeros(10)
    assert prefixes.store((1,), kv) and prefixes.store((2,), kv)
    assert not prefixes.store((3,), kv)
    prefixes.release((1,))
    assert prefixes.store((3,), kv) and prefixes.hold((1,)) is None
    assert prefixes.hold((2,)) is kv and prefixes.nbytes == 80


def test_prefixes_stay_within_their_bytes() -> None:
    one = 2 * 2 * 7 * 32 * 4
    engine = ContinuousBatchingEngine(replace(CONFIG, prefix_cache_bytes=2 * one))
    for index in range(5):
        engine.add(request(f"r{index}", (index, *range(1, 8))))
        engine.add(request(f"s{index}", (index, *range(1, 8))))
    assert len(run(engine)) == 10
    assert engine.memory.prefixes.nbytes == 2 * one
    assert engine.reset_prefix_cache()


def test_an_update_in_keep_mode_stamps_each_run_of_tokens() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.weights_version = 3
    engine.add(request("a"))
    for _ in range(5):
        engine.step()
    epoch = engine.pause(PauseMode.KEEP)
    assert not engine.step()
    engine.load_weights(weights(2))
    engine.weights_version = 4
    assert not engine.reset_prefix_cache(), "the frozen request holds its prefix"
    assert engine.resume(epoch)
    output = run(engine)["a"].generation
    assert output.segments == (Segment(3, 5), Segment(4, 7))


def test_keep_mode_with_clear_cache_computes_again_from_the_new_weights() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    for name in ("a", "b"):
        engine.add(request(name, seed=4, temperature=0.0))
    for _ in range(5):
        engine.step()
    epoch = engine.pause(PauseMode.KEEP, clear_cache=True)
    assert engine.reset_prefix_cache() and len(engine.request_ids()) == 2
    engine.load_weights(weights(2))
    engine.resume(epoch)
    outputs = run(engine)
    tokens = outputs["a"].generation.token_ids
    assert tokens == outputs["b"].generation.token_ids and len(tokens) == 12
    rest = generate(
        ContinuousBatchingEngine(replace(CONFIG, seed=2)),
        temperature=0.0,
        prior=PartialGeneration(tokens[:5], (0.0,) * 5),
    )
    assert rest.generation.token_ids == tokens[5:]


def test_resume_only_at_the_epoch_of_the_pause() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    refresh = engine.pause(PauseMode.KEEP)
    engine.pause(PauseMode.ABORT)  # a shrink came between
    engine.sleep(2)
    assert not engine.resume(refresh) and engine.state is EngineState.PAUSED
    engine.wake()
    newer = engine.pause(PauseMode.KEEP)
    assert not engine.resume(refresh) and engine.state is EngineState.PAUSED
    assert engine.resume(newer) and engine.state is EngineState.RUNNING


def test_ties_unknown_names_and_shapes() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    head = torch.randn(32, 32)
    assert "lm_head" not in engine.expected_names()
    assert engine.load_weights([("lm_head", head)]) == {"embed_tokens"}
    assert torch.equal(engine.memory.model.embed_tokens, head)
    assert engine.load_weights([("extra", head)]) == {"extra"}, "coverage will tell"
    with pytest.raises(ValueError, match="embed_tokens has shape"):
        engine.load_weights([("embed_tokens", torch.zeros(2))])
    untied = ContinuousBatchingEngine(replace(CONFIG, model=replace(MODEL, tied_embeddings=False)))
    assert untied.expected_names() == engine.expected_names() | {"lm_head"}


def test_loading_into_unmapped_weights_kills_the_engine() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    engine.sleep(2)
    with pytest.raises(UnmappedMemoryError, match="weights"):
        engine.load_weights(weights(1))
    assert engine.state is EngineState.DEAD


def test_a_full_engine_of_long_and_short_requests_answers_each_as_if_alone() -> None:
    engine = ContinuousBatchingEngine(CONFIG)
    wanted = {}
    for index in range(12):
        changes = {
            "prompt_ids": tuple(range(1, 2 + index % 5)),
            "max_new_tokens": 1 + (index * 7) % 20,
            "seed": index,
        }
        wanted[f"r{index}"] = generate(ContinuousBatchingEngine(CONFIG), **changes).generation
        engine.add(request(f"r{index}", **changes))
        engine.step()
        if index == 5:
            engine.abort([engine.request_ids()[0]])
    for name, output in run(engine).items():
        if output.finish_reason != "abort":
            assert output.generation.token_ids == wanted[name].token_ids, name
