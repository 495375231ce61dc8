"""What the page concludes: may it ship, what the certificate means, plan against actual, examples, reproduction."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from surefit.core.rundir import RunDir, append_jsonl, write_json
from surefit.report import examples as examples_module
from surefit.report.actual import compare_plan_with_run, percent_off
from surefit.report.artefacts import Artefacts, read_artefacts
from surefit.report.build import Page, build_page, build_report
from surefit.report.certified import ANSWERS, IDENTITY, describe_certificate, group_checks
from surefit.report.examples import ComparedAnswers, select_compared_sets
from surefit.report.reproduce import reproduction
from surefit.report.scores import set_scores
from surefit.report.shapes import CertificateRecord

MAKE = runpy.run_path(str(Path(__file__).with_name("make_run.py")))


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    made: RunDir = MAKE["write_run"](tmp_path / "run", steps=20)
    return made


def page_of(run: RunDir) -> Page:
    return build_page(read_artefacts(run))


def rewrite(path: Path, **changes: Any) -> None:
    write_json(path, json.loads(path.read_text()) | changes)


# May it ship


def test_damage_elsewhere_is_a_note_that_someone_must_accept(run: RunDir) -> None:
    ship = page_of(run).ship
    assert (ship.tone, ship.answer) == ("warning", "Yes, if the notes are acceptable")
    notes = [condition.text for condition in ship.conditions if condition.state == "note"]
    assert notes == [
        "Regression on another task: ast accuracy on old_tools fell from 93.5\N{NO-BREAK SPACE}% to 87.5\xa0%."
    ]


@pytest.mark.parametrize(
    ("artefact", "reason"), [("certificate", "failed their certificate: loads nowhere"), ("gate", "Score gate")]
)
def test_a_failed_certificate_or_gate_forbids_it(run: RunDir, artefact: str, reason: str) -> None:
    if artefact == "certificate":
        rewrite(run.certificate, passed=False, reason="loads nowhere")
    else:
        rewrite(run.eval_summary, gate={"passed": False, "reason": "too low"})
    ship = page_of(run).ship
    assert ship.answer == "No"
    assert [reason in condition.text for condition in ship.conditions if condition.state == "no"] == [True]


def test_what_was_not_measured_does_not_count_in_its_favour(run: RunDir) -> None:
    run.certificate.unlink()
    assert page_of(run).ship.answer.startswith("Not yet")


def test_a_baseline_that_is_as_good_is_named(run: RunDir) -> None:
    def line(b: str) -> dict[str, Any]:
        pair = {"a": "baseline:lead-3", "b": b, "metric": "ast_accuracy", "difference": 0.01, "ci95": [-0.02, 0.04]}
        return pair | {"wins": 4, "losses": 2, "ties": 194}

    summary = json.loads(run.eval_summary.read_text())
    scores = summary["sets"]["eval"]
    scores["variants"] = {"baseline:lead-3": scores["variants"]["base"], **scores["variants"]}
    scores["comparisons"] += [line("adapter"), line("merged")]
    write_json(run.eval_summary, summary)
    page = page_of(run)
    texts = [condition.text.replace("\xa0", " ") for condition in page.ship.conditions]
    assert "It does not beat the baseline lead-3: +1.0 points (interval \N{MINUS SIGN}2.0 to +4.0)." in texts
    contests = [(contest.question, contest.outcome) for contest in page.sets[0].contests]
    assert contests == [("Did training help?", "better"), ("Is it better than lead-3?", "no clear difference")]


def test_gold_in_a_lesser_form_is_a_ceiling_and_need_not_be_beaten(run: RunDir) -> None:
    summary = json.loads(run.eval_summary.read_text())
    pair = {"a": "baseline:gold-glued", "b": "merged", "metric": "ast_accuracy", "difference": -0.1}
    line = pair | {"ci95": [-0.2, -0.05], "wins": 0, "losses": 20, "ties": 180}
    summary["sets"]["eval"]["comparisons"].append(line)
    write_json(run.eval_summary, summary)
    page = page_of(run)
    assert page.sets[0].contests[1].question == "How far is it from gold-glued?"
    assert not [condition for condition in page.ship.conditions if "gold" in condition.text]


def test_free_and_constrained_are_asked_about_apart(run: RunDir) -> None:
    summary = json.loads(run.eval_summary.read_text())
    scores = summary["sets"]["eval"]
    scores["variants"] |= {f"{v}+grammar": scores["variants"][v] for v in ("base", "merged")}
    one = scores["comparisons"][0] | {"metric": "ast_accuracy", "difference": -0.1, "ci95": [-0.2, -0.05]}
    scores["comparisons"] += [
        one | {"a": "base+grammar", "b": "merged+grammar"},
        one | {"a": "merged", "b": "merged+grammar"},
    ]
    write_json(run.eval_summary, summary)
    asked = {contest.question: contest.outcome for contest in page_of(run).sets[0].contests}
    assert asked["Did training help when a grammar constrains both?"] == "worse"
    assert asked["Does a grammar help the tuned model?"] == "worse"
    html = build_report(run).read_text()
    assert "Hollow marks: answers constrained by a grammar" in html


# The certificate


def test_checks_are_asked_as_questions_those_that_failed_first() -> None:
    checks = [
        {"name": "base_identity", "passed": True},
        {"name": "adapter_complete", "passed": False, "why": "q_proj of layer 3 has no factors."},
        {"name": "reloaded_top1_agreement", "value": 0.9, "threshold": 0.99, "passed": False, "why": "too far"},
        {"name": "in_memory_kl_mean", "passed": True},
    ]
    certificate = CertificateRecord.model_validate({"passed": False, "reason": "two checks", "checks": checks})
    found = {group.title: group for group in group_checks(certificate)}
    assert [asked.check.name for asked in found[IDENTITY].asked] == ["adapter_complete", "base_identity"]
    assert found[IDENTITY].failed == 1
    assert [asked.where for asked in found[ANSWERS].asked] == ["read back from disk", "before it was written"]
    assert describe_certificate(certificate)[0] == (
        "The certificate failed. Does every target layer have finite, trained factors? No: q_proj of layer 3 has no "
        "factors; Does it predict the same next token? No: too far."
    )


def test_a_quantised_or_unrecorded_base_is_said() -> None:
    certificate = CertificateRecord(passed=True, quantization="nf4", into="dequantized", base_recorded=False)
    said = " ".join(describe_certificate(certificate))
    assert "trained on a base in nf4 and merged into the dequantized weights" in said
    assert "that this is the right base is an assumption" in said


# Plan against actual


def compared(run: RunDir) -> Any:
    page = page_of(run)
    return compare_plan_with_run(page.found, page.training, page.attempts)


def test_memory_by_phase_has_the_most_of_all_attempts(run: RunDir) -> None:
    phases = [{"name": "step", "allocated_bytes": 900, "reserved_bytes": 1000}, {"name": "save", "allocated_bytes": 5}]
    estimate = {"low_bytes": 1, "high_bytes": 2, "peak_bytes": 900, "phases": phases}
    rewrite(run.plan, estimate=estimate, time={"parts": {"steps": 13.0}, "seconds": 20.0})
    for allocated in (800, 1200):
        figures = {"allocated": allocated, "reserved": 2000, "resident": 7}
        append_jsonl(run.events, {"time": 9e8, "stage": "train", "event": "memory", "phases": {"step": figures}})
    write_json(run.dry_pass, {"tokens": 4096, "phases": {"dry step": {"allocated": 700, "resident": 6}}})
    found = compared(run)
    assert found.on_gpu
    by_name = {phase.name: phase for phase in found.phases}
    assert list(by_name) == ["step", "save", "dry step"]
    assert (by_name["step"].planned, by_name["step"].measured, by_name["save"].measured) == (900, 1200, None)
    assert by_name["dry step"].measured == 700
    rows = {row.what: row for row in found.rows}
    assert rows["Time in training steps"].planned == 13.0
    assert rows["Total training time"].actual == pytest.approx(31.2)
    assert percent_off(rows["Optimizer steps"]).startswith("+1,900") or rows["Optimizer steps"].actual == 20


def test_folders_are_measured_and_a_broken_config_costs_only_its_part(run: RunDir) -> None:
    (run.checkpoints / "step-20").mkdir(parents=True)
    (run.checkpoints / "step-20" / "weights").write_bytes(b"x" * 1000)
    assert dict(compared(run).folders)["checkpoints"] == 1000
    run.resolved.write_text("model: 7\n")
    assert len(compared(run).rows) == 4


# Examples


def rows(run: RunDir) -> tuple[Artefacts, Any]:
    found = read_artefacts(run)
    return found, set_scores(found)


def test_examples_keep_within_their_bytes_and_every_kind_gets_its_share(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examples_module, "BUDGET", 60_000)
    groups = select_compared_sets(*rows(run))
    for group in groups:
        assert sum(example.size for example in group.shown) <= 30_000
        kinds = [example.kind for example in group.shown]
        assert len(kinds) < 36
        assert set(kinds) == {kind for kind, total in group.totals.items() if total}
    assert groups[0].totals == {"won": 178, "lost": 0, "wrong": 15, "right": 7}


@pytest.mark.parametrize(
    ("prompt", "headline"),
    [
        (
            "<|im_start|>system\nTools<|im_end|>\n<|im_start|>user\nBook a taxi<|im_end|>\n<|im_start|>assistant\n",
            "Book a taxi",
        ),
        ("<|user|>Two\n lines<|end|><|assistant|>", "Two lines"),
        ("plain text", "plain text"),
        ("", ""),
    ],
)
def test_the_headline_is_the_last_turn(run: RunDir, prompt: str, headline: str) -> None:
    path = run.eval / "eval" / "merged.predictions.jsonl"
    lines = [json.loads(line) | {"prompt": prompt} for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown: list[ComparedAnswers] = select_compared_sets(*rows(run))[0].shown
    assert shown[0].headline == headline


# Reproduction


def test_the_commands_pin_what_ran_and_quote_what_a_shell_would_read(run: RunDir) -> None:
    text = run.resolved.read_text().replace("runs/function-calling-nano ", "'runs/a; rm -rf b' ")
    run.resolved.write_text(text)
    rewrite(run.environment, packages={"torch": "2.13.0+cu128", "peft": "1; touch x", "other": "9"})
    found = reproduction(read_artefacts(run))
    commands = [command for _, command in found.commands]
    assert commands[0] == "# in a clone of SureFit 0.1.0:\npip install '.[train]' torch==2.13.0"
    assert commands[1] == "surefit run 'runs/a; rm -rf b/resolved.yaml' --set output_dir='runs/a; rm -rf b-again'"
    assert commands[2].startswith("surefit report 'runs/a; rm -rf b' 'runs/a; rm -rf b-again'\nsurefit compare ")
    assert ("Base model, SHA-256", "9f2c4a7d" * 8) in found.identities
    assert ("Seed", "0") in found.identities
