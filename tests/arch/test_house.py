"""The form of the code, as scripts/house.py reads it: what must stay at zero, and what may not grow."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import house

        return house.report()
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_no_two_files_import_each_other(found: dict[str, Any]) -> None:
    assert found["circles"] == []


def test_nothing_is_defined_that_nobody_uses(found: dict[str, Any]) -> None:
    assert found["without_caller"] == []


def test_other_packages_are_only_changed_where_it_is_stated(found: dict[str, Any]) -> None:
    assert found["patches_outside_their_place"] == []


def test_functions_stay_short(found: dict[str, Any]) -> None:
    lines = found["function_lines"]
    assert lines["p50"] <= 8
    assert lines["p90"] <= 25
    assert lines["max"] <= 80


@pytest.mark.parametrize(
    ("kind", "most"), [("a parallel mode", 8), ("an optimizer", 5), ("a recipe", 3), ("a rule", 1)]
)
def test_an_addition_touches_few_files(found: dict[str, Any], kind: str, most: int) -> None:
    assert len(found["files_to_touch"][kind]) <= most, found["files_to_touch"][kind]


def test_what_it_looks_for_it_would_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        import house
    finally:
        sys.path.remove(str(ROOT / "scripts"))
    (tmp_path / "a.py").write_text(
        "import torch\nfrom surefit.b import used\n\n\ndef lonely():\n    torch.compile = used\n"
    )
    (tmp_path / "b.py").write_text("def used():\n    from surefit import a\n    return a\n")
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    found = house.report()
    assert found["circles"] == [["a.py", "b.py"]]
    assert found["without_caller"] == ["a.py:5 lonely"]
    assert found["patches_outside_their_place"] == ["a.py:6 torch.compile"]
