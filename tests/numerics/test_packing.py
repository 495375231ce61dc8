"""Packed documents teach what they teach alone: the same loss and gradients, in every family that can be packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import varlen_on_cpu  # noqa: F401 (registers the kernel)
from peft import LoraConfig, get_peft_model
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from surefit.core.errors import ModelError
from surefit.data.tokens.collate import collate_packed
from surefit.data.tokens.shared_prompts import collate_shared
from surefit.facts.attention import packing_obstacle, shares_prompts
from surefit.model import attention, varlen
from surefit.model.attention import (
    counting_attention,
    require_packable,
    require_shareable_prompts,
    use_varlen,
)
from surefit.model.compat import checkpoint_activations
from surefit.model.sdpa import gpu_assumed

LENGTHS = (9, 1, 14, 2, 6)
"""Longer than the windows below, and as short as a document can be."""
VOCABULARY = 64
COMMON: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.15,
}  # fmt: skip
WIDE = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 16, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "mixtral": {"num_local_experts": 4, "sliding_window": 5},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": WIDE,
    "qwen3_moe": {**WIDE, **EXPERTS},
    "gemma": WIDE,
    "gemma2": {**WIDE, "sliding_window": 4, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**WIDE, "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "phi": {},
    "phi3": {"sliding_window": 5},
    "olmo2": {},
    "olmo3": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere": {},
    "cohere2": {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]},
    "granite": {},
    "gpt_oss": {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4},
    "starcoder2": {"sliding_window": 4},
    "stablelm": {},
    "gpt_neox": {},
    "gpt2": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "smollm3": WIDE,
    "glm4": WIDE,
    "nemotron": {},
    "exaone4": {**WIDE, "sliding_window": 4},
    "deepseek_v3": LATENT,
}
WITHOUT_SDPA = {"gemma2", "gpt_oss", "opt"}
"""transformers' own packed mask: sdpa knows no softcap and no sinks, and OPT builds its mask without the positions."""
BY_POSITIONS = ("input_ids", "position_ids", "loss_rows", "targets")


def build(family: str) -> PreTrainedModel:
    """The family's model, small, with weights wide enough that documents which read each other would show."""
    config = CONFIG_MAPPING[family](**{**COMMON, **FAMILIES.get(family, {})})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_()
    return model


def documents() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCABULARY, (length,), generator=generator) for length in LENGTHS]


