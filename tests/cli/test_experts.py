"""A mixture of experts whose routers are trained, from a config as typed to what plain libraries read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tests.cli.conftest import Surefit
from transformers import AutoModelForCausalLM
from typed_run import FILE, done, logits, save_base, type_run

from surefit.config.schema import LoraSection, ModelSection
from surefit.core.errors import ConfigError
from surefit.model.adapter import add_adapter, load_initial_adapter

IDS = torch.arange(16)[None]


def typed(folder: Path, experts: str) -> Path:
    return type_run(folder, f"{{r: 2, lora_alpha: 8, target_modules: [q_proj, v_proj], experts: {experts}}}")


def test_routers_are_trained_merged_and_read_by_plain_libraries(surefit: Surefit, tmp_path: Path) -> None:
    before, config = save_base("qwen3_moe", tmp_path / "base"), typed(tmp_path, "with_router")
    for verb in ("train", "merge"):
        done(surefit, verb, config)
    after = load_file(tmp_path / "out/merged" / FILE)
    # A server finds every tensor under the name that the base's files have.
    assert {name: tensor.shape for name, tensor in after.items()} == {
        name: tensor.shape for name, tensor in before.items()
    }
    routers = [name for name in before if name.endswith("mlp.gate.weight")]
    assert len(routers) == 2
    assert not any(torch.equal(before[name], after[name]) for name in routers)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    tuned = PeftModel.from_pretrained(plain, str(tmp_path / "out/adapter"))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out/merged")
    torch.testing.assert_close(logits(merged, IDS), logits(tuned, IDS), rtol=1e-4, atol=1e-5)
    for asked in ("true", "false"):  # what was trained with routers goes on with them
        config = typed(tmp_path, asked)
        config.write_text(config.read_text().replace("experts:", "start_from: out/adapter, experts:"))
        said = f"was trained with experts with_router, but lora.experts is {asked}"
        assert said in " ".join(surefit("check", config).text.split())
    section = LoraSection(r=2, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    fresh = add_adapter(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), section)
    with pytest.raises(ConfigError, match="the adapter has experts with_router, but the config has false"):
        load_initial_adapter(fresh, tmp_path / "out/adapter", ModelSection(name_or_path=str(tmp_path / "base")))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("afmoe", "base has no routers that can get factors"),
        ("jetmoe", "base has no experts that can get factors"),  # a layout that PEFT cannot reach
        ("qwen3", "base has no experts that can get factors"),
    ],
)
def test_what_peft_cannot_reach_is_refused(kind: str, said: str, surefit: Surefit, tmp_path: Path) -> None:
    save_base(kind, tmp_path / "base")
    answer = surefit("check", typed(tmp_path, "with_router"))
    assert answer.code == 1
    assert "run.yaml:2: error[ADP009] lora.experts" in answer.text
    assert said in answer.text
