"""The pages in a real browser: Debian's chromium, driven by Playwright, with nothing but the server to talk to."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
from playwright.sync_api import Browser, Page, expect, sync_playwright

from surefit.core.rundir import RunDir, append_jsonl

pytestmark = pytest.mark.browser
CHROMIUM = Path("/usr/bin/chromium")
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
]  # fmt: skip
"""The last one is the network off: no name resolves."""
SIDEWAYS = "document.documentElement.scrollWidth - window.innerWidth"
PAGES = {
    "/rows": "#drop", "/run/chat?path=runs/first": "#message",
    "/runs": "table", "/config": ".starters", "/config?open=configs/nano.yaml": "#tally:has-text('rules')",
    "/planner": "#bars .stack", "/run?path=runs/first": "#charts canvas", "/run/examples?path=runs/first": ".example",
    "/compare?path=runs/first&path=runs/second": "figure.plot", "/run?path=nothing": "h1",
}  # fmt: skip
"""Address → what is there once the page has done its work."""
REACHABLE = """() => [...document.querySelectorAll("a, button, input, select, textarea, summary, [tabindex='0']")]
    .filter((node) => node.checkVisibility() && !node.disabled && node.type !== "hidden").length"""
FOCUSED = """() => {
    const node = document.activeElement, ring = getComputedStyle(node.closest(".code") ?? node);
    const label = node.labels?.length ? node.labels[0].innerText : node.getAttribute("aria-label") || node.innerText;
    const seen = ring.outlineStyle !== "none" && parseFloat(ring.outlineWidth) >= 1;
    return [[...document.querySelectorAll("*")].indexOf(node), Boolean(label.trim()), seen];
}"""
"""Its place in the page, whether it has a name, and whether one sees that it has the focus."""


DROPPED = """(text) => {
    const data = new DataTransfer();
    data.items.add(new File([text], "support rows.jsonl"));
    return data;
}"""
"""What a browser hands over when a file is dropped."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not CHROMIUM.exists():
        pytest.skip(f"{CHROMIUM} is not installed")
    expect.set_options(timeout=30_000)
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def axe() -> str:
    """The source of axe-core, the accessibility checker."""
    found = find_spec("axe_playwright_python")
    if found is None or found.origin is None:
        pytest.skip("axe-playwright-python is not installed")
    return (Path(found.origin).parent / "axe.min.js").read_text(encoding="utf-8")


def visit(browser: Browser, server: Any, target: str, **options: Any) -> tuple[Page, list[str]]:
    """Open a page; the list fills with console messages, errors, and requests to anywhere but the server."""
    page = browser.new_page(**options)
    name, _, value = server.cookie.partition("=")
    page.context.add_cookies([{"name": name, "value": value, "url": server.origin, "sameSite": "Strict"}])
    page.set_default_timeout(60_000)
    noise: list[str] = []
    ours = server.origin
    page.on("console", lambda message: noise.append(message.text))
    page.on("pageerror", lambda error: noise.append(str(error)))
    page.on("request", lambda request: None if request.url.startswith((ours, "data:")) else noise.append(request.url))
    page.goto(ours + target)
    page.wait_for_selector(PAGES.get(target, "main"))
    return page, noise


def quiet(noise: list[str], target: str) -> bool:
    """Whether nothing was said but that a page which is not there is not there."""
    return not [text for text in noise if not (target == "/run?path=nothing" and "404" in text)]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 820, 1280])
def test_every_page_fits_and_is_quiet_and_accessible(
    browser: Browser, server: Any, axe: str, width: int, scheme: str
) -> None:
    for target in PAGES:
        page, noise = visit(
            browser, server, target, viewport={"width": width, "height": 900}, color_scheme=scheme,
            reduced_motion="reduce",
        )  # fmt: skip
        page.evaluate("document.querySelectorAll('details').forEach(details => details.open = true)")
        assert page.evaluate(SIDEWAYS) == 0, target
        assert quiet(noise, target), (target, noise)
        page.evaluate(axe)
        found = page.evaluate("axe.run(document).then(r => r.violations.map(v => [v.id, v.nodes.map(n => n.html)]))")
        assert found == [], target
        page.close()


