"""The rules on `Setup` through the importers: a real file of another tool, the finding, and the key in that file."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit import importers
from surefit.lint.engine import find_rule, run_rules
from surefit.lint.rule import Finding, LintContext

AXOLOTL = "base_model: org/model\nsequence_len: 2048\nmicro_batch_size: 2\nnum_epochs: 1\nlearning_rate: 1.0e-5\n"
FACTORY = "model_name_or_path: org/model\nstage: sft\ndataset: alpaca_en\ntemplate: llama3\nlearning_rate: 1.0e-5\n"
TRL = "model_name_or_path: org/model\ndataset_name: org/set\nper_device_train_batch_size: 2\nnum_train_epochs: 1\n"
ADAPTER = (
    '{\n "peft_type": "LORA",\n "base_model_name_or_path": "%s",\n "revision": %s,\n "r": 8,\n "lora_alpha": %s\n}\n'
)
CASES = [
    ("PRC004", "trl.yaml", TRL + "bf16: true\nfp16: true\n", "fp16", 6),
    ("PRC006", "axolotl.yaml", AXOLOTL + "bf16: full\n", "learning_rate", 5),
    ("PRC006", "factory.yaml", FACTORY + "finetuning_type: full\npure_bf16: true\nbf16: true\n", "learning_rate", 5),
    ("ADP001", "adapter_config.json", ADAPTER % ("org/model", '"abc"', 512), "lora_alpha", 6),
    ("ADP002", "axolotl.yaml", AXOLOTL + 'adapter: lora\ntokens: ["<x>"]\n', "tokens", 7),
    ("ADP003", "factory.yaml", FACTORY + "finetuning_type: full\nquantization_bit: 4\n", "quantization_bit", 7),
    ("MRG003", "adapter_config.json", ADAPTER % ("org/model", "null", 16), "base_model_name_or_path", 3),
    ("MRG004", "adapter_config.json", ADAPTER % ("/data/model", "null", 16), "base_model_name_or_path", 3),
    ("MEM005", "factory.yaml", FACTORY + "predict_with_generate: true\n", "predict_with_generate", 6),
    ("MEM007", "trl.yaml", TRL + "gradient_checkpointing: true\nuse_cache: true\n", "use_cache", 6),
    ("EVL001", "factory.yaml", FACTORY + "do_sample: true\ntemperature: 0.7\ndo_predict: true\n", "do_sample", 6),
]
QUIET = [
    ("PRC006", "factory.yaml", FACTORY + "finetuning_type: full\nbf16: true\n"),
    ("ADP001", "adapter_config.json", ADAPTER % ("org/model", '"abc"', 16)),
    ("ADP002", "factory.yaml", FACTORY + "finetuning_type: lora\nadd_tokens: <x>\n"),  # it adds the modules itself
    ("ADP003", "factory.yaml", FACTORY + "finetuning_type: lora\nquantization_bit: 4\n"),
    ("MRG003", "adapter_config.json", ADAPTER % ("org/model", '"abc"', 16)),
    ("EVL001", "factory.yaml", FACTORY + "do_sample: false\ntemperature: 0.7\ndo_predict: true\n"),
    ("EVL001", "factory.yaml", FACTORY + "do_sample: true\ntemperature: 0.7\ndo_train: true\n"),  # nothing is scored
]


def found(code: str, path: Path, text: str) -> list[Finding]:
    path.write_text(text, encoding="utf-8")
    read = importers.read_tool_config(path)
    return run_rules(LintContext(None, path, setup=read.setup), [find_rule(code)]).findings


@pytest.mark.parametrize(("code", "name", "text", "field", "line"), CASES)
def test_a_faulty_file(code: str, name: str, text: str, field: str, line: int, tmp_path: Path) -> None:
    (one,) = found(code, tmp_path / name, text)
    assert (one.code, one.field, one.line) == (code, field, line)


@pytest.mark.parametrize(("code", "name", "text"), QUIET)
def test_a_sound_file(code: str, name: str, text: str, tmp_path: Path) -> None:
    assert found(code, tmp_path / name, text) == []
