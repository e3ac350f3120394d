"""A small decoder-only transformer, trained and served by the same weights.

Pre-norm (RMSNorm), learned positions, fused qkv, SwiGLU, tied embeddings. At this
size a CPU spends its time on the overhead of each operation, so the serving path
works on whole slices of a preallocated cache and keeps their number low.

Shapes: ``B`` sequences, ``T`` positions, ``V`` vocabulary, ``D`` width, ``H`` heads,
``E = D / H``. Everything is float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NORM_EPS = 1e-6
GARBAGE = 1e3


@dataclass(frozen=True)
class ModelConfig:
    """Size of the model.

    Attributes:
        vocab_size: Number of tokens.
        width: Width of the residual stream; a multiple of ``heads``.
        layers: Number of blocks.
        heads: Attention heads.
        hidden: Width inside the SwiGLU.
        max_len: Most positions, prompt included.
        tied_embeddings: Whether the output projection is the embedding.
    """

    vocab_size: int = 96
    width: int = 64
    layers: int = 2
    heads: int = 4
    hidden: int = 192
    max_len: int = 256
    tied_embeddings: bool = True

    @property
    def head_width(self) -> int:
        """Width of one attention head."""
        return self.width // self.heads


class Block(nn.Module):
    """Attention and SwiGLU, each behind an RMSNorm and beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, hidden = config.width, config.hidden
        self.input_norm = nn.Parameter(torch.ones(width))
        self.qkv_proj = nn.Parameter(torch.empty(3 * width, width))
        self.o_proj = nn.Parameter(torch.empty(width, width))
        self.mlp_norm = nn.Parameter(torch.ones(width))
        self.gate_up_proj = nn.Parameter(torch.empty(2 * hidden, width))
        self.down_proj = nn.Parameter(torch.empty(width, hidden))

    def mlp(self, x: Tensor) -> Tensor:
        """Add the SwiGLU's output to ``x`` [..., D]."""
        normed = F.rms_norm(x, (x.shape[-1],), self.mlp_norm, NORM_EPS)
        gate, up = F.linear(normed, self.gate_up_proj).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, self.down_proj)

    def qkv(self, x: Tensor) -> Tensor:
        """Project ``x`` [..., D] to queries, keys and values [..., 3 D]."""
        return F.linear(F.rms_norm(x, (x.shape[-1],), self.input_norm, NORM_EPS), self.qkv_proj)