def test_the_planner_reacts(browser: Browser, server: Any) -> None:
    page, noise = visit(browser, server, "/planner", viewport={"width": 1280, "height": 900})
    verdict = page.locator("#verdict")
    page.get_by_label("Price per GPU and hour").fill("2")
    expect(verdict).to_contain_text("Fits")
    expect(page.locator("#facts dd").nth(3)).to_contain_text("at least")
    before = verdict.inner_text()
    with page.expect_response("**/api/fit") as answered:
        page.get_by_label("LoRA rank", exact=True).fill("64")
    assert answered.value.json()["milliseconds"] < 1000
    expect(verdict).not_to_have_text(before)
    page.get_by_label("GPU", exact=True).select_option("t4")
    expect(verdict).to_contain_text("Does not fit")
    assert page.locator("#bars .stack .capacity").count() == page.locator("#bars .stack").count() > 2
    page.get_by_label("Examples per step", exact=True).fill("7")
    page.get_by_label("Micro batch per GPU").select_option("4")
    expect(verdict).to_contain_text("not a multiple")
    page.get_by_label("Tokens per example, slider").press("Home")
    assert page.get_by_label("Tokens per example", exact=True).input_value() == "128"
    assert all("400" in text for text in noise), noise
    page.close()


def test_findings_appear_as_one_types_and_the_form_edits_the_text(browser: Browser, server: Any) -> None:
    page, noise = visit(browser, server, "/config?open=configs/nano.yaml", viewport={"width": 1280, "height": 900})
    text = page.get_by_label("Config", exact=True)
    original = text.input_value()
    text.focus()
    page.keyboard.press("Control+End")
    page.keyboard.type("trian: 3\n")
    page.wait_for_selector("#findings li:has-text('did you mean')")
    line = original.count("\n") + 1
    page.get_by_role("button", name=f"line {line}").click()
    assert (
        page.evaluate("getSelection().toString() || text.value.slice(text.selectionStart, text.selectionEnd)")
        == "trian: 3"
    )
    assert page.locator("#gutter .marked").inner_text().strip() == str(line)
    text.fill(original)
    page.wait_for_selector("#tally:has-text('rules')")
    page.get_by_label("lora.r", exact=True).fill("5")
    page.keyboard.press("Tab")
    expect(text).to_have_value(re.compile("r: 5"))
    assert [a for a, b in zip(original.splitlines(), text.input_value().splitlines(), strict=True) if a != b] != []
    page.get_by_label("Save as").fill("configs/mine.yaml")
    page.get_by_role("button", name="Save").click()
    page.wait_for_selector("#saved:has-text('Saved configs/mine.yaml')")
    assert (server.workspace / "configs" / "mine.yaml").read_text() == text.input_value()
    assert noise == []
    page.close()


def test_a_run_is_watched_as_it_goes_on(
    browser: Browser, start: Callable[..., Any], filled: Callable[[Path], Path], tmp_path: Path
) -> None:
    workspace = filled(tmp_path / "space")
    run = RunDir(workspace / "runs" / "first")
    with start(workspace) as server:
        page, noise = visit(browser, server, "/run?path=runs/first")
        assert page.locator("#charts canvas").count() == 6
        append_jsonl(run.metrics, {"step": 4321, "loss": 0.0123})
        expect(page.locator("#step")).to_have_text("4321")
        assert "0.0123" in page.locator("#charts figcaption").first.inner_text()
        run.note("merge", "started")
        expect(page.locator("#state")).to_have_text("merge started")
        page.goto(f"{server.origin}/run?path=runs/first&report")
        frame = page.frame_locator("iframe.report")
        expect(frame.get_by_role("heading", name="The verdict")).to_be_visible()
        assert noise == []
        page.close()


def test_examples_are_filtered_and_runs_compared(browser: Browser, server: Any) -> None:
    page, noise = visit(browser, server, "/run/examples?path=runs/first")
    assert page.locator(".example").count() == 20
    page.get_by_label("Rows", exact=True).select_option("won")
    page.get_by_role("button", name="Show").click()
    page.wait_for_selector(".example .pill:has-text('won')")
    assert page.locator(".example .pill:has-text('equal')").count() == 0
    page.goto(f"{server.origin}/runs")
    for name in ("runs/first", "runs/second"):
        page.get_by_label(f"Compare {name}").check()
    page.get_by_role("button", name="Compare those that are ticked").click()
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible()
    assert page.locator("figure.plot line.ci").count() >= 4
    assert noise == []
    page.close()