def learnt(model: torch.nn.Module, batches: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """The summed cross-entropy over every token but the first of a document, under "loss"; and all gradients of it."""
    model.zero_grad()
    total = torch.zeros(())
    for batch in batches:
        inputs = {name: value for name, value in batch.items() if name not in ("labels", "loss_rows", "targets")}
        logits = model(**inputs, use_cache=False).logits[0]
        loss = F.cross_entropy(logits[batch["loss_rows"]], batch["targets"], reduction="sum")
        loss.backward()
        total += loss.detach()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": total, **gradients}


def alone(model: torch.nn.Module, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    rows = [torch.arange(len(part) - 1) for part in parts]
    batches = [{"input_ids": part[None], "loss_rows": row} for part, row in zip(parts, rows, strict=True)]
    return learnt(model, [{**batch, "targets": part[1:]} for batch, part in zip(batches, parts, strict=True)])


def packed(model: torch.nn.Module, parts: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return learnt(model, [packed_batch(parts)])


def packed_batch(parts: list[torch.Tensor]) -> dict[str, Any]:
    return collate_packed([(part.numpy(), part.numpy()) for part in parts])


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], bound: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        error = float((found[name] - tensor).abs().max())
        assert error <= bound * max(1.0, float(tensor.abs().max())), f"{name} is off by {error:.1e}"


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_documents_teach_what_they_teach_alone(family: str) -> None:
    model, parts = build(family), documents()
    expected = alone(model, parts)
    if family not in WITHOUT_SDPA:
        model.set_attn_implementation("sdpa")
        batch = packed_batch(parts)
        assert_same(learnt(model, [{name: batch[name] for name in BY_POSITIONS}]), expected)
    use_varlen(model)
    require_packable(model)
    with counting_attention() as calls:
        assert_same(packed(model, parts), expected)
    assert (calls.exact, calls.kernel) == (model.config.num_hidden_layers, 0)
    assert calls.windows == {window for window in [FAMILIES[family].get("sliding_window")] if window}


PROMPT, ANSWERS = 9, (3, 12)
"""Longer than the windows above; an answer shorter and one longer than the prompt: they are computed differently."""


def pair_items(order: int = 1) -> list[tuple[Any, Any]]:
    generator = torch.Generator().manual_seed(2)
    prompt, *answers = (torch.randint(3, VOCABULARY, (n,), generator=generator) for n in (PROMPT, *ANSWERS[::order]))
    parts = [torch.cat([prompt, answer]) for answer in answers]
    return [(part.numpy(), torch.cat([torch.full_like(prompt, -100), part[PROMPT:]]).numpy()) for part in parts]


def answers_alone(model: torch.nn.Module, items: list[tuple[Any, Any]]) -> dict[str, torch.Tensor]:
    parts = [torch.as_tensor(ids) for ids, _ in items]
    rows = [torch.arange(PROMPT - 1, len(part) - 1) for part in parts]
    return learnt(
        model,
        [{"input_ids": p[None], "loss_rows": row, "targets": p[PROMPT:]} for p, row in zip(parts, rows, strict=True)],
    )


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("order", [1, -1], ids=["the longer answer second", "first"])
def test_two_answers_behind_one_prompt_teach_what_they_teach_alone(family: str, order: int) -> None:
    model, items = build(family), pair_items(order) + pair_items(-order)
    expected = answers_alone(model, items)
    use_varlen(model)
    require_packable(model)
    if not shares_prompts(model.config.to_dict()):
        with pytest.raises(ModelError) as error:
            require_shareable_prompts(model)
        assert error.value.field == "speed.shared_prompts"
        assert family in ("stablelm", "nemotron")
        return
    require_shareable_prompts(model)
    batch = collate_shared(items)
    assert batch["input_ids"].shape == (1, 2 * (PROMPT + sum(ANSWERS)))
    with counting_attention() as calls:
        assert_same(learnt(model, [batch]), expected)
    assert (calls.exact, calls.kernel) == (model.config.num_hidden_layers, 0)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v3", "qwen3_moe"])
def test_the_kernel_gets_the_keys_of_a_shared_prompt_again(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, items = build(family), pair_items()
    expected = answers_alone(model, items)
    use_varlen(model)
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))
    with gpu_assumed(), counting_attention() as calls:
        assert_same(learnt(model, [collate_shared(items)]), expected)
    assert (calls.kernel, calls.exact) == (model.config.num_hidden_layers, 0)


def test_it_holds_for_shared_prompts_under_gradient_checkpointing() -> None:
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    torch.manual_seed(3)
    model, items = get_peft_model(build("llama"), config).train(), pair_items()
    expected = answers_alone(model, items)
    use_varlen(model)
    checkpoint_activations(model)
    assert_same(learnt(model, [collate_shared(items)]), expected)


@pytest.mark.parametrize("lost", ["key_order", "position_ids"])
def test_a_model_that_loses_what_shared_prompts_need_is_refused(lost: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the order of the keys the second answer reads itself alone; without positions it begins anywhere."""
    model = build("llama")
    use_varlen(model)
    require_shareable_prompts(model)
    whole = attention.share_prompt_ids

    def losing(*given: Any) -> dict[str, Any]:
        arguments = whole(*given)
        counted_on = torch.arange(arguments["input_ids"].numel())[None]
        return arguments | ({"position_ids": counted_on} if lost == "position_ids" else {})

    monkeypatch.setattr(attention, "share_prompt_ids", losing)
    if lost == "key_order":
        inner = varlen.varlen_attention
        monkeypatch.setitem(
            AttentionInterface._global_mapping, attention.NAME,
            lambda *args, key_order=None, **kwargs: inner(*args, **kwargs),
        )  # fmt: skip
    with pytest.raises(ModelError) as error:
        require_shareable_prompts(model)
    assert error.value.field == "speed.shared_prompts"


def test_documents_that_read_each_other_would_be_seen() -> None:
    model, parts = build("llama"), documents()
    expected = alone(model, parts)
    batch = packed_batch(parts)
    found = learnt(model, [{name: batch[name] for name in ("input_ids", "loss_rows", "targets")}])
    with pytest.raises(AssertionError, match="off by"):
        assert_same(found, expected, bound=1e-2)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_it_holds_under_lora_and_gradient_checkpointing(family: str) -> None:
    parts = documents()
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], init_lora_weights=False)
    model = get_peft_model(build(family), config).train()
    expected = alone(model, parts)
    use_varlen(model)
    require_packable(model)
    assert model.training
    checkpoint_activations(model)
    with counting_attention() as calls:
        assert_same(packed(model, parts), expected)
    assert calls.total == 2 * model.config.num_hidden_layers, "each layer ran again in the backward pass"


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "deepseek_v3", "qwen3_moe"])
def test_the_kernel_is_called_as_its_documentation_says(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own `varlen_attn`, with textbook arithmetic in place of what it does on a GPU."""
    model, parts = build(family), documents()
    expected = alone(model, parts)
    use_varlen(model)
    monkeypatch.setattr(varlen, "_DTYPES", (torch.float32,))
    with gpu_assumed(), counting_attention() as calls:
        assert_same(packed(model, parts), expected)
    assert (calls.kernel, calls.exact) == (model.config.num_hidden_layers, 0)


def test_packed_with_sdpa_a_model_whose_mask_ignores_the_positions_is_refused() -> None:
    model = build("opt")
    model.set_attn_implementation("sdpa")
    with pytest.raises(ModelError, match="off by"):
        require_packable(model)
    assert model.config._attn_implementation == "sdpa"


HYBRID = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "mamba": {},
    "qwen3_next": {
        **WIDE, **EXPERTS, "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "recurrent_gemma": {"block_types": ["recurrent", "attention"], "lru_width": 32, "attention_window_size": 8},
}  # fmt: skip
BLIND = {"bloom": {"n_head": 4, "n_layer": 2}, "xglm": {}, "gpt_neox_japanese": {}, "falcon": {}, "gptj": {"n_head": 4}}


@pytest.mark.parametrize(("family", "settings"), {**HYBRID, **BLIND}.items())
@pytest.mark.parametrize("known", [True, False], ids=["by its config", "by running it"])
def test_families_that_cannot_keep_documents_apart_are_refused(
    family: str, settings: dict[str, Any], known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By config.json, and, were the table to miss it, by what the model does."""
    config = CONFIG_MAPPING[family](**{**COMMON, **settings})
    assert f"{family} cannot be packed" in (packing_obstacle(config.to_dict()) or "")
    if not known:
        monkeypatch.setattr(attention, "packing_obstacle", lambda config: None)
    model = AutoModelForCausalLM.from_config(config).eval()

    def prove() -> None:
        use_varlen(model)
        require_packable(model)

    with pytest.raises(
        ModelError, match=family if known else f"{family} (cannot be packed|has its own attention code)"
    ):
        prove()


@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (("position_ids", "cu_seq_lens_q", "max_length_q", "document_lengths"), "off by"),
        (("sliding_window",), "windows"),
    ],
    ids=["borders", "window"],
)
def test_a_model_that_loses_what_it_is_told_is_refused(
    lost: tuple[str, ...], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that drops an argument on the way, as a new model's code might."""

    def losing(*args: Any, **kwargs: Any) -> Any:
        return varlen.varlen_attention(*args, **{name: kwargs[name] for name in kwargs if name not in lost})

    model = build("mistral")
    use_varlen(model)
    monkeypatch.setitem(AttentionInterface._global_mapping, attention.NAME, losing)
    with pytest.raises(ModelError, match=says):
        require_packable(model)
