"""The closed form against the modules that transformers builds, parameter for parameter."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from surefit.core.errors import ModelError
from surefit.facts.architecture import TRAITS, architecture_of, dimensions, structure

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CASES = [(name.removesuffix("ForCausalLM"), {}) for name in TRAITS] + [
    ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("Llama", {"head_dim": 24, "num_key_value_heads": 4}),
    ("Mistral", {"head_dim": 32}),
    ("Qwen2", {"tie_word_embeddings": True}),
    ("Qwen3", {"attention_bias": True, "head_dim": 20}),
    ("Gemma2", {"tie_word_embeddings": False, "head_dim": 16}),
    ("Granite", {"attention_bias": True, "mlp_bias": True}),
    ("Starcoder2", {"use_bias": False}),
    ("StableLm", {"use_qkv_bias": True}),
    ("Glm", {"attention_bias": False}),
    ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    ("Cohere", {"attention_bias": True}),
    ("SeedOss", {"attention_out_bias": True, "attention_bias": False}),
]


def build(family: str, overrides: dict[str, Any]) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model on meta and its config.json as `save_pretrained` writes it."""
    config_class = getattr(transformers, "Gemma3TextConfig" if family == "Gemma3" else f"{family}Config")
    config = config_class(**{**SIZES, **overrides})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    config.architectures = [type(model).__name__]
    return model, json.loads(config.to_json_string())


@pytest.mark.parametrize(
    ("family", "overrides"), CASES, ids=lambda case: case if isinstance(case, str) else "-".join(case)
)
def test_counts_and_names_are_those_of_the_real_modules(family: str, overrides: dict[str, Any]) -> None:
    model, config = build(family, overrides)
    dims = dimensions(config, "config.json")
    formula = structure(config, dims)
    assert formula is not None
    assert formula.parameters == sum(p.numel() for p in model.parameters())
    tied = dims.tied_embeddings
    linears = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and not (tied and name == "lm_head")
    }
    assert formula.linear_modules == linears


@pytest.mark.parametrize(
    ("family", "switch"), [("Phi", "qk_layernorm"), ("Cohere", "use_qk_norm"), ("StableLm", "qk_layernorm")]
)
def test_a_variant_the_formula_does_not_know_is_said_to_be_unknown(family: str, switch: str) -> None:
    _, config = build(family, {switch: True})
    assert structure(config, dimensions(config, "config.json")) is None


def test_an_unknown_architecture_has_no_closed_form() -> None:
    config = {**SIZES, "architectures": ["MixtralForCausalLM"]}
    assert structure(config, dimensions(config, "config.json")) is None


def test_the_worked_example_of_the_docstring() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "tie_word_embeddings": False,
    }  # fmt: skip
    formula = structure(config, dimensions(config, "config.json"))
    assert formula is not None
    assert formula.parameters == 8_030_261_248
    layer = sum(math.prod(s) for name, s in formula.linear_modules.items() if name.startswith("model.layers.0."))
    assert layer == 41_943_040 + 176_160_768


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"num_attention_heads": "32"}, "num_attention_heads is '32'"),
        ({"vocab_size": True}, "vocab_size is True"),
    ],
)
def test_a_dimension_that_is_missing_or_impossible_is_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError, match=says) as caught:
        dimensions({**SIZES, **change}, "m/config.json")
    assert caught.value.path == "m/config.json"


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        (None, 32768),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 131072),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}, 32768),
        ("linear", 32768),
    ],
)
def test_only_yarn_lengthens_the_stated_context(scaling: object, context: int) -> None:
    config = {**SIZES, "max_position_embeddings": 32768, "rope_scaling": scaling}
    assert dimensions(config, "config.json").max_position_embeddings == context


def test_gpt2_names_and_nested_text_models_are_read() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}
    dims = dimensions({**gpt2, "n_positions": 1024}, "config.json")
    assert (dims.hidden_size, dims.num_layers, dims.max_position_embeddings, dims.tied_embeddings) == (
        768,
        12,
        1024,
        True,
    )
    nested = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": SIZES, "vision_config": {}}
    assert dimensions(nested, "config.json").num_layers == 3
    assert architecture_of(nested) == "Gemma3ForConditionalGeneration"
