"""The report in a real browser: Debian's chromium, driven by Playwright."""

from __future__ import annotations

import json
import runpy
import shutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from surefit.core.rundir import RunDir, write_json
from surefit.report.build import build_report
from surefit.report.comparison import build_comparison
from surefit.task import mean_scores

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
MAKE = runpy.run_path(str(Path(__file__).parents[1] / "unit" / "report" / "make_run.py"))
SIDEWAYS = "document.documentElement.scrollWidth - window.innerWidth"
PAINTED = """canvas => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const seen = new Set();
    for (let i = 0; i < pixels.length; i += 4) if (pixels[i + 3] > 200) seen.add(pixels.slice(i, i + 3).join());
    return seen.size;
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_report(MAKE["write_run"](tmp_path_factory.mktemp("run")))


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A page with all its parts: baselines, grammars, failed checks, a dry pass, a batch audit."""
    run: RunDir = MAKE["write_run"](tmp_path_factory.mktemp("everything"))
    summary = json.loads(run.eval_summary.read_text())
    scores = summary["sets"]["eval"]
    scores["variants"] |= {f"{name}+grammar": scores["variants"][name] for name in ("base", "merged")}
    scores["variants"]["baseline:lead-3"] = scores["variants"]["base"]
    line = next(c for c in scores["comparisons"] if c["b"] == "merged" and c["metric"] == "ast_accuracy")
    pairs = [("baseline:lead-3", "merged"), ("base+grammar", "merged+grammar"), ("merged", "merged+grammar")]
    scores["comparisons"] += [line | {"a": a, "b": b} for a, b in pairs]
    write_json(run.eval_summary, summary)
    certificate = json.loads(run.certificate.read_text())
    certificate["checks"][1]["passed"] = certificate["passed"] = False
    write_json(run.certificate, certificate)
    phases = {"dry step": {"resident": 5 * 10**8}}
    write_json(
        run.dry_pass, {"tokens": 4096, "loss": 2.5, "step_seconds": 1.2, "checkpoint_bytes": 9, "phases": phases}
    )
    shown = {"example": "micro batch 1", "tokens": 9, "supervised_tokens": 4, "before": "a", "begins": "b", "ends": "c"}
    seen = {"attention": {"rows": 1, "of": 20}}
    write_json(run.batch_audit, {"micro_batches": 5, "examples": 20, "observations": seen, "shown": [shown]})
    run.plan.write_text(run.plan.read_text()[:-9])  # a damaged file has its own box
    return build_report(run)


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    one: RunDir = MAKE["write_run"](folder / "one")
    build_report(one)
    two = RunDir(Path(shutil.copytree(one.path, folder / "two")))
    two.resolved.write_text(two.resolved.read_text().replace("  r: 16 ", "  r: 4 "))
    recipe: Any = SimpleNamespace(
        name="r", primary_metric="ast_accuracy", aggregate=mean_scores, parts={}, free_text=False
    )
    return build_comparison([one, two], folder / "compare.html", lambda name: recipe)


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, the accessibility checker."""
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("which", ["everything", "comparison"])
def test_axe_finds_nothing_at_three_widths(
    browser: Browser, request: pytest.FixtureRequest, axe: str, which: str, scheme: str
) -> None:
    file: Path = request.getfixturevalue(which)
    page, noise = visit(browser, file, color_scheme=scheme)
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    page.evaluate(axe)
    for width in (1280, 800, 390):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate(SIDEWAYS) == 0
        found = page.evaluate(
            "axe.run(document).then(r => r.violations.map(v => [v.id, v.help, v.nodes.slice(0, 3).map(n => n.html)]))"
        )
        assert found == []
    assert noise == []
    page.close()


def test_examples_are_filtered_by_kind_set_and_text(browser: Browser, report: Path) -> None:
    page, noise = visit(browser, report, viewport={"width": 1280, "height": 900})
    page.locator("details.more > summary").click()
    said = page.locator("#example-count")
    assert said.inner_text() == "73 of 73 shown"
    page.get_by_role("checkbox", name="Won").uncheck()
    assert said.inner_text() == "43 of 73 shown"
    page.locator("#example-filter select").select_option("old_tools")
    assert said.inner_text() == "28 of 73 shown"
    page.get_by_label("Containing").fill("zurich to LUSAKA")
    shown = page.locator("details.example:visible")
    assert 0 < shown.count() < 28
    assert all("Zurich to Lusaka" in (text or "") for text in shown.all_text_contents())
    page.get_by_role("button", name="Open all").press("Enter")
    assert page.locator("details.example[open]:visible").count() == shown.count()
    page.get_by_role("button", name="Close all").click()
    assert page.locator("details.example[open]:visible").count() == 0
    assert noise == []
    page.close()


def test_the_comparison_draws_all_runs_and_links_to_their_pages(browser: Browser, comparison: Path) -> None:
    page, noise = visit(browser, comparison, viewport={"width": 1280, "height": 900})
    assert page.locator(".chart canvas").count() == 6
    assert page.locator("#chart-loss .u-legend").inner_text().count("one") == 1
    page.get_by_role("link", name="Side by side").click()
    page.get_by_role("link", name="one", exact=True).click()
    page.wait_for_selector("#examples")
    assert noise == [page.url]
    page.close()


def visit(browser: Browser, report: Path, **options: Any) -> tuple[Page, list[str]]:
    """Open the page; the list fills with console messages, errors and requests to anywhere but the file."""
    page = browser.new_page(**options)
    noise: list[str] = []
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: None if request.url == report.as_uri() else noise.append(request.url))
    page.goto(report.as_uri())
    page.wait_for_selector("#chart-loss canvas")
    return page, noise


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800, 390, 320])
def test_it_fits_draws_and_is_quiet(browser: Browser, report: Path, width: int, scheme: str) -> None:
    page, noise = visit(browser, report, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate(SIDEWAYS) == 0
    page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
    assert page.evaluate(SIDEWAYS) == 0
    canvases = page.locator(".chart canvas").all()
    assert len(canvases) == 5
    for canvas in canvases:
        assert canvas.evaluate(PAINTED) > 5
    for box in [figure.bounding_box() for figure in page.locator(".charts figure").all()]:
        assert box is not None
        assert box["x"] + box["width"] <= width
    assert noise == []
    page.close()


def test_dark_mode_follows_the_system_and_back(browser: Browser, report: Path) -> None:
    page, noise = visit(browser, report, color_scheme="light")
    background = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(background) == "rgb(246, 246, 243)"
    before = page.locator("#chart-loss canvas").evaluate("canvas => canvas.toDataURL()")
    page.emulate_media(color_scheme="dark")
    assert page.evaluate(background) == "rgb(17, 19, 22)"
    page.wait_for_function("before => document.querySelector('#chart-loss canvas').toDataURL() !== before", arg=before)
    page.emulate_media(color_scheme="light")
    page.wait_for_function("before => document.querySelector('#chart-loss canvas').toDataURL() === before", arg=before)
    assert noise == []
    page.close()


def test_the_charts_zoom_together_by_keyboard_and_by_mouse(browser: Browser, report: Path) -> None:
    page, noise = visit(browser, report, viewport={"width": 1280, "height": 1600})
    pictures = "[...document.querySelectorAll('.chart canvas')].map(canvas => canvas.toDataURL())"
    page.get_by_text("More curves").click()
    page.wait_for_function("() => document.querySelector('#chart-grad_norm .uplot').offsetWidth < 400")
    whole = page.evaluate(pictures)
    page.get_by_role("button", name="Zoom in").focus()
    page.keyboard.press("Enter")
    page.wait_for_function(f"before => {pictures}.every((picture, i) => picture !== before[i])", arg=whole)
    page.get_by_role("button", name="All steps").click()
    page.wait_for_function(f"before => {pictures}.every((picture, i) => picture === before[i])", arg=whole)
    page.locator("#chart-grad_norm .u-over").scroll_into_view_if_needed()
    box = page.locator("#chart-grad_norm .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 20, box["y"] + 40)
    page.mouse.down()
    page.mouse.move(box["x"] + 80, box["y"] + 40, steps=4)
    page.mouse.up()
    page.wait_for_function(f"before => {pictures}.every((picture, i) => picture !== before[i])", arg=whole)
    assert noise == []
    page.close()


def test_hovering_reads_the_values_of_the_log(browser: Browser, report: Path) -> None:
    page, _ = visit(browser, report, viewport={"width": 1280, "height": 1600})
    chart = page.locator("#chart-loss")
    chart.scroll_into_view_if_needed()
    box = chart.locator(".u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] - 1, box["y"] + 20)
    page.wait_for_function("document.querySelector('#chart-loss .u-legend').innerText.includes('400')")
    assert chart.locator(".u-legend .u-value").nth(2).inner_text() == "0.09065"
    page.close()


def test_the_charts_follow_the_width_of_the_window(browser: Browser, report: Path) -> None:
    page, noise = visit(browser, report, viewport={"width": 1280, "height": 900})
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_function("document.querySelector('#chart-loss .uplot').offsetWidth < 390")
    assert page.evaluate(SIDEWAYS) == 0
    assert noise == []
    page.close()


HEIGHT = "document.documentElement.scrollHeight"


def test_it_opens_short_and_all_of_it_can_be_unfolded(browser: Browser, report: Path, comparison: Path) -> None:
    for file in (report, comparison):
        page, noise = visit(browser, file, viewport={"width": 1280, "height": 900})
        assert page.evaluate(HEIGHT) < 5000
        page.set_viewport_size({"width": 390, "height": 900})
        assert page.evaluate(HEIGHT) < 8000
        page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert page.evaluate(HEIGHT) > 8000
        assert noise == []
        page.close()


def test_long_answers_scroll_in_their_boxes(browser: Browser, tmp_path: Path) -> None:
    run: RunDir = MAKE["write_run"](tmp_path / "long")
    for path in run.eval.glob("*/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        long = {"prompt": "Sum up. " * 400, "gold": "word " * 500, "text": "word " * 500}
        path.write_text("".join(json.dumps(line | long) + "\n" for line in lines))
    page, _ = visit(browser, build_report(run), viewport={"width": 1280, "height": 900})
    assert page.locator(".sample").count() == 5
    assert page.evaluate(HEIGHT) < 5000
    page.close()


def test_a_link_opens_the_folded_part_that_it_names(browser: Browser, report: Path) -> None:
    page, noise = visit(browser, report, viewport={"width": 1280, "height": 900})
    opened = page.locator(".fold > details[open]")
    assert opened.count() == 0
    page.get_by_role("link", name="Configuration").click()
    assert opened.locator("#configuration").is_visible()
    assert opened.count() == 1
    page.locator("#configuration").click()
    assert opened.count() == 0
    page.get_by_role("link", name="Configuration").click()  # the address is the same as before
    assert opened.count() == 1
    assert noise == []
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#certificate")
    page.wait_for_function("() => document.querySelector('.fold > details[open] #certificate')")
    page.wait_for_function("() => document.getElementById('certificate').getBoundingClientRect().top < 900")
    # A search of the browser reveals what it finds as a text fragment does.
    page.goto("about:blank")
    page.goto(f"{report.as_uri()}#:~:text=Installed%20packages%20at%20the%20start")
    page.wait_for_function("() => document.querySelector('.fold > details[open] #environment')")
    page.close()


def test_the_numbers_of_an_axis_differ(browser: Browser, tmp_path: Path) -> None:
    """The y axis said 78.45 three times where the free space had five digits."""
    run: RunDir = MAKE["write_run"](tmp_path / "axis", steps=20)
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    lines = [line | {"learning_rate": 0.0123456 + line["step"] * 1e-8} for line in lines]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    drawn = "CanvasRenderingContext2D.prototype.fillText"
    page = browser.new_page()
    page.add_init_script(
        f"window.texts = []; const draw = {drawn};"
        f"{drawn} = function (text, ...rest) {{"
        " window.texts.push([this.canvas.closest('.chart')?.id, text]); draw.call(this, text, ...rest); };"
    )
    page.goto(build_report(run).as_uri())
    page.wait_for_selector("#chart-loss canvas")
    page.get_by_text("More curves").click()
    page.wait_for_timeout(200)
    texts = [text for name, text in page.evaluate("window.texts") if name == "chart-learning_rate"]
    rates = {text for text in texts if text.startswith("0.01234")}
    assert len(rates) >= 3
    assert "0.01235" not in rates
    page.close()


def test_nothing_moves_for_those_who_asked_for_that(browser: Browser, report: Path) -> None:
    page, _ = visit(browser, report, reduced_motion="reduce")
    assert page.evaluate("getComputedStyle(document.documentElement).scrollBehavior") == "auto"
    page.close()


def test_on_paper_it_is_light_and_open_and_afterwards_as_before(browser: Browser, report: Path) -> None:
    page, noise = visit(browser, report, color_scheme="dark")
    closed = page.locator("details:not([open])").count()
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open], .prompt, .example)").count() == 0
    assert page.evaluate("getComputedStyle(document.documentElement).getPropertyValue('--bg')") == "#f6f6f3"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details:not([open])").count() == closed
    assert len(page.pdf(format="A4")) > 50_000
    assert noise == []
    page.close()


def test_a_script_smuggled_into_the_page_is_not_run(browser: Browser, report: Path) -> None:
    """The policy is a second wall: even unescaped text could run or load nothing."""
    page, noise = visit(browser, report)
    page.evaluate("""() => {
        const script = document.createElement("script");
        script.textContent = "window.owned = true";
        document.body.append(script);
        const image = "<img src='http://localhost:9/x.png' onerror='window.owned = true'>";
        document.body.insertAdjacentHTML("beforeend", image);
    }""")
    page.wait_for_timeout(200)
    assert page.evaluate("window.owned") is None
    assert any("Content Security Policy" in message for message in noise)
    page.close()
