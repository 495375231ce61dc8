"""The figures of plans that pages quote are what the planner says now."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts/recipe_figures.py"))
MARKED = [
    (page.name, found["config"], tuple(found["given"].split()), found["figure"], found[5])
    for page in SCRIPT["pages"]()
    for found in SCRIPT["MARKED"].finditer(page.read_text(encoding="utf-8"))
]


def test_every_marker_names_a_config_and_a_figure() -> None:
    assert len(MARKED) >= 10
    assert {figure for _, _, _, figure, _ in MARKED} <= set(SCRIPT["FIGURES"])
    assert all((SCRIPT["ROOT"] / config).is_file() for _, config, *_ in MARKED)
    texts = [page.read_text(encoding="utf-8") for page in SCRIPT["pages"]()]
    assert sum(text.count("<!-- plan ") for text in texts) == len(MARKED), "one is malformed"


@pytest.mark.parametrize(("page", "config", "given", "figure", "text"), [m for m in MARKED if m[3] == "closed"])
def test_what_arithmetic_says_is_current(
    page: str, config: str, given: tuple[str, ...], figure: str, text: str
) -> None:
    assert SCRIPT["figure"](config, given, figure) == text, f"{page}: run `make figures`"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "config", "given", "figure", "text"),
    MARKED,
    ids=[f"TA8-{page}-{figure}" for page, _, _, figure, _ in MARKED],
)
def test_a_quoted_figure_is_current(page: str, config: str, given: tuple[str, ...], figure: str, text: str) -> None:
    assert SCRIPT["figure"](config, given, figure) == text, f"{page}: run `make figures`"