@pytest.mark.parametrize(
    "target",
    [
        "/rows",
        "/run/chat?path=runs/first",
        "/runs",
        "/config?open=configs/nano.yaml",
        "/planner",
        "/run/examples?path=runs/first",
    ],
)
def test_the_keyboard_is_enough(browser: Browser, server: Any, target: str) -> None:
    """Tab reaches every control in the order of the page, its focus can be seen, and it has a name."""
    page, _ = visit(browser, server, target, viewport={"width": 1280, "height": 900})
    reachable = page.evaluate(REACHABLE)
    seen = []
    for _ in range(reachable):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUSED))
    places = [place for place, _, _ in seen]
    assert places == sorted(places)
    assert len(set(places)) == reachable
    assert all(named for _, named, _ in seen)
    assert all(visible for _, _, visible in seen)
    page.close()


def test_a_script_in_what_a_model_answered_is_not_run(
    browser: Browser, start: Callable[..., Any], filled: Callable[[Path], Path], tmp_path: Path
) -> None:
    workspace = filled(tmp_path / "space")
    run = RunDir(workspace / "runs" / "first")
    text = "</pre><script>window.owned = true</script><img src=x onerror='window.owned = true'>"
    predictions = run.eval / "eval" / "merged.predictions.jsonl"
    predictions.write_text("")
    append_jsonl(predictions, {"index": 0, "text": text, "prompt": text, "gold": text, "scores": {}})
    with start(workspace) as server:
        page, noise = visit(browser, server, "/run/examples?path=runs/first&variant=merged")
        assert text in page.locator(".example pre").last.inner_text()
        assert page.evaluate("window.owned") is None
        assert noise == []
        page.evaluate(
            "document.body.insertAdjacentHTML('beforeend', `<img src='/nothing' onerror='window.owned = 1'>`)"
        )
        page.wait_for_timeout(300)
        assert page.evaluate("window.owned") is None
        page.close()


ECHO = """
import json, sys
print(json.dumps({"note": "loaded"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    before = [message for message, _ in asked["turns"]]
    print(json.dumps({"variant": "base", "text": f"{before}"}), flush=True)
    print(json.dumps({"done": True, "answers": {"base": f"{before}"}}), flush=True)
"""
"""In place of the chat worker: it answers with the messages that it was told of."""


def test_a_tab_keeps_its_conversation_whatever_becomes_of_the_process(
    browser: Browser, start: Callable[..., Any], filled: Callable[[Path], Path], tmp_path: Path
) -> None:
    workspace = filled(tmp_path / "space")
    run = RunDir(workspace / "runs" / "first")
    run.resolved.write_text("recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: x}\noutput_dir: x\n")
    with start(workspace, worker=ECHO) as server:

        def say(page: Page, message: str, before: list[str]) -> None:
            page.get_by_label("Message").fill(message)
            page.keyboard.press("Enter")
            expect(page.locator(".reply .said").last).to_have_text(f"{before}")
            expect(page.locator("#submit")).to_be_enabled()

        pages = [visit(browser, server, "/run/chat?path=runs/first") for _ in range(2)]
        (one, noise), (two, _) = pages
        for page in (one, two):
            page.get_by_label("Who answers").select_option("base")
        say(one, "a", [])
        say(two, "x", [])
        say(one, "b", ["a"])
        worker = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children").read_text().split()
        assert len(worker) == 1
        os.kill(int(worker[0]), signal.SIGKILL)
        say(one, "c", ["a", "b"])
        say(two, "y", ["x"])
        (run.path / "merged").mkdir(exist_ok=True)
        (run.path / "merged" / "model.safetensors").write_bytes(b"trained again")
        say(two, "z", ["x", "y"])
        expect(two.locator("#turns")).to_contain_text("trained again")
        one.get_by_role("button", name="New conversation").click()
        say(one, "d", [])
        assert "trained again" not in one.locator("#turns").inner_text(), "nothing was said before"
        with run.locked("train"):
            one.get_by_label("Message").fill("e")
            one.keyboard.press("Enter")
            expect(one.locator("#said")).to_contain_text("surefit train")
            assert one.get_by_label("Message").input_value() == "e"
        say(one, "e", ["d"])
        assert all("409" in text for text in noise), noise
        for page in (one, two):
            page.close()


