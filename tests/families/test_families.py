"""Families of models through every stage, as benchmarks/families.py takes them; and what was mended there."""

from __future__ import annotations

import json
import math
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from peft.utils import transformers_weight_conversion as conversion
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from surefit.config.schema import LoraSection, ModelSection
from surefit.core.errors import ConfigError, ModelError
from surefit.facts import all_linear
from surefit.facts.architecture import dimensions, require_decoder
from surefit.facts.hardware import hardware_facts
from surefit.facts.memory_formula import count_trainable_parameters, target_modules, trainable_tensor_sizes
from surefit.facts.model import directory_facts
from surefit.facts.tensors import list_parameters
from surefit.model.adapter import add_adapter, load_initial_adapter, lora_modules, trainable_parameters
from surefit.model.classes import auto_class
from surefit.model.load import build_meta_model, load_model
from surefit.model.quantize import is_four_bit, quantized_layers
from surefit.plan.fake import FakeMode
from surefit.plan.step_config import load_pretrained_config

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))
import family_shapes  # noqa: E402

# By its path: tests/helpers has another module of its name.
_place = spec_from_file_location("benchmark_families", BENCHMARKS / "families.py")
assert _place
assert _place.loader
families = module_from_spec(_place)
_place.loader.exec_module(families)

_ONE_OF_EACH = """
    llama mistral qwen2 qwen3 smollm3 stablelm starcoder2
    gpt2 gpt_neox gptj bloom mpt falcon opt phi phi3 cohere
    gemma2 gemma3_text gemma4_text
    mixtral dots1 deepseek_v3 glm4_moe gpt_oss jetmoe llama4_text olmoe
    mamba mamba2 bamba jamba zamba2 nemotron_h granitemoehybrid recurrent_gemma rwkv xlstm
    qwen3_next kimi_linear minimax lfm2
    bert xlnet prophetnet llava:images"""
STRUCTURES = frozenset(_ONE_OF_EACH.split())
"""Families with which every structure occurs: position encodings and fused matrices, windows and softcaps, kinds of
experts, state spaces and linear attention, what is no decoder, images. `make test-long` takes all the others too: they
repeat these in transformers' files, and change with its version, not with SureFit's."""
SMALL = ("qwen3_moe", "deepseek_v3", "llama4_text")


def built(family: str) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(family_shapes.config(family), dtype=torch.float32)


def measured(family: str, folder: Path, monkeypatch: pytest.MonkeyPatch, experts: bool = False) -> dict[str, Any]:
    monkeypatch.setenv("SUREFIT_CACHE", str(folder / "cache"))
    return families.Family(family, folder, experts).measure()


