"""The page about common cards is what the planner says now: one row of it, for the whole takes minutes."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/cards.py"))
TEXT = SCRIPT["PAGE"].read_text(encoding="utf-8")


def section(card: str) -> str:
    return str(re.split(r"^## ", TEXT, flags=re.MULTILINE)[2 + SCRIPT["CARDS"].index(card)])


@pytest.mark.slow
def test_a_row_is_up_to_date() -> None:
    """One that has all kinds of cells: it fits, it does not, beyond the context."""
    model = "Qwen/Qwen3-14B"
    row = SCRIPT["plan_row"](SCRIPT["planner_of"](model), "t4", "QLoRA")
    assert [cell.verdict for cell in row.cells] == ["fits", "does not fit", "does not fit", "too long"]
    assert SCRIPT["row_line"](model, "QLoRA", row) in section("t4").splitlines(), "run `make cards`"


def test_the_page_says_what_it_is_of() -> None:
    assert SCRIPT["CONFIG"] in TEXT
    assert "**Planned, not measured.**" in TEXT


@pytest.mark.parametrize("card", SCRIPT["CARDS"])
def test_every_model_and_method_is_in_every_card_s_section(card: str) -> None:
    text = section(card)
    assert f"`--gpu {card}`. Planned, not measured." in text
    for label in SCRIPT["MODELS"].values():
        for method in SCRIPT["METHODS"]:
            assert (f"| {label} | {method} |" in text) != (f"{label} {method} (at least" in text)
