"""A preallocated cache holds what transformers' own holds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, MistralConfig

from surefit.generate.cache import STEP, preallocated_cache

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32}


def _model(config: object) -> SimpleNamespace:
    def forward(past_key_values: object) -> None: ...

    return SimpleNamespace(config=config, forward=forward, _supports_default_dynamic_cache=lambda: True)


def test_a_model_that_takes_no_cache_gets_none() -> None:
    """The first GPT's `forward` has no `past_key_values`: it reads all tokens each time."""
    model = _model(LlamaConfig(**SIZES))  # type: ignore[arg-type]
    model.forward = lambda input_ids: None
    assert preallocated_cache(model, 16) is None


@pytest.mark.parametrize("limit", [5, 2 * STEP + 10])
def test_it_holds_the_same_states(limit: int) -> None:
    config = LlamaConfig(**SIZES)  # type: ignore[arg-type]
    cache, expected = preallocated_cache(_model(config), limit), DynamicCache(config=config)
    assert cache is not None
    generator = torch.Generator().manual_seed(0)
    for tokens in (4, *(2 * STEP + 3) * [1]):
        keys, values = torch.randn(2, 2, 3, tokens, 8, generator=generator).unbind()
        for layer in range(2):
            states, own = cache.update(keys, values, layer), expected.update(keys, values, layer)
            assert all(torch.equal(a, b) for a, b in zip(states, own, strict=True))
        assert cache.get_seq_length() == expected.get_seq_length()


def test_a_sliding_window_keeps_its_own_cache() -> None:
    config = MistralConfig(**SIZES, sliding_window=8)  # type: ignore[arg-type]
    assert preallocated_cache(_model(config), 16) is None