def faults(line: dict[str, Any]) -> dict[str, Any]:
    return {name: cell for name, cell in line["cells"].items() if cell["state"] == "fault"}


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen3_moe", "mistral3:images"])
def test_a_family_passes_every_stage(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = measured(family, tmp_path, monkeypatch)
    assert families.complete(line), line


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "llama4_text"])
def test_factors_beside_the_experts_pass_every_stage(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = measured(family, tmp_path, monkeypatch, experts=True)["cells"]
    packed = cells.pop("lora packed")
    assert packed["state"] == ("refused" if family == "llama4_text" else "passes")
    assert {name: cell for name, cell in cells.items() if cell["state"] != "passes"} == {}
    assert {"plan", "lora", "lora merge", "reload", "scores"} <= cells.keys()
    logged = [json.loads(line) for line in (tmp_path / "lora/metrics.jsonl").read_text().splitlines()]
    used = [line["expert_max_share"] for line in logged if "expert_max_share" in line]
    assert len(used) == (0 if family == "llama4_text" else families.STEPS)  # whose experts all read something
    assert all(0.25 <= share <= 1 for share in used)  # of 4
    saved = load_file(tmp_path / "lora/adapter/adapter_model.safetensors")
    stacks = [name for name in saved if ".experts." in name]
    layers = 2 if family != "llama4_text" else sum("experts.lora_A" in name for name in stacks)
    assert len(stacks) == 4 * layers > 0  # A and B beside gate and up, and beside down


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=pytest.mark.slow if family in STRUCTURES else pytest.mark.long)
        for family in family_shapes.families()
    ],
)
def test_a_family_passes_or_is_refused(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = measured(family, tmp_path, monkeypatch)
    if line["transformers"]:
        pytest.skip(f"transformers itself: {line['transformers']}")
    assert not faults(line), line
    # What looks at later tokens must not train.
    assert line["causal"] or line["cells"]["lora"]["state"] == "refused"


@pytest.mark.parametrize("family", [*SMALL, "gemma3", "gpt_oss", "axk2", "laguna", "zamba"])
def test_facts_and_model_agree_on_what_is_adapted(family: str, tmp_path: Path) -> None:
    model, section = built(family), LoraSection(r=2)
    model.save_pretrained(tmp_path)
    facts = directory_facts(tmp_path, family)
    adapted = lora_modules(add_adapter(model, section))
    assert sorted(adapted.values()) == sorted(target_modules(facts, section).values())


@pytest.mark.parametrize(
    ("family", "experts"),
    [
        *((family, True) for family in (*SMALL, "mixtral", "gpt_oss", "jamba", "lfm2_moe", "granitemoe_swa")),
        *((family, "with_router") for family in (*SMALL, "mixtral", "gpt_oss", "jamba", "lfm2_moe")),
    ],
)
def test_facts_and_model_agree_on_the_experts_factors(family: str, experts: Any, tmp_path: Path) -> None:
    model, section = built(family), LoraSection(r=2, experts=experts)
    model.save_pretrained(tmp_path)
    facts = directory_facts(tmp_path, family)
    expected = count_trainable_parameters(facts, section, "float32")
    adapted = add_adapter(model, section)
    assert expected
    assert trainable_parameters(adapted)[0] == expected.parameters
    assert sum(numbers for numbers, _ in trainable_tensor_sizes(facts, section)) == expected.parameters
    if family == "gpt_oss":  # whose files hold inputs × outputs, which no header says, and biases
        return
    shapes = sorted(tensor.shape for tensor in list_parameters(facts, section) if tensor.trained)
    assert shapes == sorted(tuple(each.shape) for each in adapted.parameters() if each.requires_grad)
    assert sum(math.prod(shape) for shape in facts.expert_stacks.values()) == facts.expert_parameters


def test_an_adapter_of_experts_is_gone_on_from(tmp_path: Path) -> None:
    sections = [LoraSection(r=2, experts=experts) for experts in (True, False)]
    trained_before = add_adapter(built("qwen3_moe"), sections[0], seed=1)
    for name, parameter in trained_before.named_parameters():
        if ".lora_B." in name:
            parameter.data.normal_()
    trained_before.save_pretrained(str(tmp_path))
    with_experts, without = (add_adapter(built("qwen3_moe"), section) for section in sections)
    base = ModelSection(name_or_path="surefit/nano")
    load_initial_adapter(with_experts, tmp_path, base)
    for one, other in zip(with_experts.parameters(), trained_before.parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(ConfigError, match="has experts true, but the config has false"):
        load_initial_adapter(without, tmp_path, base)


@pytest.mark.parametrize("family", ["llama", "jetmoe"])
def test_a_model_without_stacks_of_experts_has_no_factors_there(family: str, tmp_path: Path) -> None:
    model = built(family)
    model.save_pretrained(tmp_path)
    assert directory_facts(tmp_path, family).expert_stacks == {}
    with pytest.raises(ConfigError, match=f"a {family} has no experts"):
        add_adapter(model, LoraSection(r=2, experts=True))


@pytest.mark.parametrize("family", SMALL)
def test_peft_reads_back_what_was_trained(family: str, tmp_path: Path) -> None:
    adapted = add_adapter(built(family), LoraSection(r=2))
    adapted.save_pretrained(str(tmp_path))
    read = PeftModel.from_pretrained(built(family), str(tmp_path))
    assert lora_modules(read) == lora_modules(adapted)
    assert not any("experts." in name or name.endswith("router") for name in lora_modules(read))


def test_the_experts_are_counted_stored_alone_or_stacked(tmp_path: Path) -> None:
    for family in ("qwen3_moe", "gpt_oss"):  # the one's files hold them one by one, the other's in stacks
        model = built(family)
        model.save_pretrained(tmp_path / family)
        stacks = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name and p.ndim == 3)
        assert directory_facts(tmp_path / family, family).expert_parameters == stacks > 0


def test_layers_are_counted_where_no_number_is_stated() -> None:
    assert dimensions(family_shapes.config("xglm").to_dict(), "config.json").num_attention_heads == 4
    listed = {"model_type": "nemotron_h", "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 264}
    found = dimensions(listed | {"layers_block_type": ["mamba", "attention", "moe"]}, "config.json")
    assert found.num_layers == 3
    assert dimensions(family_shapes.config("mamba").to_dict(), "config.json").head_dim == 32


def test_a_name_that_peft_takes_for_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="'gate_proj' of a deepseek_v3 cannot have factors"):
        add_adapter(built("deepseek_v3"), LoraSection(target_modules=["q_proj", "gate_proj"]))


def test_the_names_are_those_that_peft_translates() -> None:
    theirs = {
        kind: frozenset(conversion._MOE_TARGET_MODULE_MAPPING[pattern])
        for kind, pattern in conversion._MODEL_TO_CONVERSION_PATTERN.items()
        if pattern in conversion._MOE_FUSED_TARGETS and conversion.get_checkpoint_conversion_mapping(kind) is not None
        if kind.islower()  # the others are names of classes
    }
    theirs["qwen2_moe"] = frozenset(conversion._MOE_TARGET_MODULE_MAPPING["qwen2_moe"])
    assert theirs.items() <= all_linear.OLD_NAMES.items()


def test_an_ending_does_not_reach_a_vision_tower() -> None:
    adapted = add_adapter(built("gemma3"), LoraSection(r=2, target_modules=["q_proj"]))
    names = list(lora_modules(adapted))
    assert names
    assert all("language_model" in name for name in names)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "bert"}, "from the tokens after it"),
        ({"model_type": "xlnet", "is_decoder": True}, "from the tokens after it"),
        ({"model_type": "bart", "is_encoder_decoder": True}, "an encoder reads the prompt"),
        ({"model_type": "bart", "is_decoder": True, "decoder_layers": 2}, "reads an encoder's output"),
        ({"model_type": "prophetnet", "num_decoder_layers": 2}, "reads an encoder's output"),
        ({"model_type": "rwkv"}, "a state that padding would change"),
    ],
)
def test_what_is_no_decoder_is_refused(config: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelError, match=said):
        require_decoder(config, "config.json")
    require_decoder({"model_type": "bert", "is_decoder": True}, "config.json")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_product_of_experts_has_its_shape_without_data(dtype: torch.dtype) -> None:
    rows, stack, ends = torch.ones(6, 8), torch.ones(3, 8, 16), torch.tensor([2, 4, 6], dtype=torch.int32)
    columns = torch.ones(8, 6), torch.ones(6, 16)
    with FakeMode(allow_non_fake_inputs=True):
        out = torch._grouped_mm(rows.to(dtype), stack.to(dtype), offs=ends)
        gradient = torch._grouped_mm(columns[0].to(dtype), columns[1].to(dtype), offs=ends)
    assert (out.shape, out.dtype) == ((6, 16), dtype)
    assert (gradient.shape, gradient.dtype) == ((3, 8, 16), dtype)


