"""Rules on `Setup`, case by case: what they catch, what they leave alone, and that odd values never make them raise."""

from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from surefit.config.schema import SureFitConfig
from surefit.core.units import GIB
from surefit.facts.hardware import HardwareFacts, hardware_facts
from surefit.facts.model import ModelFacts, model_facts
from surefit.facts.setup import SettingLocation, Setup
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import Finding, LintContext

CODES = (
    "PRC003", "PRC004", "PRC005", "PRC006", "PRC007", "ADP001", "ADP002", "ADP003", "ADP004",
    "MRG001", "MRG002", "MRG003", "MRG004", "MEM003", "MEM004", "MEM005", "MEM007", "EVL001",
)  # fmt: skip
RULES = [rule for rule in all_rules() if rule.code in CODES]
NANO = model_facts("surefit/nano")
A100 = replace(hardware_facts("cpu"), kind="cuda", name="an A100", memory_bytes=40 * GIB)
LLAMA = replace(NANO, vocab_size=128_256, hidden_size=4096, parameters=8_030_261_248, tied_embeddings=False)


def found(
    model: ModelFacts | None = None, hardware: HardwareFacts | None = A100, tool: str = "trl", **values: Any
) -> list[Finding]:
    context = LintContext(None, Path("run.yaml"), setup=Setup(tool, **values), model=model, hardware=hardware)
    return run_rules(context, RULES).findings


def codes(model: ModelFacts | None = None, **values: Any) -> list[str]:
    return sorted({finding.code for finding in found(model, **values)})


def test_a_tool_that_says_nothing_has_no_finding() -> None:
    assert codes(LLAMA) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"adapter": "lora", "adapter_dtype": "float32", "bf16": True}, ["PRC003"]),
        ({"adapter": "lora", "adapter_dtype": "float32", "dtype": "float32"}, []),
        ({"adapter": "lora", "adapter_dtype": "float32"}, []),
        ({"adapter": "full", "adapter_dtype": "float32", "bf16": True}, []),
        ({"quantization": "nf4", "quant_compute_dtype": "float32", "fp16": True}, ["PRC005"]),
        ({"quantization": "nf4", "quant_compute_dtype": "float16", "dtype": "bfloat16"}, ["PRC005"]),
        ({"quantization": "nf4", "quant_compute_dtype": "bfloat16", "dtype": "float32", "bf16": True}, []),
        ({"quantization": "int8", "quant_compute_dtype": "float32", "bf16": True}, []),
        ({"quantization": "nf4", "quant_compute_dtype": "float32", "dtype": "float32"}, []),
        ({"bf16": True, "fp16": True, "quantization": "nf4", "quant_compute_dtype": "float32"}, ["PRC004"]),
        ({"fp16": True, "adapter": "lora", "adapter_dtype": "float16"}, ["PRC007"]),
        ({"fp16": True, "adapter": "lora", "weights_dtype": "float16"}, []),
        ({"fp16": True, "weights_dtype": "float16"}, []),
    ],
)
def test_number_formats(values: dict[str, Any], expected: list[str]) -> None:
    assert codes(**values) == expected


def bfloat16(number: float) -> float:
    """The nearest bfloat16: a float32 without its lower 16 bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


@pytest.mark.parametrize(
    ("dtype", "rate", "lost"),
    [("bfloat16", 1e-5, True), ("bfloat16", 1e-4, False), ("float16", 1e-6, True), ("float16", 1e-5, False)],
)
def test_a_step_is_lost_below_half_the_distance_to_the_next_number(dtype: str, rate: float, lost: bool) -> None:
    """The rule's arithmetic against the formats themselves: 0.02 ± rate, rounded to `dtype`."""
    round_to = {"float16": lambda x: float(np.float16(x)), "bfloat16": bfloat16}[dtype]
    weight = round_to(0.02)
    assert (round_to(weight - rate) == round_to(weight + rate) == weight) is lost
    values = {"adapter": "full", "dtype": dtype, "learning_rate": rate}
    assert ("PRC006" in codes(**values, float32_masters=False)) is lost
    assert codes(**values, float32_masters=True) == []
    assert codes(**values) == []


@pytest.mark.parametrize(
    ("rank", "alpha", "rslora", "flagged"),
    [
        (16, 32, None, False), (8, 32, None, False), (1, 32, None, False), (512, 8, None, False), (64, 16, None, False),
        (8, 512, None, True), (256, 1, None, True), (8, 0, None, True), (8, -16, None, True),
        (256, 16, True, False), (256, 256, True, False), (256, 512, True, True),
        (256, 1024, True, True), (256, 1, True, False),
    ],
)  # fmt: skip
def test_the_scale_of_an_adapter(rank: int, alpha: float, rslora: bool | None, flagged: bool) -> None:
    values = {"adapter": "lora", "lora_r": rank, "lora_alpha": alpha, "rslora": rslora}
    assert codes(**values) == (["ADP001"] if flagged else [])
    assert codes(**{**values, "adapter": "full"}) == []


