"""The manual: generated pages say what the code says, and the pages for users keep to what a reader can walk."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
SCRIPT = runpy.run_path(str(ROOT / "scripts/manual.py"))
GUIDES = sorted([*DOCS.glob("guides/*.md"), DOCS / "quickstart.md", DOCS / "how-a-run-works.md", DOCS / "faq.md"])
MOST_WORDS = 900
MOST_MEAN_SENTENCE = 25
MOST_SENTENCE = 45


def prose(text: str) -> str:
    """A page without its code, tables, headings and links' targets."""
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\]\([^)]*\)", "]", text)
    return "\n".join(line for line in text.splitlines() if not line.startswith(("|", "#")))


def sentences(text: str) -> list[list[str]]:
    """The sentences of a page's prose, as words; a list's entry is at least one."""
    parts = re.split(r"(?<=[.:!?])\s+(?=[A-Z`*\[])|\n\s*(?:[-*]|\d+\.)\s|\n\n", prose(text))
    return [words for words in (part.split() for part in parts) if words]


@pytest.mark.parametrize("page", sorted(SCRIPT["PAGES"]))
def test_a_generated_page_is_up_to_date(page: str) -> None:
    assert (DOCS / page).read_text(encoding="utf-8") == SCRIPT["PAGES"][page](), "run `make reference`"


def test_the_command_line_page_has_every_option() -> None:
    page = SCRIPT["cli_page"]()
    for line in ("## surefit train", "| `--resume` |", "| `--gpu` GPU |", "surefit import [OPTIONS] FILE"):
        assert line in page


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_is_short_and_plain(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lengths = [len(words) for words in sentences(text)]
    assert len(text.split()) <= MOST_WORDS
    assert sum(lengths) / len(lengths) <= MOST_MEAN_SENTENCE
    assert max(lengths) <= MOST_SENTENCE, max(sentences(text), key=len)


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.name)
def test_a_guide_begins_with_what_you_get_and_shows_a_command(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    first = text.split("\n\n")[1]
    assert page.name == "faq.md" or not first.startswith(("|", "#", "```json")), "a table before a word"
    assert page.name == "faq.md" or re.search(r"^```(bash|yaml)", text, re.MULTILINE)


def test_long_sentences_are_seen() -> None:
    assert max(map(len, sentences("# A\n\nShort one. Then " + "word " * 50 + "end.\n\n- a list\n- of two"))) == 52
