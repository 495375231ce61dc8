"""The twelve searches of CONTRIBUTING.md: the field's word leads to the file in one try."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "surefit"
ROW = re.compile(r"^\| (?P<word>[^|`]+) \| `(?P<file>[^`]+\.py)` \| `(?P<name>\w+)` \|$", re.MULTILINE)
SEARCHES = ROW.findall((ROOT / "CONTRIBUTING.md").read_text())


def heads(word: str) -> list[str]:
    """Return the files that have the word in their first lines or in a definition's name."""
    name = rf"^(def|class) {re.sub('[ -]', '_', word)}"
    return [
        path.relative_to(SOURCE).as_posix()
        for path in sorted(SOURCE.rglob("*.py"))
        if word.lower() in "".join((text := path.read_text()).splitlines(keepends=True)[:4]).lower()
        or re.search(name, text, re.MULTILINE | re.IGNORECASE)
    ]


def test_there_are_twelve() -> None:
    assert len(SEARCHES) == 12


@pytest.mark.parametrize(("word", "file", "name"), SEARCHES)
def test_the_word_leads_to_its_file(word: str, file: str, name: str) -> None:
    assert heads(word) == [file]
    assert re.search(rf"^(def|class) {name}\b", (SOURCE / file).read_text(), re.MULTILINE)
