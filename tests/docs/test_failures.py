"""docs/failures.md: every code it names exists, and every rule that tests/systems asks for is in it."""

from __future__ import annotations

import re
from pathlib import Path

from surefit.lint.engine import all_rules
from surefit.lint.rules import FAMILIES

ROOT = Path(__file__).parents[2]
CODE = re.compile(rf"\b(?:{'|'.join(FAMILIES)})\d{{3}}\b")


def test_the_table_names_rules_that_exist() -> None:
    named = set(CODE.findall((ROOT / "docs/failures.md").read_text(encoding="utf-8")))
    assert named <= {rule.code for rule in all_rules()}


def test_what_the_reconstructions_ask_for_is_in_the_table() -> None:
    named = set(CODE.findall((ROOT / "docs/failures.md").read_text(encoding="utf-8")))
    asked = {code for file in (ROOT / "tests/systems").glob("test_*.py") for code in CODE.findall(file.read_text())}
    assert asked - {"DAT001"} <= named
