"""The closed form of a step's arithmetic against torch's own counter, and against numbers worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from surefit.config.schema import SureFitConfig
from surefit.facts.flops import peak_flops, seen_pairs, training_flops, windows_of
from surefit.facts.model import build_facts, model_facts
from surefit.model.adapter import add_adapter

H100 = SimpleNamespace(kind="cuda", name="NVIDIA H100 80GB HBM3", memory_bytes=None, bf16=True)
SHAPE: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "attn_implementation": "eager",
}  # fmt: skip
MODELS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen": (Qwen3Config, Qwen3ForCausalLM)}


def config(kind: str = "lora", **adapter: Any) -> SureFitConfig:
    return SureFitConfig.model_validate(
        {
            "model": {"name_or_path": "any"},
            "lora": {"r": 8, **adapter},
            "train": {"method": kind},
            "data": {"train": "unused"},
            "output_dir": "unused",
        }
    )


@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("kind", ["lora", "full"])
@pytest.mark.parametrize("family", MODELS)
def test_the_closed_form_is_what_torch_counts(family: str, kind: str, tied: bool) -> None:
    """The eager attention multiplies the whole square of positions, so it is counted by itself."""
    config_class, model_class = MODELS[family]
    settings = config(kind)
    base = model_class(config_class(**SHAPE, tie_word_embeddings=tied))
    stored = json.loads(base.config.to_json_string(False)) | {"architectures": [model_class.__name__]}
    facts = build_facts("any", stored, None, where="here", source="local")
    model: Any = add_adapter(base, settings.adapter) if kind == "lora" else base
    model.train()
    rows, length = 2, 24
    ids = torch.randint(96, (rows, length))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, use_cache=False).logits.float().sum().backward()
    counted = {str(operator): count for operator, count in counter.get_flop_counts()["Global"].items()}
    attention = counted.pop("aten.bmm")
    work = training_flops(facts, settings)
    assert work is not None
    documents = [length] * rows
    matrices = work.of(documents, rows * length) - work.pair * 3 * rows * seen_pairs(length)
    assert sum(counted.values()) == matrices
    # transformers 5.17 makes the rotary angles, positions × frequencies, with a matrix product as well.
    rotary = 2 * length * SHAPE["head_dim"] // 2
    assert attention - work.pair * 3 * rows * length**2 in (0, rotary)


def test_the_worked_example() -> None:
    work = training_flops(model_facts("meta-llama/Llama-3.1-8B"), config())
    assert work is not None
    assert (work.token, work.supervised, work.pair * 32) == (27_992_588_288, 2_101_346_304, 1_572_864)
    assert work.of([2048], 2047) == 64_930_422_194_176
    assert peak_flops(H100, "bfloat16") == 989e12


def test_unsupervised_tokens_need_no_head_and_packed_documents_do_not_see_each_other() -> None:
    work = training_flops(model_facts("surefit/nano"), config())
    assert work is not None
    assert work.of([100], 60) - work.of([100], 10) == 50 * work.supervised
    layers = len(work.windows)
    assert work.of([50, 50], 10) == work.of([100], 10) - work.pair * layers * (5050 - 2 * 1275)


def test_a_window_bounds_what_a_position_sees() -> None:
    visible = torch.ones(30, 30).tril().triu(-6)
    assert seen_pairs(30, 7) == int(visible.sum())
    facts = model_facts("surefit/nano")
    free, bound = training_flops(facts, config()), training_flops(facts, config(), [7] * facts.num_layers)
    assert free is not None
    assert bound is not None
    saved = free.of([30, 5], 3) - bound.of([30, 5], 3)
    assert saved == facts.num_layers * free.pair * (seen_pairs(30) - seen_pairs(30, 7))


def test_windows_of_what_transformers_says() -> None:
    qwen = Qwen3Config(num_hidden_layers=4, sliding_window=16, use_sliding_window=True, max_window_layers=2)
    assert windows_of(qwen.to_dict(), 4) == [None, None, 16, 16]
    assert windows_of(LlamaConfig(num_hidden_layers=2).to_dict(), 2) == [None, None]


def test_an_unknown_architecture_has_no_number(tmp_path: Path) -> None:
    mixture = SHAPE | {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    facts = build_facts("any", mixture, None, where="here", source="local")
    assert training_flops(facts, config()) is None


@pytest.mark.parametrize(("kind", "name"), [("cpu", "NVIDIA H100"), ("cuda", "NVIDIA H300 of next year")])
def test_no_peak_is_guessed(kind: str, name: str) -> None:
    assert peak_flops(SimpleNamespace(kind=kind, name=name, memory_bytes=None, bf16=True), "bfloat16") is None