def test_a_config_that_could_not_be_made_anew_cannot_be_saved(
    browser: Browser, start: Callable[..., Any], rows: bytes, tmp_path: Path
) -> None:
    space = tmp_path / "space"
    space.mkdir()
    (space / "mine.jsonl").write_bytes(rows)
    with start(space) as server:
        page, _ = visit(browser, server, "/rows")
        page.get_by_label("or use a file of the workspace").select_option("mine.jsonl")
        for model, visible in (("surefit/nano", True), ("no/such-model", False), ("surefit/nano", True)):
            page.get_by_label("Model", exact=True).fill(model)
            page.keyboard.press("Tab")
            expect(page.get_by_role("button", name="Save")).to_be_visible(visible=visible)
        expect(page.get_by_role("button", name="Save")).to_be_enabled()
        page.close()


def test_rows_are_dropped_trained_on_and_talked_to(
    browser: Browser, start: Callable[..., Any], rows: bytes, tmp_path: Path
) -> None:
    """The whole way of somebody who has a file and nothing else, on the built-in model, in fewer steps."""
    space = tmp_path / "space"
    space.mkdir()
    with start(space) as server:
        page, noise = visit(browser, server, "/", viewport={"width": 1280, "height": 900})
        assert page.url.endswith("/rows")
        dropped = page.evaluate_handle(DROPPED, rows.decode())
        page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
        expect(page.locator("#seen")).to_contain_text("60 rows, messages")
        page.get_by_label("Model", exact=True).fill("surefit/nano")
        page.keyboard.press("Tab")
        expect(page.locator("#config")).to_contain_text("surefit/nano")
        page.get_by_role("button", name="Save").click()
        expect(page.locator("#command")).to_have_text("surefit run support-rows.yaml")
        config = space / "support-rows.yaml"
        assert config.read_text() == page.locator("#config").text_content()
        config.write_text(config.read_text().replace("num_train_epochs: 9", "num_train_epochs: 2"))
        page.get_by_role("button", name="Run it").click()
        page.get_by_role("button", name="Cancel").click()
        assert not (space / "runs").exists()
        page.get_by_role("button", name="Run it").click()
        page.get_by_role("button", name="Start").click()
        page.wait_for_url("**/run?path=runs%2Fsupport-rows")
        expect(page.locator("#stop")).to_be_visible()
        expect(page.locator("#log")).to_contain_text("1/6 check", timeout=120_000)
        page.reload()
        page.wait_for_selector("#charts canvas", timeout=240_000)
        expect(page.locator("#state")).to_contain_text("report finished", timeout=240_000)
        page.get_by_role("link", name="Talk to the model").click()
        page.get_by_label("the base model beside it").check()
        page.get_by_label("Message").fill("How do I replace part 3 of the lamp?")
        page.keyboard.press("Enter")
        expect(page.locator(".reply .said").nth(1)).to_have_text(re.compile(r"\S"), timeout=240_000)
        expect(page.locator("#submit")).to_be_enabled(timeout=240_000)
        assert page.locator(".reply .label").all_inner_texts() == ["base", "merged"]
        assert noise == []
        page.close()


def test_a_run_is_stopped_and_continued_on_its_page_and_another_is_refused(
    browser: Browser, start: Callable[..., Any], rows: bytes, tmp_path: Path
) -> None:
    space = tmp_path / "space"
    space.mkdir()
    (space / "mine.jsonl").write_bytes(rows)
    for name in ("mine", "other"):
        (space / f"{name}.yaml").write_text(
            "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: mine.jsonl, eval: 0.2}\n"
            "train: {num_train_epochs: 500, global_batch_size: 4, learning_rate: 0.005}\n"
            f"output_dir: runs/{name}\n"
        )
    with start(space) as server:
        page, noise = visit(browser, server, "/config?open=mine.yaml")
        page.get_by_role("button", name="Run it").click()
        page.get_by_role("button", name="Start").click()
        page.wait_for_selector("#charts canvas", timeout=240_000)
        page.goto(f"{server.origin}/config?open=other.yaml")
        expect(page.locator(".bar .pill")).to_have_text("Running: runs/mine")
        page.get_by_role("button", name="Run it").click()
        page.get_by_role("button", name="Start").click()
        expect(page.locator("#saved")).to_contain_text("one at a time")
        page.locator(".bar .pill").click()
        page.get_by_role("button", name="Stop…").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#state")).to_contain_text("train interrupted", timeout=120_000)
        expect(page.locator("#state")).to_contain_text("the work is saved")
        page.get_by_role("button", name="Go on with it").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#state")).to_contain_text("--resume” is running")
        page.get_by_role("button", name="Stop…").click()
        page.locator("#confirm-yes").click()
        expect(page.locator("#resume")).to_be_visible(timeout=120_000)
        assert all("409" in text for text in noise), noise
        page.close()
