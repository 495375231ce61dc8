"""Links between our own pages lead somewhere, headings included, and no page is unfinished."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)|^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
FENCE = re.compile(r"^(`{3,}|~{3,}).*?^\1`*\s*$", re.MULTILINE | re.DOTALL)


def links(text: str) -> Iterator[str]:
    """The targets of inline and reference links, outside code."""
    prose = re.sub(r"`[^`\n]+`", "", FENCE.sub("", text))
    yield from (inline or reference for inline, reference in LINK.findall(prose))


def anchors(text: str) -> set[str]:
    """The ids that the site gives to headings."""
    headings = re.findall(r"^#+\s+(.+?)\s*#*$", FENCE.sub("", text), re.MULTILINE)
    words = (re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"[-\s]+", "-", word) for word in words}


def broken(page: Path) -> Iterator[str]:
    for link in links(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z0-9+.-]*:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in anchors(target.read_text(encoding="utf-8"))):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_internal_links_resolve(page: Path) -> None:
    assert list(broken(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_nothing_is_left_to_fill_in(page: Path) -> None:
    assert re.findall(r"@@\w+@@|\b(?:TODO|FIXME|TBD)\b", page.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`\n[a](#one-two) [b](#three) [c](gone.md 'x')\n`[d](code.md)`\n[e](https://x.test)\n\n[f]: lost.md\n"
    )
    assert list(broken(page)) == ["#three", "lost.md"]