class KVCache:
    """Keys and values of ``slots`` sequences: one tensor [slots, max_len, 2, H, E] a layer."""

    def __init__(self, config: ModelConfig, slots: int) -> None:
        shape = (slots, config.max_len, 2, config.heads, config.head_width)
        # Unwritten memory is garbage on a device, so that reading it must show here too.
        # Not NaN: a masked position's value is still multiplied, by zero.
        self.layers = [torch.full(shape, GARBAGE) for _ in range(config.layers)]

    @staticmethod
    def nbytes(config: ModelConfig, slots: int) -> int:
        """Bytes that a cache of ``slots`` sequences takes."""
        return 4 * 2 * config.layers * slots * config.max_len * config.width

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` positions of one slot to another."""
        for layer in self.layers:
            layer[target, :length] = layer[source, :length]

    def extract(self, slot: int, length: int) -> Tensor:
        """Copy out [layers, length, 2, H, E]."""
        return torch.stack([layer[slot, :length] for layer in self.layers])

    def insert(self, slot: int, stored: Tensor) -> None:
        """Copy in what :meth:`extract` returned."""
        for layer, values in zip(self.layers, stored, strict=True):
            layer[slot, : values.shape[0]] = values


class ReferenceModel(nn.Module):
    """The transformer. ``causal_bias`` is a buffer that no state dict carries."""

    causal_bias: Tensor

    def __init__(self, config: ModelConfig, *, seed: int = 0) -> None:
        super().__init__()
        if config.width % config.heads:
            raise ValueError(
                f"width={config.width} is not a multiple of heads={config.heads}; change one"
            )
        self.config = config
        self.embed_tokens = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.embed_positions = nn.Parameter(torch.empty(config.max_len, config.width))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.Parameter(torch.ones(config.width))
        if config.tied_embeddings:
            self.lm_head = self.embed_tokens
        else:
            self.lm_head = nn.Parameter(torch.empty(config.vocab_size, config.width))
        self.register_buffer("causal_bias", causal_bias(config.max_len), persistent=False)
        self._initialise(seed)

    @torch.no_grad()
    def _initialise(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        residual = 0.02 / math.sqrt(2 * self.config.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 1:
                continue
            out = name.endswith(("o_proj", "down_proj"))
            scale = residual if out else 0.02 if "embed" in name else self.config.width**-0.5
            parameter.normal_(0.0, scale, generator=generator)

    def ties(self) -> dict[str, str]:
        """Tied name -> name under which the tensor is stored."""
        return {"lm_head": "embed_tokens"} if self.config.tied_embeddings else {}

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of every position, for training.

        Args:
            tokens: [B, T] int64. Padding goes to the right: no position looks ahead.

        Returns:
            [B, T, V] float32; position t predicts token t + 1.
        """
        batch, length = tokens.shape
        heads, head_width = self.config.heads, self.config.head_width
        x = F.embedding(tokens, self.embed_tokens) + self.embed_positions[:length]
        for block in self.blocks:
            assert isinstance(block, Block)
            q, k, v = block.qkv(x).view(batch, length, 3, heads, head_width).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).reshape(batch, length, -1), block.o_proj)
            x = block.mlp(x)
        return self._logits(x)

    def prefill(self, tokens: Tensor, start: int, slot: int, cache: KVCache) -> None:
        """Write keys and values of a run of one sequence.

        Args:
            tokens: [T] int64, the sequence's tokens from position ``start`` on.
            start: First position; all before it are in the cache already.
            slot: Slot of the sequence.
            cache: Cache to read and write.
        """
        length = tokens.shape[0]
        end = start + length
        bias = self.causal_bias[start:end, :end]
        x = F.embedding(tokens, self.embed_tokens) + self.embed_positions[start:end]
        last = len(self.blocks) - 1
        for index, (block, layer) in enumerate(zip(self.blocks, cache.layers, strict=True)):
            assert isinstance(block, Block)
            qkv = block.qkv(x).view(length, 3, self.config.heads, self.config.head_width)
            layer[slot, start:end] = qkv[:, 1:]
            if index == last:
                return  # The last layer's output predicts nothing that decode will not.
            mixed = F.scaled_dot_product_attention(
                qkv[:, 0].transpose(0, 1)[None],
                layer[slot : slot + 1, :end, 0].transpose(1, 2),
                layer[slot : slot + 1, :end, 1].transpose(1, 2),
                attn_mask=bias,
            )
            x = x + F.linear(mixed[0].transpose(0, 1).reshape(length, -1), block.o_proj)
            x = block.mlp(x)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int, cache: KVCache) -> Tensor:
        """Advance the sequences in slots 0 to n-1 by one token each.

        Args:
            tokens: [n] int64, the token at ``positions`` of each slot.
            positions: [n] int64; everything before is in the cache.
            longest: Largest of ``positions`` plus one.
            cache: Cache to read and write.

        Returns:
            Logits of the next token, [n, V].
        """
        count = tokens.shape[0]
        heads, head_width = self.config.heads, self.config.head_width
        rows = torch.arange(count)
        bias = self.causal_bias[positions, None, None, :longest]
        x = F.embedding(tokens, self.embed_tokens) + F.embedding(positions, self.embed_positions)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            assert isinstance(block, Block)
            qkv = block.qkv(x).view(count, 3, heads, head_width)
            layer[rows, positions] = qkv[:, 1:]
            mixed = F.scaled_dot_product_attention(
                qkv[:, 0].unsqueeze(2),
                layer[:count, :longest, 0].transpose(1, 2),
                layer[:count, :longest, 1].transpose(1, 2),
                attn_mask=bias,
            )
            x = x + F.linear(mixed.reshape(count, -1), block.o_proj)
            x = block.mlp(x)
        return self._logits(x)

    def _logits(self, x: Tensor) -> Tensor:
        return F.linear(
            F.rms_norm(x, (self.config.width,), self.final_norm, NORM_EPS), self.lm_head
        )


def causal_bias(max_len: int) -> Tensor:
    """0 where a position may look, -inf ahead of it; [max_len, max_len]."""
    return torch.full((max_len, max_len), -math.inf).triu(1)
