"""Where a model's facts come from, and what is said about models that are not whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaForCausalLM

from surefit.core.errors import MachineError, ModelError, SureFitError
from surefit.facts.model import build_facts, catalogue, model_facts
from surefit.facts.safetensors import TensorHeader

PUBLISHED = {
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-8B-Instruct": 8_030_261_248,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-1B-Instruct": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.2-3B-Instruct": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "Qwen/Qwen2.5-0.5B-Instruct": 494_032_768,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-7B-Instruct": 7_615_616_512,
    "Qwen/Qwen3-0.6B": 596_049_920,
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-4B-Instruct-2507": 4_022_468_096,
    "Qwen/Qwen3-14B": 14_768_307_200,
    "Qwen/Qwen3-32B": 32_762_123_264,
    "google/gemma-2-9b-it": 9_241_705_984,
    "microsoft/phi-2": 2_779_683_840,
    "TinyLlama/TinyLlama-1.1B-Chat-v1.0": 1_100_048_384,
}
"""The totals on the models' pages (Qwen3-0.6B's without the tied head that its file repeats)."""


@pytest.fixture(autouse=True)
def _empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in the Hugging Face cache, and no network: what needs them says so at once."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub-cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_catalogue_has_the_published_totals(name: str) -> None:
    facts = model_facts(name)
    assert facts.parameters == facts.expected_parameters == PUBLISHED[name]
    assert facts.weight_bytes == 2 * PUBLISHED[name]
    assert (facts.source, facts.path, facts.has_weights) == ("catalogue", None, False)
    assert facts.gated is name.startswith(("meta-llama/", "google/"))


@pytest.mark.parametrize(
    ("name", "same", "quantization"),
    [
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct", None),
        ("unsloth/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", None),
        ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B-Instruct", None),
        ("unsloth/Qwen3-4B-unsloth-bnb-4bit", "Qwen/Qwen3-4B", "bitsandbytes"),
        ("unsloth/Qwen2.5-7B-Instruct-bnb-4bit", "Qwen/Qwen2.5-7B-Instruct", "bitsandbytes"),
    ],
)
def test_other_names_of_a_model_of_the_catalogue(name: str, same: str, quantization: str | None) -> None:
    facts = model_facts(name)
    assert (facts.name, facts.expected_parameters, facts.quantization) == (name, PUBLISHED[same], quantization)
    assert facts.gated is name.startswith(("meta-llama/", "google/"))


@pytest.mark.parametrize("name", ["somebody/Llama-3.2-1B", "unsloth/another", "meta-llama/Meta-Llama-3-8B"])
def test_a_name_that_only_resembles_one_is_another_model(name: str) -> None:
    with pytest.raises(SureFitError):
        model_facts(name)


def test_every_entry_of_the_catalogue_is_tested() -> None:
    assert set(catalogue()) == set(PUBLISHED)


def test_a_saved_model_is_read_from_its_headers(make_tiny: Callable[..., LlamaForCausalLM], tmp_path: Path) -> None:
    model = make_tiny(tie_word_embeddings=False).to(torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    facts = model_facts(str(tmp_path))
    assert facts.parameters == facts.expected_parameters == sum(p.numel() for p in model.parameters())
    assert facts.weight_bytes == 2 * facts.parameters
    assert (facts.source, facts.has_weights, facts.dtype) == ("local", True, "bfloat16")
    assert facts.linear_modules["model.layers.1.mlp.down_proj"] == (32, 64)
    assert facts.has_chat_template is False


def test_the_built_in_model() -> None:
    facts = model_facts("surefit/nano")
    assert facts.name == "surefit/nano"
    assert facts.parameters == facts.expected_parameters
    assert facts.parameters is not None
    assert 1_000_000 <= facts.parameters <= 3_000_000
    assert "generation %}" in str(facts.chat_template)


def test_a_tied_head_in_the_file_and_old_buffers_are_not_parameters() -> None:
    tensors = {
        "model.embed_tokens.weight": TensorHeader("F32", (10, 4), 160),
        "lm_head.weight": TensorHeader("F32", (10, 4), 160),
        "model.layers.0.self_attn.rotary_emb.inv_freq": TensorHeader("F32", (2,), 8),
        "model.layers.0.self_attn.q_proj.weight": TensorHeader("F32", (4, 4), 64),
    }
    config = {"hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 10}
    tied = build_facts("m", {**config, "tie_word_embeddings": True}, tensors, where="c", source="local")
    untied = build_facts("m", {**config, "tie_word_embeddings": False}, tensors, where="c", source="local")
    assert (tied.parameters, untied.parameters) == (56, 96)
    assert tied.linear_modules == {"model.layers.0.self_attn.q_proj": (4, 4)}
    assert untied.linear_modules["lm_head"] == (10, 4)


def test_packed_weights_are_not_counted_as_parameters() -> None:
    entry = catalogue()["Qwen/Qwen3-0.6B"]["config"] | {"quantization_config": {"quant_method": "bitsandbytes"}}
    packed = {"model.layers.0.mlp.down_proj.weight": TensorHeader("U8", (100, 1), 100)}
    facts = build_facts("m", entry, packed, where="c", source="local")
    assert (facts.parameters, facts.quantization, facts.weight_bytes) == (596_049_920, "bitsandbytes", 100)


def write_config(directory: Path, **changes: Any) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    config = catalogue()["Qwen/Qwen3-0.6B"]["config"]
    (directory / "config.json").write_text(json.dumps({**config, **changes}))


def test_config_without_weights_and_with_pickles_only(tmp_path: Path) -> None:
    write_config(tmp_path)
    assert model_facts(str(tmp_path)).has_weights is False
    assert model_facts(str(tmp_path)).pickle_only is False
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02.")
    assert model_facts(str(tmp_path)).pickle_only is True
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert model_facts(str(tmp_path)).pickle_only is False


def test_an_unknown_architecture_without_weights_has_no_size(tmp_path: Path) -> None:
    write_config(tmp_path, architectures=["MixtralForCausalLM"])
    facts = model_facts(str(tmp_path))
    assert (facts.parameters, facts.linear_modules, facts.weight_bytes) == (None, {}, None)
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(8, 4), "model.embed.weight": torch.zeros(9, 4)},
              tmp_path / "model.safetensors")  # fmt: skip
    facts = model_facts(str(tmp_path))
    assert (facts.parameters, facts.linear_modules) == (68, {"model.layers.0.self_attn.q_proj": (8, 4)})


@pytest.mark.parametrize(
    ("entry", "template"),
    [
        ("plain", "plain"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        (None, None),
        (3, None),
    ],
)
def test_chat_templates_of_tokenizer_config(tmp_path: Path, entry: object, template: str | None) -> None:
    write_config(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    assert model_facts(str(tmp_path)).chat_template == template
    (tmp_path / "chat_template.jinja").write_text("own file")
    assert model_facts(str(tmp_path)).chat_template == "own file"


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "no config.json"),
        ({"adapter_config.json": "{}"}, "a LoRA adapter, not a base model"),
        ({"config.json": "{"}, "not valid JSON"),
        ({"config.json": "[]"}, "not a JSON object"),
        ({"config.json": "{}"}, "hidden_size is missing"),
        ({"config.json": "\ud800"}, "not valid JSON"),
    ],
)
def test_a_folder_that_is_no_model(tmp_path: Path, files: dict[str, str], says: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ModelError, match=says) as caught:
        model_facts(str(tmp_path))
    assert str(tmp_path) in str(caught.value.path)


def test_names_that_are_neither_folder_nor_hub_id(tmp_path: Path) -> None:
    (tmp_path / "my-model").mkdir()
    with pytest.raises(ModelError, match=r"did you mean .*my-model"):
        model_facts(str(tmp_path / "my-modle"))
    file = tmp_path / "model.bin"
    file.touch()
    with pytest.raises(ModelError, match="a file, not a model directory"):
        model_facts(str(file))
    for name in ("./nowhere", "a/b/c", "x" * 5000, "a\0b", "model.safetensors", ""):
        with pytest.raises(ModelError):
            model_facts(name)


def cache(name: str, commit: str = "c0ffee", revision: str = "main") -> Path:
    from surefit.core.env import hub_cache

    folder = hub_cache() / f"models--{name.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    (folder / "refs" / revision).write_text(commit)
    return folder / "snapshots" / commit


def test_the_cache_comes_before_the_catalogue_and_honours_revisions() -> None:
    write_config(cache("Qwen/Qwen3-0.6B"), num_hidden_layers=14)
    write_config(cache("Qwen/Qwen3-0.6B", "beef", "v2"), num_hidden_layers=7)
    assert (model_facts("Qwen/Qwen3-0.6B").source, model_facts("Qwen/Qwen3-0.6B").num_layers) == ("cache", 14)
    assert model_facts("Qwen/Qwen3-0.6B", "v2").num_layers == 7
    assert model_facts("Qwen/Qwen3-0.6B", "beef").num_layers == 7
    assert model_facts("Qwen/Qwen3-0.6B", "unknown").source == "catalogue"


def test_offline_a_cached_config_of_unknown_size_is_better_than_nothing() -> None:
    write_config(cache("some/mixture"), architectures=["MixtralForCausalLM"])
    facts = model_facts("some/mixture")
    assert (facts.source, facts.parameters) == ("cache", None)


def test_offline_an_unknown_name_is_the_machine_s_problem() -> None:
    with pytest.raises(MachineError, match="offline mode is on"):
        model_facts("some/model")
