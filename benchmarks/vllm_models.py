"""Random models by shape: configurations, checkpoints and the names of their tensors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_TINY = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", _TINY),
    "qwen2": ("Qwen2Config", _TINY),
    "qwen3": ("Qwen3Config", {**_TINY, "head_dim": 64}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **_TINY,
            "head_dim": 64,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 256,
            "decoder_sparse_step": 1,
            "norm_topk_prob": True,
        },
    ),
}
"""Architecture -> class of its configuration and its fields."""

QWEN2_SIZES: dict[str, dict[str, Any]] = {
    "tiny": _TINY,
    "0.5b": {
        **_TINY,
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "vocab_size": 151936,
        "max_position_embeddings": 32768,
    },
    "7b": {
        **_TINY,
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
    },
}
"""Dimensions of Qwen2.5 models, untied."""


def write_config(folder: Path, class_name: str, fields: dict[str, Any], *, tied: bool) -> Any:
    """Write ``config.json`` and return the configuration."""
    import transformers

    config = getattr(transformers, class_name)(**fields, tie_word_embeddings=tied)
    config.architectures = [class_name.replace("Config", "ForCausalLM")]
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    return config


def write_checkpoint(folder: Path, config: Any, seed: int) -> None:
    """Write random weights as a trainer's export would name them."""
    import torch
    import transformers

    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(folder)


def read_checkpoint(folder: Path) -> dict[str, Any]:
    """Tensors of a checkpoint by their names in the files; a tied one is stored once."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(path))
    return found


def qwen2_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of an untied Qwen2 checkpoint."""
    import torch
    import transformers

    with torch.device("meta"):
        config = transformers.Qwen2Config(**fields, tie_word_embeddings=False)
        model = transformers.Qwen2ForCausalLM(config)
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def random_weights(shapes: dict[str, tuple[int, ...]], seed: int) -> Iterator[tuple[str, Any]]:
    """Tensors on the GPU, one at a time."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(seed)
    for name, shape in shapes.items():
        if "norm" in name:
            yield name, torch.ones(shape, dtype=torch.bfloat16, device="cuda")
        else:
            tensor = torch.empty(shape, dtype=torch.bfloat16, device="cuda")
            yield name, tensor.normal_(0.0, 0.02, generator=generator)
