"""The site's navigation has every page for users once, and no other: decision records and the log are for builders."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def pages(entry: Any) -> Iterator[str]:
    """The files in a navigation tree of {title: file or subtree}."""
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, list):
        for item in entry:
            yield from pages(item)
    else:
        for item in entry.values():
            yield from pages(item)


def test_every_page_is_in_the_navigation() -> None:
    project = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))["project"]
    written = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    written = {page for page in written if page != "LOG.md" and not page.startswith("adr/")}
    assert sorted(pages(project["nav"])) == sorted(written)
