"""The rules on SureFit's own adapter section, beyond their fixtures: what rsLoRA and DoRA can be combined with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import LoadedConfig
from surefit.config.resolve import resolve_config
from surefit.config.schema import SureFitConfig
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.facts.setup import setup_of
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import Finding, LintContext

RULES = [rule for rule in all_rules() if rule.code in ("ADP005", "ADP006", "CFG003")]
DORA = {"use_dora": True}


def found(adapter: dict[str, Any], **sections: Any) -> list[Finding]:
    lines = {f"lora.{name}": number for number, name in enumerate(adapter, 1)}
    tree = {"model": {"name_or_path": "base"}, "data": {"train": "rows"}, "output_dir": "runs/x", "lora": adapter}
    config = SureFitConfig.model_validate(tree | {name: values for name, values in sections.items() if name != "model"})
    config = config.model_copy(update={"model": config.model.model_copy(update=sections.get("model", {}))})
    context = LintContext(config, Path("run.yaml"), lines, setup=setup_of(config, None))
    return run_rules(context, RULES).findings


@pytest.mark.parametrize(
    ("sections", "field", "words"),
    [
        ({}, None, ""),
        ({"model": {"quantization": "nf4"}}, None, ""),
        ({"model": {"quantization": "fp8"}}, "lora.use_dora", "reads float8 weights without their scales"),
        ({"speed": {"fused_lora": True}}, "speed.fused_lora", "it computes plain LoRA"),
        ({"speed": {"compile": True}}, "speed.compile", "DoRA and compiled layers"),
        ({"parallel": {"mode": "ddp"}}, None, ""),
        ({"parallel": {"mode": "fsdp"}}, None, ""),
        ({"parallel": {"mode": "tp", "tp": 2}}, "lora.use_dora", "parallel.mode tp and DoRA"),
        ({"parallel": {"mode": "cp", "cp": 2}}, "lora.use_dora", "shared tokens and DoRA"),
        ({"parallel": {"mode": "fsdp", "cp": 2}}, "lora.use_dora", "shared tokens and DoRA"),
        ({"parallel": {"mode": "zero3"}}, "lora.use_dora", "parallel.mode zero3 and DoRA"),
    ],
)
def test_what_dora_goes_with(sections: dict[str, Any], field: str | None, words: str) -> None:
    findings = found(DORA, **sections)
    assert [finding.field for finding in findings] == ([field] if field else [])
    assert all(words in finding.message and finding.help for finding in findings)
    assert [finding for finding in found({"use_rslora": True}, **sections) if finding.code == "ADP006"] == []


def test_with_full_training_they_have_no_effect() -> None:
    findings = found({"use_dora": True, "use_rslora": True}, train={"method": "full"})
    assert {finding.code for finding in findings} == {"CFG003"}
    assert {finding.field for finding in findings} == {"lora.use_rslora", "lora.use_dora"}


@pytest.mark.parametrize("key", ["use_rslora", "use_dora"])
def test_an_adapter_goes_on_as_it_was_trained(tmp_path: Path, key: str) -> None:
    (tmp_path / "adapter_model.safetensors").touch()
    (tmp_path / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 32, key: True})
    )
    (one,) = found({"start_from": str(tmp_path)})
    assert one.field == f"lora.{key}"
    assert one.message.endswith(f"was trained with {key} true, but lora.{key} is false")
    assert found({"start_from": str(tmp_path), key: True}) == []


def test_fused_lora_is_off_with_its_reason() -> None:
    tree = {"model": {"name_or_path": "base"}, "data": {"train": "rows"}, "output_dir": "runs/x", "lora": DORA}
    loaded = LoadedConfig(SureFitConfig.model_validate(tree), Path("run.yaml"), {}, frozenset())
    resolved = resolve_config(loaded, model_facts("surefit/nano"), hardware_facts("h100"), None)
    assert resolved.config.speed.fused_lora is False
    assert resolved.provenance["speed.fused_lora"].detail == "it computes plain LoRA, without DoRA's magnitudes"