def test_the_plan_reads_infinity_as_transformers_writes_it(tmp_path: Path) -> None:
    built("bamba").save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert load_pretrained_config(directory_facts(tmp_path, "bamba")).time_step_limit[1] == float("inf")


def test_the_class_is_that_of_the_language_model_where_there_is_one() -> None:
    made = {name: auto_class(family_shapes.config(name)) for name in ("llama", "llama4", "gemma3", "mistral3")}
    assert [name for name, kind in made.items() if kind is AutoModelForImageTextToText] == ["mistral3"]


def test_a_checkpoint_with_images_gives_its_language_model_alone(tmp_path: Path) -> None:
    families.save_base("qwen3_5:images", tmp_path)
    stored = families.tensors_in(tmp_path)
    read = {name for name, _ in families.read_back(tmp_path).named_parameters()}
    assert any("visual" in name for name in stored)
    assert read
    assert not any("visual" in name for name in read)


def test_a_width_for_each_layer_is_no_damage() -> None:
    config = family_shapes.config("gemma3n_text").to_dict() | {"intermediate_size": [48, 64]}
    assert dimensions(config, "config.json").intermediate_size == 64


@pytest.mark.parametrize("family", ["llama4", "deepseek_v4", "mamba", "gemma3n_text", "gpt2", "gemma3:images"])
def test_what_is_quantised_while_it_is_loaded_is_what_plan_and_merge_take_for_it(family: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    families.save_base(family, tmp_path)
    section = ModelSection(name_or_path=str(tmp_path), dtype="float32", quantization="nf4")
    loaded = load_model(section, hardware_facts("cpu"))
    found = {name for name, layer in loaded.named_modules() if is_four_bit(layer)}
    assert found == set(quantized_layers(build_meta_model(section)))
    assert bool(found) == (family != "gpt2")  # whose matrices are no linear layers
    assert not {name.rpartition(".")[2] for name in found} & {"router", "dt_proj", "lm_head", "prediction_coefs"}
    assert not any("vision" in name for name in found)


def test_the_page_has_a_column_for_each_set_of_versions() -> None:
    passes = {cell: {"state": "passes", "seconds": 1.0} for cell in families.CELLS}
    fault = {"state": "fault", "why": "ValueError: no", "where": "", "seconds": 1.0}
    one = {"family": "llama", "transformers": None, "causal": True, "cells": passes, "seconds": 4.0, "with": "new"}
    older = one | {"cells": passes | {"nf4": fault}, "with": "old"}
    gone = one | {"family": "zaya", "seconds": 9.0}
    text = families.page([one, gone], families.CELLS, ["llama", "zaya"], [older])
    assert "| | new | old |" in text
    assert "| pass every stage | 2 (100%) | 0 (0%) |\n" in text
    assert "| have a fault | 0 (0%) | 1 (100%) |\n" in text
    assert "With old, 1 of these families were measured; these are missing there: zaya. What differs there:" in text
    assert "- llama: nf4 **fault**\n" in text
    assert "A family takes 6 s (median), and zaya 9 s (the longest)" in text
    assert "With old" not in families.page([one], families.CELLS, ["llama"])
