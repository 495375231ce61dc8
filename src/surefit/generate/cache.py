"""A key-value cache that is allocated for many tokens at once.

transformers' `DynamicCache` concatenates: each new token copies all keys and values of the batch (transformers 5.23,
`DynamicLayer.update`). Here a token is written into memory that was allocated before, and the layer's keys and
values are views of what is filled: the same numbers, so the same tokens.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

STEP = 64
"""Tokens that a full layer is enlarged by."""


class PreallocatedLayer(DynamicLayer):
    """A layer that grows by `STEP` tokens, at most to a limit.

    Args:
        limit: tokens of the prompt and the longest answer.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._limit = limit
        self._buffers: list[torch.Tensor] = []

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the states of new tokens, and return those of all."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start = self.get_seq_length()
        end = start + key_states.shape[-2]
        if not self._buffers or end > self._buffers[0].shape[-2]:
            self._buffers = [
                self._enlarged(old, new, start, end)
                for old, new in ((self.keys, key_states), (self.values, value_states))
            ]
        for buffer, new in zip(self._buffers, (key_states, value_states), strict=True):
            buffer[..., start:end, :] = new
        self.keys, self.values = (buffer[..., :end, :] for buffer in self._buffers)
        return self.keys, self.values

    def _enlarged(self, old: torch.Tensor | None, new: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """Return a buffer for more tokens than `end`, with the first `start` of the old states."""
        size = max(end, min(self._limit, end + STEP))
        buffer = new.new_empty((*new.shape[:-2], size, new.shape[-1]))
        if start and old is not None:
            buffer[..., :start, :] = old
        return buffer


def preallocated_cache(model: Any, limit: int) -> DynamicCache | None:
    """Return an empty cache for a model; None where one of its layers is no plain one (sliding windows, state spaces),
    for which transformers makes a cache of its own.

    Args:
        limit: tokens of the prompt and the longest answer.
    """
    inner = model.get_base_model() if hasattr(model, "get_base_model") else model
    if "mamba" in type(inner).__name__.lower() or not inner._supports_default_dynamic_cache():
        return None
    if "past_key_values" not in inspect.signature(inner.forward).parameters:  # the first GPT reads all tokens each time
        return None
    cache = DynamicCache(config=inner.config.get_text_config(decoder=True))
    if not cache.layers or any(type(layer) is not DynamicLayer for layer in cache.layers):
        return None
    cache.layers = [PreallocatedLayer(limit) for _ in cache.layers]
    return cache
