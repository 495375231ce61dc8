"""What the page concludes: may it ship, what the certificate means, plan against actual, examples, reproduction."""

from __future__ import annotations

import json
import math
import random
import runpy
import shutil
from pathlib import Path
from typing import Any

import pytest

from surefit.core.rundir import RunDir, append_jsonl, write_json
from surefit.evaluate.free_text import LOSS, OTHER_LOSS, PHRASES, measure_fit_effect
from surefit.facts.free_text import LIKELIHOOD
from surefit.recipes import get_recipe
from surefit.report import examples as examples_module
from surefit.report.actual import compare_plan_with_run, percent_off
from surefit.report.artefacts import Artefacts, read_artefacts
from surefit.report.build import Page, build_page, build_report
from surefit.report.certified import ANSWERS, IDENTITY, describe_certificate, group_checks
from surefit.report.examples import ComparedAnswers, mark_differences, select_compared_sets
from surefit.report.model_card import CardContext, limitations
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
    assert notes == ["Regression on another task: ast accuracy on old_tools."]


@pytest.mark.parametrize(
    ("artefact", "reason"),
    [("certificate", "failed their certificate: loads nowhere"), ("gate", "score gate did not pass: too low")],
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
    estimate = {"low_bytes": 1, "high_bytes": 2, "phases": phases}
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


def test_the_fullest_moment_is_the_number_that_plan_prints(run: RunDir) -> None:
    terms = [
        {"term": "weights", "bytes": 7_340_544},
        {"term": "loss", "bytes": 100_000_000},
        {"term": "none", "bytes": 0},
    ]
    estimate = {"low_bytes": 1, "high_bytes": 2, "peak_bytes": 999_999_999, "peak": {"terms": terms}}
    rewrite(run.plan, estimate=estimate)
    found = compared(run)
    assert found.planned_peak == 107_340_544
    assert found.rows[0].planned == 107_340_544
    assert [term.why for term in found.fullest] == ["1.84M parameters in float32", "", ""]
    html = build_report(run).read_text()
    fullest = html.split("The fullest moment of a step")[1].split("</table>")[0]
    assert "102.4 MiB" in fullest
    assert fullest.count('class="share"') == 2  # no bar for 0 B
    assert "by the formula of" in html


def test_the_same_ram_in_every_phase_is_one_sentence(run: RunDir) -> None:
    phases = [{"name": "step", "allocated_bytes": 900, "reserved_bytes": 1000}]
    rewrite(run.plan, estimate={"low_bytes": 1, "high_bytes": 2, "phases": phases})
    figures = {name: {"resident": 871 * 2**20} for name in ("step", "save", "dry step")}
    append_jsonl(run.events, {"time": 9e8, "stage": "train", "event": "memory", "phases": figures})
    found = compared(run)
    assert [title for title, _ in found.memory_columns] == ["In tensors, planned", "Held by the allocator, planned"]
    assert [phase.name for phase in found.phases] == ["step"]
    html = build_report(run).read_text()
    assert html.count("871.0 MiB") == 1
    assert "and was the same in every phase" in html
    figures["save"]["resident"] += 2**30
    append_jsonl(run.events, {"time": 9e8, "stage": "train", "event": "memory", "phases": figures})
    found = compared(run)
    assert found.memory_columns[-1] == ("Process, measured", "resident")
    assert [phase.name for phase in found.phases] == ["step", "save", "dry step"]


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


# What to do next


def test_after_a_loss_elsewhere_the_next_steps_are_mixing_talking_and_publishing(run: RunDir) -> None:
    commands = [command for _, command in page_of(run).next_steps]
    where = "runs/function-calling-nano"
    assert commands == [
        f"surefit run {where}/resolved.yaml --set output_dir={where}-mixed --set 'data.mix={{\"OTHER.jsonl\": 0.25}}'",
        f"surefit chat {where} --compare",
        f"surefit export {where}\nsurefit serve-check {where}",
    ]


def test_the_next_steps_begin_with_what_is_missing(run: RunDir) -> None:
    run.certificate.unlink()
    shutil.rmtree(run.eval)
    commands = [command.partition(" runs/")[0] for _, command in page_of(run).next_steps]
    assert commands == ["surefit merge", "surefit evaluate", "surefit chat"]
    run.events.unlink()
    run.note("train", "started")
    assert [command for _, command in page_of(run).next_steps] == ["surefit run runs/function-calling-nano --resume"]
    run.events.unlink()
    assert [command for _, command in page_of(run).next_steps] == ["surefit run runs/function-calling-nano"]
    run.resolved.unlink()
    assert page_of(run).next_steps == []


def test_without_a_gain_the_rows_and_the_checkpoints_are_looked_at(run: RunDir) -> None:
    summary = json.loads(run.eval_summary.read_text())
    del summary["sets"]["old_tools"]
    for line in summary["sets"]["eval"]["comparisons"]:
        line["ci95"] = [-0.2, -0.1]
    write_json(run.eval_summary, summary)
    run.passport.unlink()
    commands = [command for _, command in page_of(run).next_steps]
    assert commands[0].endswith("--all-checkpoints")
    assert commands[1].startswith("surefit audit")
    assert commands[2].endswith("""--set 'evaluate.extra_sets={"other": "OTHER.jsonl"}'""")
    assert not [command for command in commands if "export" in command]


def test_a_next_step_quotes_what_a_shell_would_read(run: RunDir) -> None:
    run.resolved.write_text(run.resolved.read_text().replace("runs/function-calling-nano ", "'runs/a; rm -rf b' "))
    commands = [command for _, command in page_of(run).next_steps]
    assert commands[1] == "surefit chat 'runs/a; rm -rf b' --compare"
    assert "'runs/a; rm -rf b/resolved.yaml' --set output_dir='runs/a; rm -rf b-mixed'" in commands[0]


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


# Free text


def fit_of(outcome: str, decides: bool = True) -> dict[str, Any]:
    rng = random.Random(1)

    def rows(own: float, other: float) -> list[dict[str, float]]:
        losses = [own + rng.uniform(-0.1, 0.1) for _ in range(20)]
        return [{LIKELIHOOD: math.exp(-x), LOSS: x, OTHER_LOSS: x + other - own} for x in losses]

    after = {"better": (1.0, 2.5), "wording": (1.0, 1.02), "worse": (6.0, 6.2), "unclear": (4.0, 4.2)}[outcome]
    effect = measure_fit_effect("base", "merged", rows(4.0, 4.2), rows(*after))
    assert effect is not None
    assert effect.outcome == outcome
    return {"decides": decides, "reason": "likelihood decides", "effects": [effect.document()]}


def judged(run: RunDir, fit: dict[str, Any], difference: float, primary: str = LIKELIHOOD) -> Page:
    """The page of a run whose base and merged model differ so, on the held-out rows alone."""
    low, high = difference - 0.02, difference + 0.02
    line = {"a": "base", "b": "merged", "metric": primary, "difference": difference, "ci95": [low, high]}
    variants = {name: {primary: {"mean": mean, "ci95": [0, 1]}} for name, mean in (("base", 0.5), ("merged", 0.5))}
    one = {"n": 20, "variants": variants, "comparisons": [line | {"wins": 1, "losses": 1, "ties": 18}], "fit": fit}
    rewrite(run.eval_summary, primary_metric=primary, sets={"eval": one}, gate=None)
    return page_of(run)


@pytest.mark.parametrize(
    ("outcome", "tone", "ship"),
    [("better", "good", "yes"), ("wording", "warning", "note"), ("worse", "bad", "no"), ("unclear", "neutral", "note")],
)
def test_the_fit_is_the_verdict_on_free_text(run: RunDir, outcome: str, tone: str, ship: str) -> None:
    page = judged(run, fit_of(outcome), 0.3)  # the likelihood's own interval is clear of zero in all of them
    assert page.verdict.tone == tone
    assert PHRASES[outcome] in page.verdict.headline  # type: ignore[index]
    assert "→" in page.verdict.sentences[0]
    assert "perplexity" in page.verdict.sentences[0]
    assert "With its own prompt an answer's loss is" in page.verdict.sentences[1]
    conditions = [c for c in page.ship.conditions if PHRASES[outcome] in c.text]  # type: ignore[index]
    assert [condition.state for condition in conditions] == [ship]
    contest = page.sets[0].contests[0]
    assert (contest.tone == "good") == (outcome == "better")
    html = build_report(run).read_text()
    assert "Training helped" not in html


def test_short_answers_are_judged_by_exact_match_but_the_loss_is_not_denied(run: RunDir) -> None:
    page = judged(run, beside_of("better"), 0.0, "exact_match")
    assert page.verdict.headline == f"{BESIDE}; the trained model {PHRASES['better']}"
    sure = judged(run, fit_of("better", decides=False), 0.3, "exact_match")
    assert sure.verdict.headline == "Training helped"


BESIDE = "No clear change of exact match (0 of 20 before and after)"


def beside_of(outcome: str) -> dict[str, Any]:
    """A fit beside an exact match that shows nothing, as `describe_fit` writes it."""
    fit = fit_of(outcome, decides=False) | {"reason": "", "show_more": ["more steps (the loss was falling)"]}
    (effect,) = fit["effects"]
    headline = f"{BESIDE}; the trained model {PHRASES[outcome]}"  # type: ignore[index]
    return fit | {"effects": [effect | {"metric_text": BESIDE, "headline": headline}]}


@pytest.mark.parametrize(("outcome", "tone"), [("better", "neutral"), ("wording", "neutral"), ("worse", "warning")])
def test_a_metric_that_cannot_move_does_not_deny_what_the_loss_shows(run: RunDir, outcome: str, tone: str) -> None:
    page = judged(run, beside_of(outcome), 0.0, "exact_match")
    phrase = PHRASES[outcome]  # type: ignore[index]
    assert page.verdict.tone == tone
    assert page.verdict.headline == f"{BESIDE}; the trained model {phrase}"
    assert "perplexity" in page.verdict.sentences[0]
    assert page.verdict.sentences[0].startswith("On 20 held-out rows: ")
    assert "What would show more: more steps (the loss was falling)." in page.verdict.sentences
    (told,) = [condition for condition in page.ship.conditions if BESIDE in condition.text]
    assert (told.state, phrase in told.text) == ("note", True)
    contest = page.sets[0].contests[0]
    assert contest.tone == "neutral"
    assert contest.outcome.startswith("no clear difference; ")
    html = build_report(run).read_text()
    assert "No clear effect" not in html
    assert "Training helped" not in html
    about = CardContext("card", get_recipe("math_reasoning"), None, "base", None, [], "merged")
    assert any(phrase in line for line in limitations(page.found, about, page.sets, None))


def test_why_a_server_is_judged_by_exact_match_is_said(run: RunDir) -> None:
    page = judged(run, {"decides": False, "reason": "a server gives no likelihoods", "effects": []}, 0.0, "exact_match")
    assert page.verdict.sentences[-1] == "A server gives no likelihoods."


def test_where_metric_and_loss_disagree_both_are_told(run: RunDir) -> None:
    page = judged(run, fit_of("worse", decides=False), 0.3, "exact_match")
    assert page.verdict.headline == "Training helped"
    assert PHRASES["worse"] in page.verdict.sentences[0]


def with_other(run: RunDir, outcome: str, other: str | None, difference: float = 0.0) -> Page:
    """The page of a run judged by likelihood, with a second set: judged so too, or by exact match."""
    judged(run, fit_of(outcome), 0.3)
    summary = json.loads(run.eval_summary.read_text())
    second = json.loads(json.dumps(summary["sets"]["eval"]))
    second["primary_metric"] = LIKELIHOOD if other else "exact_match"
    if other is None:
        del second["fit"]
        (line,) = second["comparisons"]
        ends = [difference - 0.02, difference + 0.02]
        second["comparisons"] = [line | {"metric": "exact_match", "difference": difference, "ci95": ends}]
        second["variants"] = {name: {"exact_match": m[LIKELIHOOD]} for name, m in second["variants"].items()}
    else:
        second["fit"] = fit_of(other)
    write_json(run.eval_summary, summary | {"sets": {**summary["sets"], "old": second}})
    return page_of(run)


@pytest.mark.parametrize(
    ("other", "fell"), [("better", False), ("unclear", False), ("wording", False), ("worse", True)]
)
def test_verdict_and_shipping_agree_on_other_sets(run: RunDir, other: str, fell: bool) -> None:
    """All of these likelihoods rose by more than chance: the fit decides, not their interval."""
    page = with_other(run, "better", other)
    assert ("other scores fell" in page.verdict.headline) == fell
    assert any("Regression on another task" in condition.text for condition in page.ship.conditions) == fell
    assert any("No significant regression on old" in condition.text for condition in page.ship.conditions) != fell


@pytest.mark.parametrize("outcome", ["better", "wording", "unclear", "worse"])
def test_a_headline_keeps_the_effect_and_says_that_other_scores_fell(run: RunDir, outcome: str) -> None:
    page = with_other(run, outcome, None, -0.3)
    assert PHRASES[outcome] in page.verdict.headline  # type: ignore[index]
    assert page.verdict.headline.endswith("other scores fell")
    assert page.verdict.tone == ("bad" if outcome == "worse" else "warning")
    gained = with_other(run, outcome, None, 0.3)
    assert ("No clear effect" in gained.verdict.headline) == (outcome == "unclear")


def test_a_gain_that_only_the_loss_shows_is_not_overwritten_by_one_elsewhere(run: RunDir) -> None:
    judged(run, beside_of("better"), 0.0, "exact_match")
    summary = json.loads(run.eval_summary.read_text())
    second = json.loads(json.dumps(summary["sets"]["eval"]))
    del second["fit"]
    second["comparisons"] = [line | {"difference": 0.3, "ci95": [0.2, 0.4]} for line in second["comparisons"]]
    write_json(run.eval_summary, summary | {"sets": {**summary["sets"], "old": second}})
    page = page_of(run)
    assert page.verdict.headline == f"{BESIDE}; the trained model {PHRASES['better']}"
    assert any(sentence.startswith("On old the model gained") for sentence in page.verdict.sentences)


def test_beside_an_answer_the_page_says_once_what_the_percentage_is(run: RunDir) -> None:
    note = "no mark for the generated one"
    before = build_report(run).read_text()
    assert note not in before
    summary = json.loads(run.eval_summary.read_text())
    summary["primary_metric"] = summary["sets"]["eval"]["primary_metric"] = LIKELIHOOD
    for variant in ("base", "merged"):
        path = run.eval / "eval" / f"{variant}.predictions.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for n, line in enumerate(lines):
            line["scores"][LIKELIHOOD] = 0.1 + 0.001 * n * (variant == "merged")
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_json(run.eval_summary, summary)
    html = build_report(run).read_text()
    assert html.count(note) == 1
    assert "those whose expected answer became less likely first" in html or "(Held-out prompts)" in html


def test_the_worst_example_comes_first(run: RunDir) -> None:
    groups = select_compared_sets(*rows(run))
    for group in groups:
        gains = [example.gain for example in group.shown]
        assert gains == sorted(gains)
    assert groups[-1].shown[0].kind == "lost"


def test_marked_words_are_those_the_gold_answer_does_not_have() -> None:
    assert mark_differences("same", "same") == "same"
    assert mark_differences("<b> we go", "we go") == "<mark>&lt;b&gt; </mark>we go"
    assert mark_differences("<b>", None) == "&lt;b&gt;"
    assert mark_differences("", "gone") == ""
