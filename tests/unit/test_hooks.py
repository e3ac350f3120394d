from __future__ import annotations

import inspect
import pickle

import pytest

from nemo_rl_rlix.hooks import NoOpRLixHooks, RLixHooks

METHODS = {"before_training", "after_training", "report_progress", "clear_progress"}


def public(cls: type) -> set[str]:
    return {name for name in vars(cls) if not name.startswith("_")}


def test_the_protocol_has_exactly_the_four_calls():
    assert public(RLixHooks) == METHODS
    assert public(NoOpRLixHooks) == METHODS


@pytest.mark.parametrize("method", sorted(METHODS))
def test_the_no_op_has_the_protocol_s_signatures(method):
    signature = inspect.signature(getattr(RLixHooks, method))
    assert inspect.signature(getattr(NoOpRLixHooks, method)) == signature


def test_the_no_op_satisfies_the_protocol_and_does_nothing():
    hooks = NoOpRLixHooks()
    assert isinstance(hooks, RLixHooks)
    assert hooks.before_training(0) is None
    assert hooks.after_training(step=0) is None
    assert hooks.report_progress(collected=1, target=4) is None
    assert hooks.clear_progress() is None
    assert isinstance(pickle.loads(pickle.dumps(hooks)), RLixHooks)


@pytest.mark.parametrize("missing", sorted(METHODS))
def test_hooks_without_one_of_the_calls_are_none(missing):
    body = {name: getattr(NoOpRLixHooks, name) for name in METHODS - {missing}}
    assert not isinstance(type("Hooks", (), body)(), RLixHooks)
