"""No false alarm: every config that ships is free of findings, and so are the starters that `surefit init` writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.config.starter import starter_config
from surefit.lint.engine import run_rules

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))


def test_there_are_configs() -> None:
    assert CONFIGS


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_shipped_config_has_no_finding(path: Path, gather) -> None:
    findings = run_rules(gather(path, ROOT)).findings
    # `gather` audits no rows, so that an accepted finding of the audit is not found here.
    assert [f for f in findings if (f.code, f.field) != ("CFG005", "lint.ignore.AUD085")] == []


@pytest.mark.parametrize("recipe", ["function_calling", "chat"])
def test_a_starter_only_asks_for_its_data(recipe: str, gather, tmp_path: Path) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(starter_config(recipe), encoding="utf-8")
    findings = run_rules(gather(path)).findings
    assert {finding.code for finding in findings} <= {"DAT001"}
    assert all("no such file" in finding.message for finding in findings)
