"""Replacing globals and putting them back."""

from __future__ import annotations

from types import ModuleType

import pytest

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.nemo_rl.makers import other_workers, same_environments, subclass
from nemo_rl_rlix.nemo_rl.seams import Entry, Seam
from nemo_rl_rlix.nemo_rl.swap import ORIGINAL, Swap, SwapError, apply, undo


class Cluster:
    """What a module of NeMo RL would bind."""


class OurCluster(Cluster):
    pass


def function() -> str:
    return "theirs"


def wrap(original: object) -> object:
    def ours() -> str:
        return f"ours over {original()}"  # type: ignore[operator]

    return ours


def module_with(**names: object) -> ModuleType:
    module = ModuleType("host")
    vars(module).update(names)
    return module


def seam(symbol: str, entry: Entry) -> Seam:
    return Seam("test", "host", symbol, entry, "to see")


def test_a_function_is_wrapped_and_put_back() -> None:
    module = module_with(f=function)
    done = apply(Swap("test", wrap), seam("f", Entry.GLOBAL_FUNCTION), module)
    assert module.f() == "ours over theirs"
    assert getattr(module.f, ORIGINAL) is function
    undo(done, module)
    assert module.f is function


def test_a_replacement_is_not_replaced_again() -> None:
    module = module_with(f=function)
    where = seam("f", Entry.GLOBAL_FUNCTION)
    apply(Swap("test", wrap), where, module)
    with pytest.raises(SwapError, match=r"host\.f is replaced already"):
        apply(Swap("test", wrap), where, module)


def test_a_class_is_replaced_by_a_subclass_only() -> None:
    module = module_with(Cluster=Cluster)
    where = seam("Cluster", Entry.GLOBAL_CLASS)
    with pytest.raises(SwapError, match="is no subclass"):
        apply(Swap("test", lambda original: object), where, module)
    assert module.Cluster is Cluster
    done = apply(Swap("test", lambda original: OurCluster), where, module)
    assert isinstance(module.Cluster(), Cluster)
    undo(done, module)
    assert module.Cluster is Cluster
    # The class itself must not stay marked: a second registration uses it again.
    undo(apply(Swap("test", lambda original: OurCluster), where, module), module)


def test_a_subclass_is_not_taken_for_replaced_because_its_base_is() -> None:
    module = module_with(Cluster=OurCluster)
    setattr(Cluster, ORIGINAL, None)
    try:
        apply(
            Swap("test", lambda original: type("New", (original,), {})),
            seam("Cluster", Entry.GLOBAL_CLASS),
            module,
        )
    finally:
        delattr(Cluster, ORIGINAL)


def test_what_someone_else_replaced_meanwhile_is_left_alone() -> None:
    module = module_with(f=function)
    done = apply(Swap("test", wrap), seam("f", Entry.GLOBAL_FUNCTION), module)
    module.f = foreign = lambda: "foreign"  # type: ignore[assignment]
    with pytest.raises(SwapError, match="was replaced by"):
        undo(done, module)
    assert module.f is foreign


def test_entries_are_added_and_taken_away() -> None:
    registry = {"theirs": "uv run"}
    module = module_with(REGISTRY=registry)
    where = seam("REGISTRY", Entry.MAPPING)
    swap = Swap("test", lambda entries: {"ours": entries["theirs"]})
    done = apply(swap, where, module)
    assert registry == {"theirs": "uv run", "ours": "uv run"}
    with pytest.raises(SwapError, match="has entries for ours already"):
        apply(swap, where, module)
    undo(done, module)
    assert registry == {"theirs": "uv run"}


WORKER = "nemo_rl.vllm.Worker"
QUANTISED = "nemo_rl.modelopt.Worker"


def resolve(default_cls: str, config: dict[str, object]) -> str:
    return QUANTISED if config.get("quant_cfg") else default_cls


def test_workers_are_chosen_after_the_original_has_chosen() -> None:
    chosen = other_workers({WORKER: "ours.Worker"})(resolve)
    assert chosen(WORKER, {}) == "ours.Worker"
    assert chosen(WORKER, {"quant_cfg": "nvfp4"}) == QUANTISED
    assert chosen("nemo_rl.vllm.SyncWorker", {}) == "nemo_rl.vllm.SyncWorker"


def test_an_actor_of_ours_runs_where_its_base_does() -> None:
    module = module_with(REGISTRY={WORKER: "uv run --extra vllm"})
    swap = Swap("test", same_environments({"ours.Worker": WORKER}))
    apply(swap, seam("REGISTRY", Entry.MAPPING), module)
    assert module.REGISTRY["ours.Worker"] == "uv run --extra vllm"


def test_a_subclass_is_loaded_by_name() -> None:
    assert subclass("nemo_rl_rlix.errors:SettingError")(None) is SettingError
