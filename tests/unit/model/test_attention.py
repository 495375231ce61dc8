"""torch_varlen: what it refuses, where it finds documents, which arithmetic it takes, and how it is chosen."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from peft import LoraConfig, get_peft_model
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaConfig, LlamaForCausalLM

from surefit.core.errors import MachineError, ModelError
from surefit.model import attention, varlen
from surefit.model.attention import (
    NAME,
    counting_attention,
    pack_ids,
    require_packable,
    resolve_attention,
    use_varlen,
)
from surefit.model.sdpa import gpu_assumed
from surefit.model.varlen import varlen_attention

DOCUMENTS = [torch.arange(3, 10), torch.tensor([11]), torch.arange(20, 25)]


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape |= {"num_key_value_heads": 2, "vocab_size": 64}
    config = LlamaConfig(**{**shape, **changes}, initializer_range=0.15)
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def model() -> LlamaForCausalLM:
    made = llama()
    use_varlen(made)
    return made


def qkv(*shape: int, kv_heads: int = 2, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    batch, heads, length, width = shape
    torch.manual_seed(0)
    return [torch.randn(batch, n, length, width, dtype=dtype) for n in (heads, kv_heads, kv_heads)]


def attend(*tensors: torch.Tensor, **arguments: Any) -> torch.Tensor:
    return varlen_attention(torch.nn.Module(), *tensors, None, **arguments)[0]


# -- refusing ---------------------------------------------------------------------------------------------------------


def test_a_padded_batch_is_refused_never_attended_to(model: LlamaForCausalLM) -> None:
    ids = torch.ones(2, 5, dtype=torch.int64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
    with pytest.raises(ModelError, match="torch_varlen received a padded batch"):
        model(ids, attention_mask=mask, use_cache=False)


def test_rows_without_padding_are_documents(model: LlamaForCausalLM) -> None:
    ids = torch.arange(3, 23).view(2, 10)
    found = model(ids, attention_mask=torch.ones_like(ids), use_cache=False).logits
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(found, model(ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"is_causal": False}, "both directions"), ({"position_bias": torch.zeros(1, 4, 6, 6)}, "a bias")],
)
def test_attention_that_it_is_not_is_refused(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says):
        attend(*qkv(1, 4, 6, 8), **arguments)


def test_a_mask_the_model_made_itself_is_refused() -> None:
    with pytest.raises(ModelError, match="its own mask"):
        varlen_attention(torch.nn.Module(), *qkv(1, 4, 6, 8), torch.zeros(1, 1, 6, 6))


def test_documents_that_do_not_fill_the_row_are_refused() -> None:
    with pytest.raises(ModelError, match="5 tokens, but the batch has 6"):
        attend(*qkv(1, 4, 6, 8), document_lengths=(2, 3), max_length_q=3, cu_seq_lens_q=torch.tensor([0, 2, 5]))


@pytest.mark.parametrize("rows", [1, 2])
def test_it_generates_as_sdpa_does_where_nothing_is_padded(rows: int, model: LlamaForCausalLM) -> None:
    prompt = torch.arange(3, 3 + 6 * rows).view(rows, 6)
    settings = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    found = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
    model.set_attn_implementation("sdpa")
    assert torch.equal(found, model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings))


# -- finding documents ------------------------------------------------------------------------------------------------


def test_documents_are_found_by_lengths_by_starts_and_by_positions(model: LlamaForCausalLM) -> None:
    batch = pack_ids(DOCUMENTS)
    expected = model(**batch, use_cache=False).logits
    for names in (["cu_seq_lens_q", "max_length_q"], ["cu_seq_lens_q"], []):
        some = {name: batch[name] for name in ("input_ids", "position_ids", *names)}
        assert torch.equal(model(**some, use_cache=False).logits, expected), names


def test_documents_are_found_in_inference_mode(model: LlamaForCausalLM) -> None:
    batch = pack_ids(DOCUMENTS)
    expected = model(**batch, use_cache=False).logits
    with torch.inference_mode():
        batch = pack_ids(DOCUMENTS)
        found = model(batch["input_ids"], position_ids=batch["position_ids"], use_cache=False).logits
    assert torch.equal(found, expected)


def test_the_borders_are_read_once_per_batch_and_not_once_per_layer(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda tensor: asked.append(tensor) or real(tensor))
    batch = pack_ids(DOCUMENTS)
    del batch["document_lengths"]
    model(**batch, use_cache=False)
    assert len(asked) == 1
    batch["cu_seq_lens_q"].copy_(torch.tensor([0, 4, 8, 13]))  # the same tensor with other borders is read again
    model(**batch, use_cache=False)
    assert len(asked) == 2
    asked.clear()
    model(**pack_ids(DOCUMENTS), use_cache=False)
    assert not asked, "the lengths came with the batch"


def test_several_packed_rows_are_told_apart_by_their_positions() -> None:
    tensors = qkv(2, 4, 6, 8)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 2, 3, 0, 1]])
    found = attend(*tensors, position_ids=positions)
    spans = [(0, 0, 3), (0, 3, 6), (1, 0, 4), (1, 4, 6)]
    for row, start, end in spans:
        alone = attend(*(tensor[row : row + 1, :, start:end] for tensor in tensors))
        torch.testing.assert_close(found[row, start:end], alone[0])


# -- the arithmetic ---------------------------------------------------------------------------------------------------


def by_hand(tensors: list[torch.Tensor], window: int | None, softcap: float | None, sinks: Any) -> torch.Tensor:
    """Number by number, in double precision."""
    query, key, value = (tensor[0].double() for tensor in tensors)
    heads, length, width = query.shape
    result = torch.zeros(length, heads, value.shape[-1], dtype=torch.float64)
    for head in range(heads):
        shared = head // (heads // key.shape[0])
        for position in range(length):
            first = max(0, position - window + 1) if window else 0
            logits = [
                float(query[head, position] @ key[shared, at]) / math.sqrt(width) for at in range(first, position + 1)
            ]
            if softcap:
                logits = [softcap * math.tanh(logit / softcap) for logit in logits]
            total = sum(math.exp(logit) for logit in logits) + (
                math.exp(float(sinks[head])) if sinks is not None else 0
            )
            for at, logit in enumerate(logits, first):
                result[position, head] += math.exp(logit) / total * value[shared, at]
    return result


@pytest.mark.parametrize("window", [None, 1, 3, 50])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])], ids=["", "sinks"])
def test_it_is_attention(window: int | None, softcap: float | None, sinks: torch.Tensor | None) -> None:
    tensors = qkv(1, 4, 7, 8)
    found = attend(*tensors, sliding_window=window, softcap=softcap, s_aux=sinks)
    torch.testing.assert_close(found[0].double(), by_hand(tensors, window, softcap, sinks), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 30.0])
def test_dropout_is_honoured(softcap: float | None) -> None:
    """With the kernel's other conditions met: it has none. In expectation dropout changes nothing."""
    query, key, value = qkv(1, 4, 12, 8, dtype=torch.bfloat16)
    value = torch.ones_like(value)
    with gpu_assumed(), counting_attention() as calls:
        found = torch.stack([attend(query, key, value, dropout=0.5, softcap=softcap) for _ in range(300)]).float()
    assert calls.kernel == 0
    assert found.std() > 0.1
    assert found.mean() == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, True),
        ({"dtype": torch.float16}, True),
        ({"dtype": torch.float32}, False),
        ({"width": 12}, False),
        ({"width": 256}, True),
        ({"width": 264}, False),
        ({"softcap": 20.0}, False),
        ({"s_aux": torch.zeros(4)}, True),
        ({"dropout": 0.1}, False),
        ({"sliding_window": 3}, True),
    ],
)
def test_which_calls_the_kernel_takes(change: dict[str, Any], kernel: bool) -> None:
    width, dtype = change.pop("width", 16), change.pop("dtype", torch.bfloat16)
    with gpu_assumed(), counting_attention() as calls:
        attend(*qkv(1, 4, 6, width, dtype=dtype), **change)
    assert (calls.kernel, calls.exact) == ((1, 0) if kernel else (0, 1))


