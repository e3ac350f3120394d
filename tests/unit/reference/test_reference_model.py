from __future__ import annotations

import torch

from nemo_rl_rlix.reference.model import KVCache, ModelConfig, ReferenceModel

SMALL = ModelConfig(vocab_size=32, width=32, layers=2, heads=4, hidden=48, max_len=48)


@torch.inference_mode()
def test_prefill_and_decode_agree_with_the_training_forward() -> None:
    model = ReferenceModel(SMALL, seed=3)
    tokens = torch.randint(0, 32, (3, 40), generator=torch.Generator().manual_seed(1))
    full = model(tokens)
    cache = KVCache(SMALL, slots=4)
    lengths = [5, 17, 30]  # a ragged batch
    for slot, length in enumerate(lengths):
        model.prefill(tokens[slot, : length // 2], 0, slot, cache)
        model.prefill(tokens[slot, length // 2 : length], length // 2, slot, cache)
    for step in range(10):
        positions = torch.tensor(lengths) + step
        fed = tokens[torch.arange(3), positions]
        logits = model.decode(fed, positions, int(positions.max()) + 1, cache)
        torch.testing.assert_close(logits, full[torch.arange(3), positions], atol=1e-4, rtol=1e-4)


def test_training_reaches_every_parameter_and_padding_changes_nothing() -> None:
    model = ReferenceModel(SMALL)
    tokens = torch.randint(0, 32, (2, 20))
    model(tokens).square().mean().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    padded = torch.cat([tokens, torch.zeros(2, 7, dtype=torch.int64)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(model(padded)[:, :20], model(tokens))


def test_ties_and_buffer_names() -> None:
    tied, untied = (
        ReferenceModel(SMALL),
        ReferenceModel(ModelConfig(vocab_size=32, width=32, tied_embeddings=False)),
    )
    assert tied.ties() == {"lm_head": "embed_tokens"} and untied.ties() == {}
    assert tied.lm_head is tied.embed_tokens
    assert "causal_bias" in dict(tied.named_buffers())
    assert "causal_bias" not in tied.state_dict()


def test_cache_extract_insert_move() -> None:
    cache = KVCache(SMALL, slots=3)
    for index, layer in enumerate(cache.layers):
        layer[0] = torch.arange(layer[0].numel()).view_as(layer[0]) + index
    cache.insert(1, cache.extract(0, 7))
    cache.move(1, 2, 5)
    for layer in cache.layers:
        assert torch.equal(layer[2, :5], layer[0, :5])
        assert not torch.equal(layer[2, 5:7], layer[0, 5:7])
    assert sum(layer.nbytes for layer in cache.layers) == KVCache.nbytes(SMALL, 3)
