"""Keys and values repeated for more query heads teach what grouped ones do, in double precision, packed and padded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import sdpa_attention

from surefit.model import compat, sdpa, varlen
from surefit.model.attention import pack_ids, use_varlen

CONFIG = {
    "vocab_size": 48, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8,
}  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sdpa_attention, "use_gqa_in_sdpa", compat._USE_GQA)


class Watched:
    """torch's attention, and the key heads of each call."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.heads: list[int] = []
        real = torch.nn.functional.scaled_dot_product_attention

        def watched(query: Any, key: Any, value: Any, **options: Any) -> Any:
            self.heads.append(key.shape[1])
            return real(query, key, value, **options)

        monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)


def learnt(model: Any, batch: dict[str, Any]) -> list[torch.Tensor]:
    model.zero_grad()
    logits = model(**batch, use_cache=False).logits
    weights = torch.sin(torch.arange(logits.numel(), dtype=torch.float64)).view_as(logits)
    (logits * weights).sum().backward()
    return [logits.detach(), *(p.grad.clone() for p in model.parameters())]


def model_of() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**CONFIG)).double().train()  # type: ignore[arg-type]


def both(monkeypatch: pytest.MonkeyPatch, model: Any, batch: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Grouped and repeated, with equal results; the key heads of each one's calls."""
    found, heads = [], []
    for repeated in (False, True):
        compat.repeat_heads_where(lambda key, value, repeated=repeated: repeated)  # type: ignore[misc]
        monkeypatch.setattr(varlen, "must_repeat_kv_heads", lambda key, value, repeated=repeated: repeated)
        with monkeypatch.context() as patched:
            watched = Watched(patched)
            found.append(learnt(model, batch))
        heads.append(watched.heads)
    for grouped, repeated_one in zip(*found, strict=True):
        torch.testing.assert_close(repeated_one, grouped, rtol=1e-11, atol=1e-12)
    return heads[0], heads[1]


def test_rows_of_equal_length(monkeypatch: pytest.MonkeyPatch) -> None:
    ids = torch.arange(34).view(2, 17)
    assert both(monkeypatch, model_of(), {"input_ids": ids}) == ([2, 2], [4, 4])


def test_padded_rows_are_repeated_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = torch.arange(34).view(2, 17), torch.ones(2, 17, dtype=torch.long)
    mask[1, 11:] = 0
    assert both(monkeypatch, model_of(), {"input_ids": ids, "attention_mask": mask}) == ([4, 4], [4, 4])


def test_packed_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float64,))
    model = model_of()
    use_varlen(model)
    batch = pack_ids([torch.arange(3, 12), torch.tensor([20]), torch.arange(30, 44)])
    assert both(monkeypatch, model, batch) == ([2] * 6, [4] * 6)


def test_on_a_cpu_nothing_is_repeated_that_was_not() -> None:
    sdpa.start_cuda()
    key = torch.empty(1, 2, 4, 8, dtype=torch.float16)
    assert not sdpa.must_repeat_kv_heads(key, key)
    assert sdpa_attention.use_gqa_in_sdpa(None, key, key)
    with sdpa.gpu_assumed((7, 5)):
        assert not sdpa_attention.use_gqa_in_sdpa(None, key, key)
    with sdpa.gpu_assumed((9, 0)):
        assert sdpa_attention.use_gqa_in_sdpa(None, key, key)
        assert not sdpa_attention.use_gqa_in_sdpa(torch.ones(1), key, key)


def test_the_question_as_an_older_transformers_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """5.17 has no values yet where it asks."""
    monkeypatch.setattr(compat, "_USE_GQA", lambda mask, key: mask is None)
    compat.repeat_heads_where(sdpa.must_repeat_kv_heads)
    ask: Any = sdpa_attention.use_gqa_in_sdpa
    key = torch.empty(1, 2, 4, 8, dtype=torch.float16)
    assert ask(None, key)
    with sdpa.gpu_assumed((7, 5)):
        assert not ask(None, key)


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)], ids=str)
def test_a_compiled_layer_is_captured_whole(capability: Any) -> None:
    """fullgraph: one break would be an error."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "num_hidden_layers": 1})).half()  # type: ignore[arg-type]
    ids = torch.arange(17)[None]
    torch.compiler.reset()
    compiled: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with sdpa.gpu_assumed(capability):
        torch.testing.assert_close(
            compiled(input_ids=ids, use_cache=False).logits, model(input_ids=ids, use_cache=False).logits
        )
