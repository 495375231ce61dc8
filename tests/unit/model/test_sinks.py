"""Attention sinks beside a kernel that knows none: the formula's result and gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from transformers import AutoModelForCausalLM, GptOssConfig

from surefit.model import varlen
from surefit.model.attention import pack_ids, packing_disagreement, require_packable, use_varlen
from surefit.model.sdpa import gpu_assumed
from surefit.model.varlen import Formula, PackedDocuments, counting_attention

SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float64)
WHOLE = PackedDocuments(torch.tensor([0, 7, 8, 13], dtype=torch.int32), (7, 1, 5), 7)
LAST = PackedDocuments(torch.tensor([0, 2, 3, 6], dtype=torch.int32), (2, 1, 3), 3)


def attended(attend: Any, queries: PackedDocuments, window: int | None, trained: bool) -> list[torch.Tensor | None]:
    """The result of (4 heads over 2) and the gradients of queries, keys, values and sinks."""
    torch.manual_seed(0)
    given = [
        torch.randn(1, heads, tokens, 16, dtype=torch.float64, requires_grad=True)
        for heads, tokens in ((4, sum(queries.lengths or ())), (2, 13), (2, 13))
    ]
    sinks = SINKS.clone().requires_grad_(trained)
    out = attend(*given, queries, WHOLE, Formula(0.3, window, None, sinks, 0.0))
    out.pow(3).sum().backward()
    return [out.detach(), *(tensor.grad for tensor in given), sinks.grad]


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("queries", [WHOLE, LAST], ids=["all", "the last of each document"])
def test_result_and_gradients_are_the_formula_s(queries: PackedDocuments, window: int | None, trained: bool) -> None:
    found = attended(varlen._varlen, queries, window, trained)
    expected = attended(varlen._exact_per_document, queries, window, trained)  # its logits are float32
    for mine, theirs in zip(found, expected, strict=True):
        if theirs is None:
            assert mine is None
            continue
        assert mine is not None
        torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def test_without_sinks_the_result_is_another() -> None:
    torch.manual_seed(0)
    given = [torch.randn(1, heads, 13, 16) for heads in (4, 2, 2)]
    without, beside = (
        varlen._varlen(*given, WHOLE, WHOLE, Formula(0.3, None, None, sinks, 0.0)) for sinks in (None, SINKS)
    )
    assert (without - beside).norm() > 0.1 * without.norm()


GPT_OSS = GptOssConfig(
    vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=4, pad_token_id=0,
)  # fmt: skip


def gpt_oss() -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(GPT_OSS, attn_implementation="eager").eval()
    use_varlen(model)
    for layer in model.model.layers:
        layer.self_attn.sinks.data.normal_()
    return model


def test_gpt_oss_is_packed_in_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own proof holds: packed in the kernel, documents are read as transformers' own attention reads them alone."""
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))
    with gpu_assumed(), counting_attention() as calls:
        require_packable(gpt_oss())
        gpt_oss()(**pack_ids([torch.arange(5), torch.arange(9)]), use_cache=False)
    assert (calls.kernel, calls.exact) == (2, 0), "the proof counts by itself"


def test_the_proof_would_see_forgotten_sinks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))
    monkeypatch.setattr(varlen._WithSinks, "apply", lambda q, k, v, sinks, *rest: varlen.varlen_attn(
        q, k, v, *rest[:4], scale=rest[4], window_size=rest[5], enable_gqa=True
    ))  # fmt: skip
    with gpu_assumed():
        assert "off by" in (packing_disagreement(gpt_oss()) or "")
