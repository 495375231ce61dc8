"""PAR013 beyond its fixtures: a model whose config.json asks for the routers' loss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit.config.schema import SureFitConfig
from surefit.facts.model import model_facts
from surefit.lint.engine import all_rules, run_rules
from surefit.lint.rule import LintContext

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96, "vocab_size": 512,
    "num_local_experts": 4, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "asked", "field"),
    [
        ({"mode": "pp", "pp": 2}, True, "parallel.pp"),
        ({"mode": "cp", "cp": 2}, True, "parallel.cp"),
        ({"mode": "fsdp", "cp": 2}, True, "parallel.cp"),
        ({"mode": "ddp"}, True, None),
        ({"mode": "pp", "pp": 2}, False, None),
    ],
)
def test_the_routers_loss_needs_all_layers_and_tokens(
    parallel: dict[str, Any], asked: bool, field: str | None, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MIXTRAL | {"output_router_logits": asked}))
    tree = {"model": {"name_or_path": str(tmp_path)}, "data": {"train": "rows"}, "output_dir": "runs/x"}
    config = SureFitConfig.model_validate(tree | {"parallel": parallel})
    context = LintContext(config, tmp_path / "run.yaml", {}, model=model_facts(str(tmp_path)))
    findings = run_rules(context, [rule for rule in all_rules() if rule.code == "PAR013"]).findings
    assert [finding.field for finding in findings] == ([field] if field else [])
    assert all("output_router_logits" in finding.message for finding in findings)
