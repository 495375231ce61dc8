"""The form of the code, as scripts/house.py reads it: what must stay at zero, and what may not grow."""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def house() -> Any:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        return importlib.import_module("house")
    finally:
        sys.path.remove(str(ROOT / "scripts"))


@pytest.fixture(scope="module")
def found(house: Any) -> Any:
    return house.modules()


def test_no_two_files_import_each_other(house: Any, found: Any) -> None:
    assert house.circles(found) == []


def test_nothing_is_defined_that_nobody_uses(house: Any, found: Any) -> None:
    assert house.without_caller(found) == []


def test_other_packages_are_only_changed_where_it_is_stated(house: Any, found: Any) -> None:
    assert house.patches(found) == []


def test_every_error_has_a_code_of_its_own() -> None:
    sys.path.insert(0, str(ROOT / "scripts"))
    try:
        assert importlib.import_module("error_codes").problems() == []
    finally:
        sys.path.remove(str(ROOT / "scripts"))


def test_functions_stay_short(house: Any, found: Any) -> None:
    lengths = sorted(house.function_lengths(found))
    assert lengths[len(lengths) // 2] <= 8
    assert lengths[int(0.9 * len(lengths))] <= 25
    assert lengths[-1] <= 80


def test_docstrings_say_what_they_are_about(house: Any, found: Any) -> None:
    assert house.unclear_docstrings(found) == []


def test_no_public_class_has_the_name_of_another(house: Any, found: Any) -> None:
    names = [node.name for module in found for node in module.definitions if isinstance(node, ast.ClassDef)]
    assert [name for name, count in Counter(names).items() if count > 1 and not name.startswith("_")] == []
    assert len(house.defined_twice(found)) <= 40


@pytest.mark.parametrize(
    ("kind", "most"),
    [("a parallel mode", 4), ("an optimizer", 2), ("a telemetry sink", 3), ("a recipe", 3), ("a rule", 1)],
)
def test_an_addition_touches_few_files(house: Any, found: Any, kind: str, most: int) -> None:
    files = house.touched(found, house.EXEMPLARS[kind])
    assert len(files) <= most, files


def test_what_it_looks_for_it_would_find(house: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text(
        "import torch\nfrom surefit.b import used\n\n\ndef lonely():\n    torch.compile = used\n"
    )
    (tmp_path / "b.py").write_text("def used():\n    from surefit import a\n    return a\n")
    monkeypatch.setattr(house, "SOURCE", tmp_path)
    found = house.report()
    assert found["circles"] == [["a.py", "b.py"]]
    assert found["circles_with_types"] == [["a.py", "b.py"]]
    assert found["without_caller"] == ["a.py:5 lonely"]
    assert found["patches_outside_their_place"] == ["a.py:6 torch.compile"]
