"""Every rule that offers a fix: written into its bad config, the finding is gone, and the config is still one."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.config.edit import edit_text
from surefit.lint.engine import all_rules, run_rules

HERE = Path(__file__).parent
RULES = [rule.code for rule in all_rules() if (HERE / rule.code / "bad.yaml").exists()]
FIXED = {"BAT001", "CFG003", "CFG005", "PRC001", "PRC002", "SCH001", "SCH002"}
"""Rules that must offer one; others may."""


@pytest.mark.parametrize("code", RULES)
def test_a_fix_removes_its_finding(code: str, gather, tmp_path: Path) -> None:
    path = HERE / code / "bad.yaml"
    context = gather(path)
    fixes = [finding.fix for finding in run_rules(context).findings if finding.fix]
    assert fixes or code not in FIXED
    if not fixes:
        return
    edited = edit_text(path.read_text(encoding="utf-8"), {fix.field: fix.value for fix in fixes}, path)
    assert edited.refused == {}
    mended = tmp_path / "mended.yaml"
    mended.write_text(edited.text, encoding="utf-8")
    assert code not in {finding.code for finding in run_rules(gather(mended, path.parent)).findings}
