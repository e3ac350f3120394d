"""Trainers that cannot be time-shared are refused by the name of the setting."""

import pytest

from nemo_rl_rlix.errors import SettingError
from nemo_rl_rlix.megatron.limits import refuse_unsupported


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tp_comm_overlap", True),
        ("nccl_ub", True),
        ("cuda_graph_impl", "local"),
        ("cuda_graph_impl", "transformer_engine"),
        ("enable_cuda_graph", True),
        ("external_cuda_graph", True),
        ("use_megatron_fsdp", True),
    ],
)
def test_refused_by_name_with_a_remedy(name: str, value: object) -> None:
    with pytest.raises(SettingError) as caught:
        refuse_unsupported({"hidden_size": 8}, {name: value})
    assert caught.value.setting.endswith(name)
    assert caught.value.remedy


def test_ordinary_settings_pass() -> None:
    refuse_unsupported({"cuda_graph_impl": "none", "tp_comm_overlap": False}, {"nccl_ub": None}, {})