def test_the_scale_is_told_in_the_users_numbers() -> None:
    (one,) = found(adapter="lora", lora_r=8, lora_alpha=512.0)
    assert one.message.startswith("alpha 512 divided by rank 8 scales the adapter by 64;")
    assert one.help == "start at twice the rank, 16"
    (one,) = found(adapter="lora", lora_r=256, lora_alpha=512.0, rslora=True)
    assert one.message.startswith("alpha 512 divided by the square root of rank 256 scales the adapter by 32;")
    assert one.message.endswith("without use_rslora it would be 2")
    assert one.help == "write 16"


@pytest.mark.parametrize(
    ("values", "missing"),
    [
        ({"target_modules": ("q_proj",)}, "the embedding and the output head"),
        ({"modules_to_save": ("model.embed_tokens",)}, "the output head"),
        ({"modules_to_save": ("lm_head",)}, "the embedding"),
        ({"modules_to_save": ("embed_out",)}, "the embedding"),
        ({"modules_to_save": ("embed_tokens", "lm_head")}, None),
        ({"target_modules": ("embed_tokens", "q_proj", "lm_head")}, None),
        ({"trainable_tokens": True}, None),
        ({"adapter": "full"}, None),
        ({"adapter": None}, None),
        ({"tool": "llamafactory"}, None),
        ({"tool": "llamafactory", "modules_to_save": ("lm_head",)}, "the embedding"),
    ],
)
def test_new_tokens(values: dict[str, Any], missing: str | None) -> None:
    findings = found(LLAMA, **{"adapter": "lora", "new_tokens": True, **values})
    assert [finding.code for finding in findings] == (["ADP002"] if missing else [])
    assert all(f"in {missing} are not trained" in finding.message for finding in findings)


def test_new_tokens_of_a_tied_model_need_the_embedding_only() -> None:
    values = {"adapter": "lora", "new_tokens": True, "modules_to_save": ("embed_tokens",)}
    assert codes(replace(LLAMA, tied_embeddings=True), **values) == []
    assert codes(**values) == []


def test_whole_embeddings_are_counted() -> None:
    (one,) = found(LLAMA, adapter="lora", modules_to_save=("embed_tokens", "lm_head"))
    assert one.code == "ADP004"
    assert "add 1.05B trained parameters" in one.message
    assert "7.83 GiB" in one.message  # 2 × 128,256 × 4,096 × 8 bytes
    assert codes(LLAMA, adapter="lora", modules_to_save=("score", "norm")) == []


@pytest.mark.parametrize(
    ("values", "stored", "expected"),
    [
        ({"adapter": "full", "quantization": "nf4"}, None, ["ADP003"]),
        ({"adapter": "full", "quantization": "fp8"}, None, []),
        ({"adapter": "full", "quantization": "nf4", "unsloth": True}, None, []),
        ({"adapter": "full", "base_model": "x/y-bnb-4bit"}, "bitsandbytes", ["ADP003"]),
        ({"adapter": "full"}, "fp8", []),
        ({"adapter": "lora", "merge_into": "quantized", "quantization": "nf4"}, None, ["MRG001"]),
        ({"adapter": "lora", "merge_into": "quantized"}, None, ["MRG001"]),
        ({"adapter": "lora", "merge_into": "original", "base_model": "x/y-bnb-4bit"}, "bitsandbytes", ["MRG001"]),
        ({"adapter": "lora", "merge_into": "original", "quantization": "int8"}, None, ["MRG002"]),
        ({"adapter": "lora", "merge_into": "original", "quantization": "none"}, None, []),
        ({"adapter": "lora", "merge_into": "dequantized", "quantization": "nf4"}, "bitsandbytes", []),
        ({"adapter": "lora", "quantization": "nf4"}, "bitsandbytes", []),
    ],
)
def test_quantised_bases(values: dict[str, Any], stored: str | None, expected: list[str]) -> None:
    assert codes(replace(LLAMA, quantization=stored), **values) == expected


