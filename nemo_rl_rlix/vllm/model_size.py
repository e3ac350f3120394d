"""How many bytes of weights a model has, without making any of them."""

from __future__ import annotations

import importlib
from typing import Any

import torch

ITEM_BYTES = {"float32": 4, "float": 4, "float16": 2, "half": 2, "bfloat16": 2}


def weight_bytes(model_name: str, dtype: str, trust_remote_code: bool = True) -> int:
    """Bytes of all parameters of a Hugging Face model, tied ones once.

    Args:
        model_name: Name or folder.
        dtype: Name of the dtype that the engine loads them in.
        trust_remote_code: Whether code of the model's repository may run.
    """
    transformers: Any = importlib.import_module("transformers")

    config = transformers.AutoConfig.from_pretrained(
        model_name, trust_remote_code=trust_remote_code
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, trust_remote_code=trust_remote_code
        )
    model.tie_weights()
    elements = sum(parameter.numel() for parameter in model.parameters())
    return int(elements) * ITEM_BYTES.get(dtype, 2)
