"""Coverage by a bit pattern, and tensors that no sync brings back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from nemo_rl_rlix.vllm import weight_state
from nemo_rl_rlix.vllm.weight_state import (
    can_be_proved,
    find_unwritten,
    mark_unwritten,
    parameters_of,
    stray_tensors,
)


class Toy(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8, dtype=dtype)
        self.qkv = nn.Linear(8, 24, dtype=dtype)
        self.head = nn.Linear(8, 11, bias=False, dtype=dtype)
        self.head.weight = self.embed.weight
        self.register_buffer("rope", torch.ones(3))
        self.view = self.qkv.weight[:2]
        self.scale = torch.full((2,), 7.0)
        self.per_head = [torch.zeros(1), "name"]


def test_a_tied_parameter_is_expected_once() -> None:
    model, draft = Toy(), nn.Linear(1, 1)
    draft.embed = model.embed  # a draft model often shares the main one's
    assert set(parameters_of({"": model, "draft.": draft})) == {
        "embed.weight",
        "qkv.weight",
        "qkv.bias",
        "draft.weight",
        "draft.bias",
    }


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [1 << 26, 16])
def test_every_element_has_to_be_written(
    dtype: torch.dtype, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_state, "CHUNK_ELEMENTS", chunk)
    model = Toy(dtype)
    parameters = parameters_of({"": model})
    mark_unwritten(parameters)
    assert find_unwritten(parameters) == set(parameters)
    with torch.no_grad():
        model.embed.weight.fill_(float("nan"))  # a NaN that arithmetic makes counts as written
        model.qkv.bias.fill_(-1.0)
        model.qkv.weight[:16].zero_()  # q and k, not v
    assert find_unwritten(parameters) == {"qkv.weight"}
    with torch.no_grad():
        model.qkv.weight[16:].zero_()
        model.qkv.weight[23, 7] = float("-inf")
    assert find_unwritten(parameters) == frozenset()


def test_one_missing_element_of_a_transposed_parameter_is_found() -> None:
    parameter = nn.Parameter(torch.zeros(4, 6).t())
    assert not parameter.is_contiguous()
    mark_unwritten({"w": parameter})
    with torch.no_grad():
        parameter.copy_(torch.ones(6, 4))
    assert not find_unwritten({"w": parameter})
    with torch.no_grad():
        parameter.view(torch.int32)[5, 3] = -1
    assert find_unwritten({"w": parameter}) == {"w"}


def test_integers_have_no_pattern_of_their_own() -> None:
    assert can_be_proved(parameters_of({"": Toy()}))
    packed = nn.Parameter(torch.zeros(2, dtype=torch.int32), requires_grad=False)
    assert not can_be_proved({"packed": packed})
    assert find_unwritten({}) == frozenset()


def test_strays_are_plain_attributes_that_are_no_views() -> None:
    model = nn.Sequential(Toy())
    model[0].kv_cache = [torch.zeros(8)]
    ranges = sorted(
        (tensor.untyped_storage().data_ptr(), tensor.nbytes)
        for tensor in (model[0].scale, model[0].per_head[0], model[0].qkv.weight, model[0].rope)
    )
    strays = stray_tensors(model, ranges)
    assert set(strays) == {"0.scale", "0.per_head[0]"}
    assert stray_tensors(model, []) == {}
    strays["0.scale"].copy_(torch.tensor([1.0, 2.0]))
    assert model[0].scale.tolist() == [1.0, 2.0]
