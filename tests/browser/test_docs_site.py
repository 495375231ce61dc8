"""The built manual in a real browser: what people type into the search finds its guide, and pages fit a phone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]
CHROMIUM = Path("/usr/bin/chromium")
QUERIES: dict[str, list[str]] = json.loads((Path(__file__).parent / "queries.json").read_text(encoding="utf-8"))
"""What people type → the pages of which one must be among the first three found."""
MOST_MISSED = 2
FOUND = """() => {
    const inside = root => [...root.querySelectorAll("*")].flatMap(
        element => [...(element.tagName === "A" && element.href ? [element.href] : []),
                    ...(element.shadowRoot ? inside(element.shadowRoot) : [])]);
    return [...document.querySelectorAll("*")].filter(element => element.shadowRoot)
        .flatMap(element => inside(element.shadowRoot));
}"""


class Quiet(SimpleHTTPRequestHandler):
    """A server that does not print its requests."""

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the site, built from a copy of the pages."""
    pytest.importorskip("zensical", reason="zensical is not installed")
    folder = tmp_path_factory.mktemp("site")
    shutil.copytree(ROOT / "docs", folder / "docs")
    shutil.copy(ROOT / "zensical.toml", folder)
    subprocess.run([sys.executable, "-m", "zensical", "build"], cwd=folder, check=True, capture_output=True)
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder / "site")))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox", "--disable-gpu"])
        yield browser.new_page()
        browser.close()


def found(page: Page, site: str, query: str) -> list[str]:
    """The pages that the search shows for a query, best first, each once."""
    page.keyboard.press("Control+a")
    page.keyboard.type(query)
    seen: list[str] = []
    for _ in range(20):  # until two looks show the same: the search runs in a worker, and a busy machine takes its time
        page.wait_for_timeout(300)
        links = [link.removeprefix(f"{site}/").split("#")[0].split("?")[0] for link in page.evaluate(FOUND)]
        pages = list(dict.fromkeys(links))
        if pages and pages == seen:
            break
        seen = pages
    return seen


def test_what_people_type_finds_its_guide(page: Page, site: str) -> None:
    page.goto(f"{site}/index.html")
    page.click(".md-search__button")
    page.wait_for_timeout(1500)
    missed = {
        query: pages[:3]
        for query, right in QUERIES.items()
        if not set(right) & set((pages := found(page, site, query))[:3])
    }
    assert len(QUERIES) >= 40
    assert len(missed) <= MOST_MISSED, missed


@pytest.mark.parametrize("name", ["index", "quickstart", "guides/hyperparameters", "guides/lora", "reference/cli"])
def test_a_page_fits_a_phone(page: Page, site: str, name: str) -> None:
    page.set_viewport_size({"width": 390, "height": 800})
    page.goto(f"{site}/{name}.html")
    assert page.evaluate("document.documentElement.scrollWidth - window.innerWidth") <= 0