def test_without_the_assumption_a_cpu_takes_no_kernel() -> None:
    with counting_attention() as calls:
        attend(*qkv(1, 4, 6, 16, dtype=torch.bfloat16))
    assert (calls.kernel, calls.exact) == (0, 1)


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["kernel", "one at a time"])
def test_a_plan_runs_it_on_tensors_without_data(dtype: torch.dtype, sinks: bool) -> None:
    with FakeTensorMode(), gpu_assumed(), counting_attention() as calls:
        tensors = [tensor.to(dtype).requires_grad_() for tensor in qkv(1, 4, 13, 8)]
        beside = {"s_aux": torch.zeros(4, dtype=dtype)} if sinks else {}
        starts = torch.empty(4, dtype=torch.int32)
        result = attend(*tensors, cu_seq_lens_q=starts, max_length_q=7, document_lengths=(7, 1, 5), **beside)
        result.sum().backward()
    assert result.shape == (1, 13, 4, 8)
    assert [tensor.grad.shape for tensor in tensors] == [tensor.shape for tensor in tensors]
    assert calls.kernel == (dtype is torch.bfloat16)


def test_the_kernel_is_captured_whole_by_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """fullgraph: one break would be an error. The second batch, with other borders, runs what the first compiled."""
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))
    model = llama(num_hidden_layers=1)
    use_varlen(model)
    layer: Any = torch.compile(model, backend="aot_eager", fullgraph=True)
    with gpu_assumed():
        for parts in (DOCUMENTS, DOCUMENTS[::-1]):
            batch = pack_ids(parts)
            torch.testing.assert_close(layer(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits)


@pytest.mark.slow
def test_one_document_at_a_time_compiles_with_breaks() -> None:
    model = llama(num_hidden_layers=1)
    use_varlen(model)
    compiled: Any = torch.compile(model, backend="aot_eager")
    batch = pack_ids(DOCUMENTS)
    torch.testing.assert_close(compiled(**batch, use_cache=False).logits, model(**batch, use_cache=False).logits)


# -- choosing ---------------------------------------------------------------------------------------------------------

LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_attention_heads": 16}


@pytest.mark.parametrize(
    ("requested", "packed", "capability", "dtype", "name", "reason"),
    [
        ("auto", True, (9, 0), "bfloat16", NAME, "kernel"),
        ("auto", True, (7, 5), "float16", NAME, "one document at a time: compute capability 7.5"),
        ("auto", True, None, "float32", NAME, "one document at a time: no GPU"),
        ("auto", True, (8, 0), "float32", NAME, "not in float32"),
        ("auto", False, (9, 0), "bfloat16", "sdpa", "torch"),
        ("sdpa", True, (9, 0), "bfloat16", "sdpa", "dense mask"),
        ("eager", False, None, "float32", "eager", "set in the config"),
        (NAME, True, (8, 6), "bfloat16", NAME, "kernel"),
    ],
)
def test_what_is_chosen_and_why(
    requested: str, packed: bool, capability: Any, dtype: str, name: str, reason: str
) -> None:
    chosen = resolve_attention(requested, packed=packed, dtype=dtype, capability=capability, config=LLAMA)
    assert chosen.name == name
    assert reason in chosen.reason


def test_a_softcap_is_left_to_the_formula_and_sinks_only_of_padded_rows() -> None:
    gemma = {**LLAMA, "model_type": "gemma2"}
    packed = resolve_attention("auto", packed=True, dtype="bfloat16", capability=(9, 0), config=gemma)
    assert packed == (
        NAME,
        "one document at a time: a softcap of 50 in the attention, which the kernel does not support",
    )
    alone = resolve_attention("auto", packed=False, dtype="bfloat16", capability=(9, 0), config=gemma)
    assert alone.name == "eager"
    gpt_oss = {**LLAMA, "model_type": "gpt_oss"}
    packed = resolve_attention("auto", packed=True, dtype="bfloat16", capability=(9, 0), config=gpt_oss)
    assert packed == (NAME, "torch's variable-length kernel")
    alone = resolve_attention("auto", packed=False, dtype="bfloat16", capability=(9, 0), config=gpt_oss)
    assert alone.name == "eager"


@pytest.mark.parametrize(
    ("name", "capability", "dtype", "says"),
    [
        ("flash_attention_2", (8, 0), "bfloat16", "is not installed"),
        ("flash_attention_2", None, "bfloat16", "needs a GPU of compute capability 8.0"),
        ("flash_attention_3", (8, 0), "bfloat16", "needs a GPU of compute capability 9.0"),
        ("flash_attention_2", (8, 0), "float32", "not in float32"),
    ],
)
def test_flash_attention_is_refused_where_it_cannot_run_and_never_downloaded(
    name: str, capability: Any, dtype: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention.FLASH, name, (lambda: False, attention.FLASH[name][1]))
    with pytest.raises(MachineError, match=says):
        resolve_attention(name, packed=True, dtype=dtype, capability=capability, config=LLAMA)


def test_flash_attention_3_is_taken_on_hopper_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(attention.FLASH, "flash_attention_3", (lambda: True, (9, 0)))
    for requested in ("auto", "flash_attention_3"):
        chosen = resolve_attention(requested, packed=True, dtype="bfloat16", capability=(9, 0), config=LLAMA)
        assert chosen.name == "flash_attention_3"
    asked = resolve_attention(NAME, packed=True, dtype="bfloat16", capability=(9, 0), config=LLAMA)
    assert asked.name == NAME


def test_flash_attention_is_refused_for_sinks_for_which_a_kernel_would_be_downloaded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(attention.FLASH, "flash_attention_2", (lambda: True, (8, 0)))
    gpt_oss = {**LLAMA, "model_type": "gpt_oss"}
    with pytest.raises(ModelError, match="sinks"):
        resolve_attention("flash_attention_2", packed=True, dtype="bfloat16", capability=(9, 0), config=gpt_oss)


def test_packing_what_cannot_be_packed_and_varlen_without_packing_are_refused() -> None:
    with pytest.raises(ModelError, match="mamba cannot be packed"):
        resolve_attention("auto", packed=True, dtype="float32", capability=None, config={"model_type": "mamba"})
    with pytest.raises(ModelError, match="supports packed batches only"):
        resolve_attention(NAME, packed=False, dtype="float32", capability=None, config=LLAMA)


def test_it_is_set_on_an_adapted_model_and_not_written_with_it(tmp_path: Path) -> None:
    adapted = get_peft_model(llama(), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).train()
    use_varlen(adapted)
    require_packable(adapted)
    assert adapted.training
    assert adapted.get_base_model().config._attn_implementation == NAME
    adapted.get_base_model().config.save_pretrained(tmp_path)
    assert NAME not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_16_bits_is_not_taken_for_documents_that_mix(dtype: torch.dtype) -> None:
    model = llama().to(dtype)
    use_varlen(model)
    require_packable(model)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
def test_the_gpus_kernel_gives_what_one_document_at_a_time_gives(window: int | None, sinks: bool) -> None:
    tensors = [tensor.cuda().requires_grad_() for tensor in qkv(1, 4, 13, 64, dtype=torch.bfloat16)]
    if sinks:
        tensors.append(torch.tensor([0.5, -1.0, 2.0, 0.0], device="cuda", dtype=torch.bfloat16, requires_grad=True))
    batch = {name: pack_ids(DOCUMENTS)[name] for name in ("cu_seq_lens_q", "max_length_q", "document_lengths")}
    batch["cu_seq_lens_q"] = batch["cu_seq_lens_q"].cuda()
    with counting_attention() as calls:
        found = attend(*tensors[:3], **batch, sliding_window=window, s_aux=tensors[3] if sinks else None)
    assert calls.kernel == 1
    precise = [tensor.detach().float().requires_grad_() for tensor in tensors]
    expected = attend(*precise[:3], **batch, sliding_window=window, s_aux=precise[3] if sinks else None)
    torch.testing.assert_close(found.float(), expected, rtol=2e-2, atol=2e-2)
    found.float().square().sum().backward()
    expected.square().sum().backward()
    for tensor, exact in zip(tensors, precise, strict=True):
        torch.testing.assert_close(tensor.grad.float(), exact.grad, rtol=5e-2, atol=5e-2)