def test_a_base_stored_quantised_is_one_finding_not_two() -> None:
    """The same merge would otherwise be told as MRG001 and as MRG002."""
    values = {"adapter": "lora", "merge_into": "original", "quantization": "nf4"}
    assert codes(replace(LLAMA, quantization="bitsandbytes"), **values) == ["MRG001"]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        ("org/model", ["MRG003"]), ("surefit/nano", []), ("", []), (None, []), ("gpt2", []),
        ("/data/model", ["MRG004"]), ("~/model", ["MRG004"]), ("./model", ["MRG004"]), ("..\\model", ["MRG004"]),
        ("C:\\models\\llama", ["MRG004"]), ("models/here", ["MRG004"]), ("a\0b", []),
    ],
)  # fmt: skip
def test_what_an_adapter_says_of_its_base(
    base: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models" / "here").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert codes(tool="peft", base_model=base) == expected
    assert "MRG003" not in codes(tool="peft", base_model=base, base_revision="abc")
    assert codes(tool="axolotl", base_model=base) == []


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"device_map": "auto", "cpu_offload": True}, ["MEM003"]),
        ({"parallel": "device_map", "cpu_offload": True, "gradient_checkpointing": True}, ["MEM003"]),
        ({"parallel": "zero3", "cpu_offload": True, "gradient_checkpointing": True}, []),
        ({"device_map": "auto"}, []),
        ({"generates_in_loop": True}, ["MEM005"]),
        ({"use_cache": True, "gradient_checkpointing": True}, ["MEM007"]),
        ({"use_cache": True}, []),
        ({"do_sample": True}, ["EVL001"]),
        ({"temperature": 0.7}, ["EVL001"]),
        ({"do_sample": False, "temperature": 0.7}, []),
        ({"do_sample": True, "temperature": 0.0}, []),
        ({"temperature": 0.0}, []),
    ],
)
def test_memory_and_sampling(values: dict[str, Any], expected: list[str]) -> None:
    assert codes(LLAMA, **values) == expected


def test_the_logits_of_an_evaluation_batch() -> None:
    values: dict[str, Any] = {"tool": "axolotl", "micro_batch": 1, "eval_micro_batch": 8, "max_length": 32_768}
    (one,) = found(LLAMA, **values, dtype="bfloat16")
    assert (one.code, one.field) == ("MEM004", "eval_micro_batch")
    assert "8 rows of 32,768 tokens have 62.62 GiB of logits" in one.message  # 8 × 32,768 × 128,256 × 2 bytes
    assert found(LLAMA, **{**values, "max_length": 16_384}) == []  # 31.3 + 3.7 GiB fit into 40
    assert codes(LLAMA, **{**values, "max_length": 16_384, "dtype": "float32"}) == ["MEM004"]
    assert found(LLAMA, **{**values, "micro_batch": 8}) == []
    assert found(LLAMA, **{**values, "tool": "trl"}) == []
    assert found(LLAMA, **values, liger=True) == []
    assert found(LLAMA, hardware=replace(A100, memory_bytes=None), **values) == []


def test_keys_are_called_as_the_users_file_calls_them() -> None:
    places = {
        "bf16": SettingLocation("mixed_precision.bf16"),
        "fp16": SettingLocation("mixed_precision.fp16", "other.json", 7),
    }
    (one,) = found(bf16=True, fp16=True, places=places)
    assert "mixed_precision.bf16 and mixed_precision.fp16" in one.message
    assert (one.field, one.path, one.line) == ("mixed_precision.fp16", "other.json", 7)


TEXTS = st.sampled_from(
    [
        "",
        "bfloat16",
        "float16",
        "float32",
        "nf4",
        "int8",
        "lora",
        "full",
        "quantized",
        "original",
        "a/b",
        "\0",
        "é" * 50,
    ]
)
NUMBERS = st.one_of(
    st.sampled_from([0, -1, 1, 7, 10**400, -(10**400), math.nan, math.inf, -math.inf, 1e-320]),
    st.integers(),
    st.floats(),
)
VALUES = {
    "bool | None": st.none() | st.booleans(),
    "str | None": st.none() | TEXTS,
    "int | None": st.none() | NUMBERS,
    "float | None": st.none() | NUMBERS,
    "tuple[str, ...] | None": st.none() | st.lists(TEXTS, max_size=3).map(tuple),
}
ATTRIBUTES = {
    name: VALUES[kind] for name, kind in Setup.__annotations__.items() if isinstance(kind, str) and kind in VALUES
}


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=ATTRIBUTES), st.sampled_from(["peft", "axolotl", "llamafactory", "", "x"]))
def test_no_rule_raises_on_odd_values(values: dict[str, Any], tool: str) -> None:
    assert "INT001" not in codes(LLAMA, tool=tool, **values)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("fsdp", "no process has the whole model"),
        ("tp", "no process has the whole model"),
        ("cp", "no process can generate alone"),
        ("zero2", "is implemented for parallel.mode ddp"),
    ],
)
def test_why_a_shared_model_is_not_scored_in_training(mode, reason):
    sections = {"parallel": {"mode": mode}, "evaluate": {"in_training": True}}
    tree = {"model": {"name_or_path": "base"}, "data": {"train": "rows"}, "output_dir": "runs/x"} | sections
    context = LintContext(SureFitConfig.model_validate(tree), Path("run.yaml"))
    (said,) = (found.message for found in run_rules(context).findings if found.code == "PAR011")
    assert said.startswith(f"parallel.mode {mode} and answers in training cannot be combined: ")
    assert reason in said
