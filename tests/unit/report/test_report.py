"""The report of full, partial, damaged and hostile run directories."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import os
import re
import runpy
import shutil
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from surefit.core.errors import MachineError
from surefit.core.rundir import RunDir, append_jsonl
from surefit.report import build
from surefit.report.build import build_report

MAKE = runpy.run_path(str(Path(__file__).with_name("make_run.py")))
write_run: Callable[..., RunDir] = MAKE["write_run"]
SECTIONS = (
    "verdict", "curves-section", "examples", "next", "scores", "certificate", "plan", "findings", "passport",
    "configuration", "environment", "timeline", "reproduce",
)  # fmt: skip
OPEN = SECTIONS[:4]
NBSP = "\N{NO-BREAK SPACE}"
HOSTILE = "</script></style><img src=x onerror=alert(1)>{{7*7}}\"'&<!--"


class Page(HTMLParser):
    """A page as a browser sees it: text by section, elements, and what is inside script and style.

    `sections` has all text, `opening` only what is visible before anything is unfolded.
    """

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.words: dict[str, list[str]] = {}
        self.visible: dict[str, list[str]] = {}
        self.folded: list[bool] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, str]] = []
        self.open: list[str] = []
        self.section = "top"
        self.feed(html)
        self.close()
        self.sections = {name: " ".join(words) for name, words in self.words.items()}
        self.opening = {name: " ".join(words).replace(NBSP, " ") for name, words in self.visible.items()}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["aria-labelledby"] or ""
        if tag == "details":
            self.folded.append("open" not in dict(attrs))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self.open and self.open.pop() != tag:
            pass
        if tag == "section":
            self.section = "after"
        if tag == "details":
            self.folded.pop()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("script", "style"):
            self.raw.append((self.open[-1], data))
        else:
            self.words.setdefault(self.section, []).extend(data.split())
            own_summary = self.open.count("details") if "summary" in self.open else None
            if not any(self.folded[:-1] if own_summary == len(self.folded) else self.folded):
                self.visible.setdefault(self.section, []).extend(data.split())

    @property
    def text(self) -> str:
        return " ".join(self.sections.values()).replace(NBSP, " ")

    def __getitem__(self, section: str) -> str:
        return self.sections[section].replace(NBSP, " ")


def page_of(run: RunDir) -> Page:
    return Page(build_report(run).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def full_run(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    return write_run(tmp_path_factory.mktemp("run") / "function-calling-nano")


@pytest.fixture(scope="module")
def html(full_run: RunDir) -> str:
    return build_report(full_run).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


@pytest.fixture
def run(full_run: RunDir, tmp_path: Path) -> RunDir:
    """A copy of the full run that a test may change."""
    return RunDir(Path(shutil.copytree(full_run.path, tmp_path / "run")))


def change(path: Path, edit: Callable[[Any], None]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


# A full run


def test_every_section_is_there_in_order_under_one_h1(page: Page) -> None:
    labelled = [attrs["aria-labelledby"] for tag, attrs in page.tags if tag == "section"]
    assert tuple(labelled) == SECTIONS
    links = [attrs["href"] for tag, attrs in page.tags if tag == "a" and (attrs["href"] or "").startswith("#")]
    ids = {attrs.get("id") for _, attrs in page.tags}
    assert {link[1:] for link in links if link} <= ids
    levels = [int(tag[1]) for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_the_verdict_comes_first_and_has_the_numbers_of_the_summary(page: Page, full_run: RunDir) -> None:
    summary = json.loads(full_run.eval_summary.read_text())["sets"]["eval"]
    line = next(c for c in summary["comparisons"] if c["b"] == "merged" and c["metric"] == "ast_accuracy")
    base, tuned = (summary["variants"][v]["ast_accuracy"]["mean"] for v in ("base", "merged"))
    text = page["verdict"]
    assert f"ast accuracy went from {100 * base:.1f} % to {100 * tuned:.1f} %" in text
    low, high = line["ci95"]
    assert f"{100 * line['difference']:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})" in text
    assert "On 200 held-out prompts" in text
    assert f"{line['wins']} won, {line['losses']} lost, {line['ties']} equal" in page.opening["examples"]


def test_the_gain_is_stated_once_before_anything_is_unfolded(page: Page, full_run: RunDir) -> None:
    summary = json.loads(full_run.eval_summary.read_text())["sets"]["eval"]
    line = next(c for c in summary["comparisons"] if c["b"] == "merged" and c["metric"] == "ast_accuracy")
    opening = " ".join(page.opening.values())
    gain = f"{100 * line['difference']:.1f}"
    assert opening.count(gain) == page.opening["verdict"].count(gain) == 1
    assert opening.count("95 % interval") == 1
    assert page.text.count(gain) > 2  # the tables have it, folded


def test_it_opens_with_verdict_loss_examples_and_commands_and_the_rest_folded(page: Page) -> None:
    assert "Training loss: " in page.opening["curves-section"]
    assert "surefit chat runs/function-calling-nano --compare" in page.opening["next"]
    for section in SECTIONS:
        if section not in OPEN:
            assert len(page.opening[section]) < 60, section  # a title and a hint
            assert len(page[section]) > 100, section
    folded = [attrs for tag, attrs in page.tags if tag == "details" and "open" not in attrs]
    assert len(folded) > 70
    assert page.folded == []
    assert "Ready to ship? Yes, if the notes are acceptable" in page.opening["verdict"]
    assert "Regression on another task: ast accuracy on old_tools." in page.opening["verdict"]
    assert "The certificate passed" not in page.opening["verdict"]
    assert "The certificate passed" in page["verdict"]


def test_five_examples_are_open_those_that_got_worse_first(page: Page) -> None:
    samples = [attrs for tag, attrs in page.tags if tag == "details" and "sample" in (attrs.get("class") or "")]
    assert [attrs["data-kind"] for attrs in samples] == ["lost", "lost", "lost", "wrong", "won"]
    assert all("open" in attrs for attrs in samples)
    assert page.opening["examples"].count("Expected") == 5
    assert "68 more examples, and a filter" in page.opening["examples"]


def test_without_a_loss_won_and_still_wrong_rows_take_turns(run: RunDir) -> None:
    def drop_old_tools(summary: Any) -> None:
        del summary["sets"]["old_tools"]

    change(run.eval_summary, drop_old_tools)
    kinds = [attrs["data-kind"] for tag, attrs in page_of(run).tags if "sample" in (attrs.get("class") or "")]
    assert kinds == ["wrong", "wrong", "won", "won", "won"]


def test_what_the_base_could_do_and_lost_is_part_of_the_verdict(page: Page) -> None:
    assert "Training helped, but other scores fell" in page["verdict"]
    assert "On old_tools the model lost: ast accuracy 93.5 % before, 87.5 % after." in page["verdict"]
    assert "93.6 % of the base's score is retained" in page["scores"]


def test_the_passport_shows_lengths_observations_and_findings(page: Page) -> None:
    text = page["passport"]
    assert "3,200 rows of surefit/function-calling-train were audited; 3,198 are usable" in text
    assert "near duplicate 194 3,200 train.jsonl:234: 96% the same as train.jsonl:21" in text
    assert "Observations in the rows, good or bad, of 2 kinds" in text
    assert "12.0 % of the tokens are supervised" in text
    assert "AUD007 the prompts of 2 of 200 scored rows" in text
    bars = [attrs for tag, attrs in page.tags if tag == "rect"]
    assert [float(bar["height"] or 0) for bar in bars[2:5]] == pytest.approx([58 * 40 / 1500, 58 * 0.6, 58], abs=0.01)
    assert bars[-1]["class"] == "over"


def test_a_run_without_an_audit_says_so(run: RunDir) -> None:
    run.passport.unlink()
    assert "The rows were not audited" in page_of(run)["passport"]


@pytest.mark.parametrize("histogram", [{"width": 0, "counts": [1]}, {"width": 1, "counts": [-1]}, {"counts": "x"}])
def test_a_damaged_passport_is_named(run: RunDir, histogram: object) -> None:
    change(run.passport, lambda value: value["lengths"]["whole"].update(histogram=histogram))
    assert "passport.json is damaged" in page_of(run)["passport"]


def test_the_verdict_says_what_was_trained(page: Page) -> None:
    for fact in (
        "surefit/nano", "LoRA, r 16, alpha 32.0, on all-linear: 368.64k parameters (20.1 % of 1.84M)",
        "surefit/function-calling-train, 3,200 rows", "function_calling, version 1",
        "400 of 400 planned, 32 examples each; 1 rejected", "52.0 s in training steps", "CPU, 2 cores, 24.00 GiB",
    ):  # fmt: skip
        assert fact in page["verdict"]


def test_scores_have_all_metrics_variants_and_intervals(page: Page, full_run: RunDir) -> None:
    summary = json.loads(full_run.eval_summary.read_text())
    for scores in summary["sets"].values():
        for variant, metrics in scores["variants"].items():
            assert variant in page["scores"]
            for metric, score in metrics.items():
                low, high = score["ci95"]
                assert metric.replace("_", " ") in page["scores"]
                assert f"{100 * score['mean']:.1f} % {100 * low:.1f} % to {100 * high:.1f} %" in page["scores"]
    assert "answers that cannot be parsed" in page["scores"]
    assert "greedy, at most 128 new tokens" in page["scores"]


def test_the_plot_puts_marks_where_the_scores_are(html: str, full_run: RunDir) -> None:
    summary = json.loads(full_run.eval_summary.read_text())
    mean = summary["sets"]["old_tools"]["variants"]["merged"]["irrelevance"]["mean"]
    low, high = summary["sets"]["old_tools"]["variants"]["merged"]["irrelevance"]["ci95"]
    assert f'<svg x="{100 * mean:.2f}%"' in html
    assert f'x1="{100 * low:.2f}%" x2="{100 * high:.2f}%"' in html


def test_examples_show_prompt_gold_and_both_answers(page: Page) -> None:
    text = page["examples"]
    assert "Held-out prompts: 178 won, 0 lost, 22 equal" in text
    assert "old_tools: 10 won, 22 lost, 168 equal" in text
    assert "Shown are 20 of 178 won, 0 of 0 lost, 10 of 15 still wrong, 5 of 7 still right" in text
    shown = [(tag["data-set"], tag["data-kind"]) for _, tag in page.tags if (tag.get("class") or "")[:7] == "example"]
    assert Counter(shown) == {
        ("eval", "won"): 20, ("eval", "wrong"): 10, ("eval", "right"): 5,
        ("old_tools", "won"): 10, ("old_tools", "lost"): 20, ("old_tools", "wrong"): 3, ("old_tools", "right"): 5,
    }  # fmt: skip
    assert "book_taxi" in text  # the base's answer, with the words marked that are not in the gold one
    assert "One ticket Zurich to Lusaka, please" in text
    assert "truncated at the limit" in text


def test_the_certificate_shows_every_check(page: Page) -> None:
    assert "Passed every check within its threshold" in page["certificate"]
    assert "4 checks, 0 failed" in page["certificate"]
    question = "Is the largest logit error within rounding?"
    check = "on_disk_logit_error_max , read back from disk passed 3.8e-06 <= 1.2e-05"
    assert f"{question} {check}" in page["certificate"]
    assert "predicts the same next token as base and adapter together in 100.0 % of cases" in page["certificate"]
    assert "is 3.8e-06; rounding allows 1.2e-05" in page["certificate"]
    assert "9f2c4a7d" * 8 in page["certificate"]


def test_the_plan_stands_beside_what_was_measured(page: Page) -> None:
    text = page["plan"]
    assert "Peak memory, in tensors 99.8 MiB 392.6 MiB" in text
    assert "Optimizer steps 400 400" in text
    assert "Time in training steps – 52.0 s" in text
    assert "logits 90.0 MiB while the loss is computed 32 examples of 512 tokens" in text
    assert "Not included in the plan activations of the blocks" in text
    assert "56.81 GiB were free" in text


def test_findings_are_sorted_by_severity_and_say_where(page: Page) -> None:
    text = page["findings"]
    assert "2 findings; 23 rules ran" in text
    warning = text.index("warning DAT007 train-eval-overlap surefit/function-calling-eval:118 query")
    assert warning < text.index("info CFG012")
    assert "Help: remove them from one of the two files" in text


def test_suppressed_findings_stand_there_with_their_reason(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    accepted = {"code": "SCH001", "name": "warmup-never-ends", "severity": "error", "path": "a.yaml", "line": 4}
    suppressed = [accepted | {"message": "100 of 86", "reason": f"speed only {HOSTILE}"}]
    change(run.check, lambda check: check.update(suppressed=suppressed))
    text = page_of(run)["findings"]
    assert "Suppressed findings and reasons error, suppressed SCH001 warmup-never-ends a.yaml:4 100 of 86" in text
    assert "Suppressed because: speed only </script>" in text
    assert "{{7*7}}" in text


def test_the_configuration_names_the_origin_of_each_value(page: Page) -> None:
    text = page["configuration"]
    assert "40 values: 15 from the config file, 1 from the command line, 5 set by SureFit, 19 defaults." in text
    assert "model.dtype float32 auto on a CPU float32 is exact" in text
    assert "train.max_steps 400 --set on the command line" in text
    assert "data.max_length 512 function-calling-nano.yaml:14" in text
    assert text.index("train.seed 0 default") > text.index("The 19 defaults")


def test_environment_and_command(page: Page) -> None:
    assert "Python 3.11.7" in page["environment"]
    assert "torch 2.13.0+cpu" in page["environment"]
    assert "GPUs none" in page["environment"]
    command = "surefit run runs/function-calling-nano/resolved.yaml --set output_dir=runs/function-calling-nano-again"
    assert command in page["reproduce"]


def test_a_rejected_step_a_kill_a_resume_and_a_failure_are_visible(page: Page, html: str) -> None:
    assert "update rejected, weights unchanged: step 173" in page["curves-section"]
    assert "resumed from a checkpoint after step 200" in page["curves-section"]
    marks = chart_data(html)["marks"]
    assert marks == [{"step": 173, "kind": "rejected"}, {"step": 200, "kind": "resumed"}]
    text = page["timeline"]
    assert "train 2026-11-21 13:00:00 – ended without a record The process was killed or crashed" in text
    assert "31.2 s finished Resumed after step 200. Ended at step 400." in text
    assert "9.1 s failed cannot write: No space left on device" in text


def chart_data(html: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="curves">(.*?)</script>', html, re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1])
    return data


def test_the_curves_are_those_of_the_log(html: str, page: Page) -> None:
    charts = {chart["name"]: chart for chart in chart_data(html)["charts"]}
    assert list(charts) == ["loss", "learning_rate", "grad_norm", "tokens_per_second", "memory"]
    assert max(charts["memory"]["series"][0]["y"]) == pytest.approx(411_600_000 / 2**30, rel=0.01)
    loss = charts["loss"]
    assert [series["label"] for series in loss["series"]] == ["training loss", "held-out loss"]
    assert loss["series"][0]["y"][loss["x"].index(172)] is not None
    assert 173 not in loss["x"]  # the rejected step has no loss
    held_out = [step for step, value in zip(loss["x"], loss["series"][1]["y"], strict=True) if value is not None]
    assert held_out == [50, 100, 150, 200, 250, 300, 350, 400]
    assert "Held-out loss: lowest 0.09065 at step 400, the last measurement." in page["curves-section"]


def test_a_chart_that_would_repeat_one_number_is_a_sentence(run: RunDir, page: Page) -> None:
    flat = "Free disk space, in GiB: lowest 49.61 at step 400, the last measurement. It hardly changed"
    assert flat in page["curves-section"]
    lines = [json.loads(line) for line in run.metrics.read_text().splitlines()]
    for line in lines:
        line["disk_free_bytes"] = 50 * 2**30 - line["step"] * 2**24
        line["memory_bytes"] = None  # as on a CPU
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    html = build_report(run).read_text()
    charts = {chart["name"]: chart for chart in chart_data(html)["charts"]}
    assert "memory" not in charts
    assert min(charts["disk"]["series"][0]["y"]) == pytest.approx(50 - 400 / 64)
    assert "hardly changed" not in html


def test_tables_have_captions_and_scoped_headers(page: Page) -> None:
    headers = [attrs for tag, attrs in page.tags if tag == "th"]
    assert all(attrs.get("scope") in ("col", "row") for attrs in headers)
    count = [tag for tag, _ in page.tags].count
    assert count("table") == count("caption") > 5
    assert count("figure") == count("figcaption") == 7
    assert count("main") == count("nav") == count("h1") == 1


# One file, no network


def test_nothing_is_loaded_from_outside(html: str, page: Page) -> None:
    for tag, attrs in page.tags:
        assert tag not in ("link", "iframe", "img", "object", "embed", "base", "form")
        for name in ("src", "srcset", "href", "action", "data", "poster"):
            assert (attrs.get(name) or "#").startswith("#"), (tag, attrs)
        assert not any(name.startswith("on") for name in attrs)
    for kind, text in page.raw:
        assert not re.search(r"@import|url\(", text) or kind == "script"
        assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|importScripts|sendBeacon|EventSource)\b", text)
    addresses = set(re.findall(r"https?://[^\s\"'<>)]+", html))
    assert addresses == {"https://github.com/leeoniya/uPlot"}  # in the library's licence comment


def test_the_policy_allows_exactly_our_scripts(html: str, page: Page) -> None:
    policy = next(attrs["content"] for _, attrs in page.tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert "default-src 'none'" in policy
    assert "connect-src" not in policy
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert len(scripts) == 4
    assert re.findall(r"sha256-([^']+)", policy) == hashes


def test_a_typical_page_is_well_under_a_megabyte(html: str) -> None:
    assert len(html.encode()) < 500_000


@pytest.mark.slow
def test_a_page_of_everything_at_its_bound_stays_under_three_megabytes(run: RunDir) -> None:
    long, many = "\"'&" * 1_500, range(300)
    finding = dict.fromkeys(("code", "name", "path", "field", "message", "help", "evidence"), long)
    change(run.check, lambda c: c.update(findings=[finding | {"severity": "error", "line": 1} for _ in many]))
    terms = [{"term": long, "bytes": 1, "why": long, "moment": long} for _ in many]
    change(run.plan, lambda p: p.update(left_out=[long for _ in many], does_not_fit=[long for _ in many], memory=terms))
    check = {"name": long, "value": long, "threshold": long, "passed": True, "why": long}
    change(run.certificate, lambda c: c.update(reason=long, checks=[check for _ in many]))
    change(run.environment, lambda e: e.update(packages={f"{i}{long}": long for i in many}, gpus=[long for _ in many]))
    run.resolved.write_text("".join(f"k{i}: '{'&' * 400}'  # auto: {long}\n" for i in many))
    failure = json.dumps({"time": 1, "stage": long, "event": "failed", "error": long})
    run.events.write_text("".join(f"{failure}\n" for _ in many))
    for path in run.eval.glob("*/*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(x | {"prompt": long, "gold": long, "text": long}) + "\n" for x in lines))
    curves = ("loss", "grad_norm", "learning_rate", "tokens_per_second")
    steps = [{"step": i, "rejected": True} | dict.fromkeys(curves, 1e-7 / i) for i in range(1, 10_000)]
    steps += [{"step": i, "eval_loss": 1 / i} for i in range(1, 10_000)]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in steps))

    def add_sets(summary: Any) -> None:
        metrics = {f"{m}{long}": {"mean": 0.5, "ci95": [0, 1]} for m in range(50)}
        names = ["base", "merged", *(f"{v}{long}" for v in range(10))]
        lines = [c | {"metric": long} for c in summary["sets"]["eval"]["comparisons"] for _ in range(20)]
        one = {"n": 1, "comparisons": lines, "variants": dict.fromkeys(names, metrics)}
        summary["sets"].update({f"{i}{long}": one for i in range(15)})

    change(run.eval_summary, add_sets)
    assert 1_000_000 < build_report(run).stat().st_size < 3_000_000


# Partial runs


def test_an_empty_run_names_every_stage_that_has_not_run(tmp_path: Path) -> None:
    page = page_of(RunDir(tmp_path))
    assert "Nothing has been trained yet" in page["verdict"]
    stages = {"scores": "evaluate", "examples": "evaluate", "certificate": "merge", "curves-section": "train"}
    for section, stage in {**stages, "plan": "plan", "findings": "check"}.items():
        assert f"The {stage} stage has not run." in page[section]
    assert "There is no resolved.yaml" in page["configuration"]
    assert "There is no environment.json" in page["environment"]
    assert "No stage has logged an event" in page["timeline"]
    assert "cannot be repeated" in page["reproduce"]
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert "cannot name the commands" in page["next"]
    assert "Ready to ship? Not yet" in page["verdict"]


@pytest.mark.parametrize(
    ("missing", "section", "message"),
    [
        ("check.json", "findings", "The check stage finished, but check.json is not"),
        ("plan.json", "plan", "The plan stage finished, but plan.json is not"),
        ("metrics.jsonl", "curves-section", "The train stage finished, but metrics.jsonl is not"),
        ("certificate.json", "certificate", "The merge stage finished, but certificate.json is not"),
        ("eval", "scores", "The evaluate stage finished, but eval/ is not"),
        ("resolved.yaml", "configuration", "There is no resolved.yaml"),
        ("environment.json", "environment", "There is no environment.json"),
        ("events.jsonl", "timeline", "No stage has logged an event"),
    ],
)
def test_one_missing_artefact_changes_its_own_section(run: RunDir, missing: str, section: str, message: str) -> None:
    path = run.path / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    page = page_of(run)
    assert message in page[section]
    for other in SECTIONS:
        assert page[other]


def test_a_run_that_is_trained_but_not_scored_claims_nothing(run: RunDir) -> None:
    shutil.rmtree(run.eval)
    keep = [line for line in run.events.read_text().splitlines() if '"evaluate"' not in line]
    run.events.write_text("\n".join(keep) + "\n")
    page = page_of(run)
    assert "Trained, not yet scored" in page["verdict"]
    assert "Whether training helped is unknown" in page["verdict"]
    assert "points" not in page["verdict"]


@pytest.mark.parametrize(
    ("events", "headline", "absent"),
    [
        ([("started", {})], "Training has not finished", "has no recorded end"),
        ([("started", {}), ("interrupted", {"seconds": 3})], "Training has not finished", "was interrupted"),
        ([("started", {}), ("failed", {"seconds": 3, "error": "no memory left"})], "Training failed",
         "The train stage failed: no memory left."),
    ],
)  # fmt: skip
def test_an_unfinished_training(tmp_path: Path, events: list[tuple[str, Any]], headline: str, absent: str) -> None:
    run = RunDir(tmp_path)
    for event, details in events:
        run.note("train", event, **details)
    page = page_of(run)
    assert headline in page["verdict"]
    assert absent in page["curves-section"]


def test_a_full_fine_tune_has_no_adapter_column(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "full", kind="full"))
    assert "all weights: 1.84M parameters (100.0 % of 1.84M)" in page["verdict"]
    assert "model − base, points" in page["scores"]
    assert "adapter" not in page["scores"]
    assert "Tuned (model)" in page["examples"]


def test_scores_without_a_summary_are_shown_but_not_judged(run: RunDir) -> None:
    run.eval_summary.unlink()
    page = page_of(run)
    assert "Trained and scored, but not compared with the base" in page["verdict"]
    assert "Not compared row by row." in page["scores"]
    assert "92.5 %" in page["scores"]


def test_scores_that_the_summary_left_out_are_not_shown_as_current(run: RunDir) -> None:
    def leave_out(summary: Any) -> None:
        summary["left_out"] = ["eval/merged: scored by function_calling version 0"]
        scores = summary["sets"]["eval"]
        del scores["variants"]["merged"]
        scores["comparisons"] = [c for c in scores["comparisons"] if "merged" not in (c["a"], c["b"])]
        del summary["sets"]["old_tools"]

    change(run.eval_summary, leave_out)
    page = page_of(run)
    assert "Scores on disk that are not shown eval/merged: scored by function_calling version 0" in page["scores"]
    assert "adapter − base, points" in page["scores"]
    assert "old_tools" not in page["scores"]
    assert "Tuned (adapter)" in page["examples"]


@pytest.mark.parametrize(
    ("interval", "headline"),
    [([0.01, 0.2], "Training helped"), ([-0.2, -0.01], "Training made it worse"), ([-0.1, 0.1], "No clear effect")],
)
def test_the_headline_follows_the_interval(run: RunDir, interval: list[float], headline: str) -> None:
    def set_interval(summary: Any) -> None:
        del summary["sets"]["old_tools"]
        for line in summary["sets"]["eval"]["comparisons"]:
            line["ci95"] = interval

    change(run.eval_summary, set_interval)
    assert headline in page_of(run)["verdict"]


def test_a_gain_on_another_set_alone_is_in_the_headline(run: RunDir) -> None:
    def set_intervals(summary: Any) -> None:
        for name, interval in (("eval", [-0.1, 0.1]), ("old_tools", [0.02, 0.4])):
            for line in summary["sets"][name]["comparisons"]:
                line["ci95"] = interval

    change(run.eval_summary, set_intervals)
    page = page_of(run)
    assert "No clear effect on the held-out prompts, but a gain on old_tools" in page["verdict"]
    assert "On old_tools the model gained: ast accuracy 93.5 % before, 87.5 % after." in page["verdict"]


def test_a_failed_certificate_and_a_failed_gate_are_in_the_headline(run: RunDir) -> None:
    change(run.certificate, lambda c: c.update(passed=False, reason="logit_error_max is 4, required <= 0.1"))
    change(run.eval_summary, lambda s: s["gate"].update(passed=False, reason="ast_accuracy of merged is 0.925"))
    page = page_of(run)
    assert "the score gate did not pass" in page["verdict"]
    assert "the weights failed their certificate" in page["verdict"]
    assert "logit_error_max is 4" in page["certificate"]
    assert "tone-bad" in next(attrs["class"] or "" for tag, attrs in page.tags if tag == "section")


def test_a_plan_that_does_not_fit_says_so(run: RunDir) -> None:
    change(run.plan, lambda p: p.update(does_not_fit=["memory: at least 90 GiB are needed"]))
    assert "does not fit memory: at least 90 GiB are needed" in page_of(run)["plan"]


# Damaged and hostile artefacts


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("check.json", b'{"findings": [', "not valid JSON"),
        ("plan.json", b'{"memory": [{"term": 3}]}', "not of the expected shape: memory.0.term"),
        ("plan.json", b'{"memory_total_bytes": 1e400}', "memory_total_bytes"),
        ("certificate.json", b"\xff\xfe\x00", "not UTF-8 text"),
        ("certificate.json", b"[" * 100_000, "nested more than 100 levels deep"),
        ("environment.json", b"[]", "not of the expected shape"),
        ("eval/summary.json", b'{"primary_metric": "x", "sets": {"eval": {"variants": 1}}}', "sets.eval.variants"),
        ("eval/eval/base.json", b"null", "not of the expected shape"),
        ("eval/eval/base.predictions.jsonl", b'{"index": "a"}\n{"text"\n', "line 1 is skipped"),
        ("resolved.yaml", b"model: [1,\n", "not valid YAML: line 2"),
        ("resolved.yaml", b"- a\n", "contains no settings"),
        ("resolved.yaml", b"many: [" + b"1, " * 60_000 + b"]\n", "more than 5,000 keys and values"),
        ("resolved.yaml", b"a: &a\n  b: *a\n", "nested too deeply"),
        ("metrics.jsonl", b'{"step": 1, "loss": 2.0}\nnonsense\n{"step": 3, "loss": 1.0}\n', "line 2 is skipped"),
        ("events.jsonl", b'{"time": 1}\n[]\n', "line 1 is skipped, not of the expected shape: stage"),
    ],
)
def test_a_damaged_file_is_named_and_the_page_still_built(run: RunDir, name: str, content: bytes, problem: str) -> None:
    (run.path / name).write_bytes(content)
    page = page_of(run)
    damaged = page["verdict"].split("Damaged files")[1]
    assert name in damaged
    assert problem in damaged
    for section in SECTIONS:
        assert page[section]


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(run: RunDir) -> None:
    run.metrics.unlink()
    os.mkfifo(run.metrics)
    assert "metrics.jsonl : cannot be read: not a regular file" in page_of(run)["verdict"]


def test_a_directory_in_the_place_of_a_file_is_damage_too(run: RunDir) -> None:
    run.plan.unlink()
    run.plan.mkdir()
    assert "plan.json : cannot be read: Is a directory" in page_of(run)["verdict"]


def test_a_log_cut_short_by_a_crash_is_not_called_damaged(run: RunDir) -> None:
    with open(run.metrics, "a") as file:
        file.write('{"step": 401, "lo')
    assert "Damaged" not in page_of(run)["verdict"]


def test_a_line_separator_inside_an_answer_does_not_break_the_line(run: RunDir) -> None:
    path = run.eval / "eval" / "merged.predictions.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    text = "".join(json.dumps(x | {"text": "a\u2028b\u0085c"}, ensure_ascii=False) + "\n" for x in lines)
    path.write_text(text, encoding="utf-8")
    page = page_of(run)
    assert "Damaged" not in page["verdict"]
    assert "178 won" in page["examples"]


def poison(value: Any) -> Any:
    """Every text in `value` replaced by a hostile one; what the page decides by keeps its meaning."""
    if isinstance(value, dict):
        keep = ("severity", "event", "stage", "primary_metric", "variant", "set", "a", "b", "metric")
        return {key: item if key in keep else poison(item) for key, item in value.items()}
    if isinstance(value, list):
        return [poison(item) for item in value]
    return HOSTILE if isinstance(value, str) else value


def test_hostile_text_is_only_ever_text(run: RunDir) -> None:
    for path in run.path.rglob("*.json"):
        path.write_text(json.dumps(poison(json.loads(path.read_text()))))
    for path in run.path.rglob("*.jsonl"):
        path.write_text("".join(json.dumps(poison(json.loads(x))) + "\n" for x in path.read_text().splitlines()))
    quoted = "'" + HOSTILE.replace("'", "''") + "'"
    text = MAKE["RESOLVED"].format(kind="lora", model=quoted)
    run.resolved.write_text(text.replace("# default", f"# auto: {HOSTILE}"))
    append_jsonl(run.events, {"time": 9e9, "stage": HOSTILE, "event": "failed", "error": {"message": HOSTILE}})
    page = page_of(run)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert [tag for tag, _ in page.tags].count("script") == 5
    assert len(page.raw) == 5 + 2
    for section in set(SECTIONS) - {"curves-section", "next", "reproduce"}:
        assert HOSTILE in page[section], section
    assert "49" not in page["findings"]  # the template did not evaluate it


def test_names_of_metrics_sets_and_variants_are_escaped(run: RunDir) -> None:
    name = "</td><img src=x onerror=a()>../../x"

    def rename(summary: Any) -> None:
        scores = summary["sets"].pop("old_tools")
        scores["variants"][name] = {name: {"mean": 0.5, "ci95": [0.4, 0.6]}}
        summary["sets"][name] = scores

    change(run.eval_summary, rename)
    page = page_of(run)
    assert not [tag for tag, _ in page.tags if tag == "img"]
    assert name in page["scores"]


def test_no_secret_reaches_the_page(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "not-of-the-usual-shape")
    change(run.check, lambda c: c["findings"][0].update(message="with not-of-the-usual-shape and hf_" + "a" * 30))
    append_jsonl(run.events, {"time": 9e9, "stage": "train", "event": "failed", "error": "key sk-" + "b" * 30})
    run.resolved.write_text(run.resolved.read_text() + "token: not-of-the-usual-shape  # default\n")
    html = build_report(run).read_text()
    assert "not-of-the-usual-shape" not in html
    assert "a" * 30 not in html
    assert "b" * 30 not in html
    assert "***" in html


def test_text_that_utf8_cannot_hold_is_replaced(run: RunDir) -> None:
    change(run.certificate, lambda c: c.update(reason="half a pair: \ud800"))
    assert "half a pair: ?" in page_of(run)["certificate"]


def test_a_page_that_cannot_be_written_is_an_error_of_the_machine(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    before = build_report(run).read_bytes()

    def full_disk(path: Path, content: str) -> None:
        raise MachineError("cannot write")

    monkeypatch.setattr(build, "write_atomic", full_disk)
    with pytest.raises(MachineError):
        build_report(run)
    assert run.report.read_bytes() == before


def test_steps_without_a_loss_and_sets_without_a_tuned_model_are_shown(run: RunDir) -> None:
    run.metrics.write_text('{"step": 1, "rejected": true}\n')

    def leave_out_tuned(summary: Any) -> None:
        variants = summary["sets"]["old_tools"]["variants"]
        summary["sets"]["old_tools"].update(variants={"base": variants["base"]}, comparisons=[])

    change(run.eval_summary, leave_out_tuned)
    page = page_of(run)
    assert "No step has logged a loss" in page["curves-section"]
    assert "old_tools" in page["scores"]
    assert [tag for tag, _ in page.tags].count("script") == 2  # no charts, no library


def test_numbers_that_are_not_finite_do_not_reach_the_charts(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.metrics.write_text('{"step": 1, "loss": NaN}\n{"step": 2, "loss": 1.5, "grad_norm": Infinity}\n')
    data = chart_data(build_report(run).read_text())
    assert [chart["name"] for chart in data["charts"]] == ["loss"]
    assert data["charts"][0]["x"] == [2]
