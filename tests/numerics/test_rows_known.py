"""transformers is told what a micro batch is like: it builds the masks that it would, and reads no tensor for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig

from surefit.data.tokens.collate import Item, collate, collate_packed
from surefit.model.compat import avoid_mask_syncs
from surefit.train.loss import loss_sum

SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "num_hidden_layers": 2, "pad_token_id": 0,
}  # fmt: skip
KINDS = ["sliding_attention", "full_attention"]
MODELS: dict[str, PretrainedConfig] = {
    "one mask": LlamaConfig(**SIZES),
    "short windows": Gemma3TextConfig(**SIZES, layer_types=KINDS, sliding_window=3),
    "long windows": Gemma3TextConfig(**SIZES, layer_types=KINDS, sliding_window=64),
}


def items(*lengths: int) -> list[Item]:
    generator = np.random.default_rng(0)
    rows = [generator.integers(1, 64, length) for length in lengths]
    return [(row, row.astype(np.int64)) for row in rows]


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "padded": lambda: collate(items(7, 4, 5), 0),
    "equal": lambda: collate(items(6, 6), 0),
    "packed": lambda: collate_packed(items(7, 4, 5)),
    "one document": lambda: collate_packed(items(9)),
}


class Reads(TorchDispatchMode):
    """Counts the values that are read out of tensors: on a GPU each of them waits."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func._overloadpacket.__name__ == "_local_scalar_dense"
        return func(*args, **kwargs or {})


def model_of(name: str, attention: str) -> torch.nn.Module:
    torch.manual_seed(0)
    model: torch.nn.Module = AutoModelForCausalLM.from_config(MODELS[name], attn_implementation=attention)
    return model.train()


def step(model: torch.nn.Module, batch: dict[str, Any]) -> tuple[list[torch.Tensor], int]:
    """The loss and every gradient, and how many values the forward pass read."""
    with Reads() as reads:
        loss = loss_sum(model, batch, chunked=True)
    loss.backward()
    found = [loss.detach(), *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
    return [tensor.clone() for tensor in found], reads.count


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("rows", BATCHES)
@pytest.mark.parametrize("name", MODELS)
def test_the_gradients_are_the_same_and_nothing_is_read(
    name: str, rows: str, attention: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, reads = step(model_of(name, attention), BATCHES[rows]())
    monkeypatch.setattr("surefit.train.loss.avoid_mask_syncs", lambda batch: nullcontext())
    untold, asked = step(model_of(name, attention), BATCHES[rows]())
    assert reads == 0
    assert asked > 0 or attention == "eager" or (rows, name) == ("padded", "short windows")
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(told, untold, strict=True))


@pytest.mark.parametrize("rows", ["padded", "equal", "packed"])
def test_other_rows_are_asked_as_ever(rows: str) -> None:
    """A batch of another shape inside, such as that of an assistant: nothing that is known holds of it."""
    model = model_of("one mask", "sdpa").eval()
    other = BATCHES[rows]()
    inputs = {name: other[name] for name in ("input_ids", "attention_mask", "position_ids") if name in other}
    with torch.no_grad():
        expected = model(**inputs, use_cache=False).logits
        for known in ({"padded": True}, {"padded": False}, {"document_lengths": (2, 3)}):
            with avoid_mask_syncs({"input_ids": torch.zeros(1, 5, dtype=torch.int64), **known}):
                assert torch.equal(model(**inputs, use_cache=False).logits, expected)
