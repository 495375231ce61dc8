"""Two sets of answers: matched, counted, tested; and a gate that asks about another run."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.cli.compare import _verdict, cut_around_difference
from surefit.config.schema import GateSection
from surefit.core.errors import ConfigError, DataError
from surefit.core.rundir import RunDir
from surefit.evaluate.answers import align_answers, read_answers, select_tuned_variant
from surefit.evaluate.compare import (
    AnswerComparison,
    MetricComparison,
    compare_answers,
    detectable_difference,
    mcnemar,
    read_pair,
)
from surefit.evaluate.gate import evaluate_gate, require_reference
from surefit.evaluate.plot import draw_forest_plot
from surefit.evaluate.stats import MeanInterval, PairedDifference
from surefit.task import TaskRecipe

RECIPE = TaskRecipe(
    name="function_calling", version=1, citation="this test", columns=(), to_example=None, parse=None, score=None,
    primary_metric="right", baselines={"lead-3": None},
)  # fmt: skip


def test_an_example_shows_the_place_where_the_answers_part():
    gold, a, b = (
        f'[{{"name": "send_message", "arguments": {{"to": "Xenia", "text": "{x}"}}}}]' for x in ("no", "on", "n")
    )
    shown = cut_around_difference([gold, a, b], 50)
    assert len({text[:50] for text in (gold, a, b)}) == 1, "from the beginning, nobody would see a difference"
    assert len(set(shown)) == 3
    assert all(text.startswith("…") and len(text) <= 50 for text in shown)
    assert shown[1].endswith('"text": "on"}}]')
    assert cut_around_difference(["B", "A"]) == ["B", "A"]
    assert cut_around_difference(["x" * 100 + "a", "b"], 10) == ["xxxxxxxxx…", "b"]


def test_rows_too_few_for_any_difference_are_said_to_be():
    metric = MetricComparison(
        MeanInterval(0, 0, 0, 3), MeanInterval(0, 0, 0, 3), PairedDifference(1 / 3, -0.5, 1.0, 2, 1, 0), 1.0, 1.525
    )
    text = _verdict(AnswerComparison("a", "b", "chat", "irrelevance", {"irrelevance": metric}, []))
    assert text.endswith("3 rows are too few to find any difference four times in five.")


def micro(rows):
    return {"f1": sum(row["_right"] for row in rows) / sum(row["_size"] for row in rows)}


CORPUS = TaskRecipe(
    name="corpus", version=1, citation="this test", columns=(), to_example=None, parse=None, score=None,
    primary_metric="f1", aggregate=micro,
)  # fmt: skip


def line(number, score, **changed):
    scores = score if isinstance(score, dict) else {"right": float(score)}
    place = {"index": number, "where": f"d.jsonl:{number}", "gold": f"g{number}"}
    return place | {"text": f"t{score}", "scores": scores} | changed


def run_of(tmp_path, name, lines, variants=("base", "merged"), version=1, recipe="function_calling"):
    run = RunDir(tmp_path / name)
    (run.eval / "eval").mkdir(parents=True)
    for variant in variants:
        path = run.eval / "eval" / f"{variant}.json"
        path.write_text(json.dumps({"recipe": recipe, "recipe_version": version}))
        text = "".join(json.dumps(one) + "\n" for one in lines)
        path.with_name(f"{variant}.predictions.jsonl").write_text(text)
    return run


def values(*scores):
    return [line(number, score) for number, score in enumerate(scores)]


BEFORE, AFTER = [0] * 30 + [1] * 10 + [1] * 60, [1] * 30 + [0] * 10 + [1] * 60


def test_counts_intervals_and_mcnemar(tmp_path):
    a, b = run_of(tmp_path, "a", values(*BEFORE)), run_of(tmp_path, "b", values(*AFTER))
    found = compare_answers(*read_pair(str(a.path), str(b.path)), RECIPE).document()
    metric = found["metrics"]["right"]
    assert (metric["wins"], metric["losses"], metric["ties"]) == (30, 10, 60)
    assert metric["difference"] == pytest.approx(0.2)
    assert metric["mcnemar_p"] == pytest.approx(0.002221, abs=1e-6)
    assert found["verdict"] == "better"
    assert found["b"] == f"{b.path}:merged"
    assert len(found["won"]) == len(found["lost"]) == 5
    assert found["won"][0]["gold"] == "g0"
    assert compare_answers(*read_pair(str(b.path), str(a.path)), RECIPE).verdict == "worse"
    assert compare_answers(*read_pair(str(a.path), str(a.path)), RECIPE).verdict == "undecided"


@pytest.mark.parametrize(("wins", "losses", "p"), [(0, 5, 0.0625), (6, 0, 0.03125), (5, 5, 1.0), (12, 3, 0.03515625)])
def test_mcnemar_is_the_exact_binomial_test(wins, losses, p):
    assert mcnemar(wins, losses) == pytest.approx(p)  # scipy.stats.binomtest(wins, wins + losses).pvalue


def test_the_detectable_difference_is_found_four_times_in_five():
    """By simulation: 100 rows, and a true difference of the size that the formula names."""
    import numpy as np

    from surefit.evaluate.stats import paired_bootstrap

    n, discordant = 300, 0.3
    size = detectable_difference(float(np.sqrt(discordant - 0.087**2)), n)
    rng = np.random.default_rng(4)
    chances = [(discordant + size) / 2, (discordant - size) / 2, 1 - discordant]
    draws = rng.choice([1.0, -1.0, 0.0], (600, n), p=chances)
    found = np.mean([paired_bootstrap(np.zeros(n), row).low > 0 for row in draws])
    assert found == pytest.approx(0.8, abs=0.05)
    assert detectable_difference(0.0, 50) == pytest.approx(6 / 50)


def test_graded_scores_have_no_mcnemar(tmp_path):
    run = run_of(tmp_path, "a", values(0.5, 1, 0))
    assert compare_answers(*read_pair(str(run.path), str(run.path)), RECIPE).main.mcnemar_p is None


def test_corpus_scores_and_who_won_a_row_that_has_none_of_its_own(tmp_path):
    rows = [[{"_right": float((i + k) % 3), "_size": 3.0} for i in range(40)] for k in (0, 1)]
    a, b = (run_of(tmp_path, name, values(*each), recipe="corpus") for name, each in zip("ab", rows, strict=True))
    found = compare_answers(*read_pair(str(a.path), str(b.path)), CORPUS).document()
    metric = found["metrics"]["f1"]
    assert (metric["wins"], metric["losses"], metric["ties"]) == (27, 13, 0)
    assert metric["difference"] == pytest.approx(micro(rows[1])["f1"] - micro(rows[0])["f1"])
    assert metric["ci95"][0] < metric["difference"] < metric["ci95"][1]
    assert set(found["metrics"]) == {"f1"}


def test_rows_are_matched_by_place_in_any_order_or_by_number(tmp_path):
    a, b = run_of(tmp_path, "a", values(0, 1, 0)), run_of(tmp_path, "b", values(1, 1, 0)[::-1])
    assert compare_answers(*read_pair(str(a.path), str(b.path)), RECIPE).main.difference.wins == 1
    moved = run_of(tmp_path, "c", [line(n, 1, where=f"elsewhere.jsonl:{n}") for n in range(3)])
    assert len(align_answers(*read_pair(str(a.path), str(moved.path)))) == 3


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (values(1, 1), "answered different rows: "),
        ([*values(1, 1), line(9, 1)], "2 in common"),
        ([*values(1, 1), line(2, 1, gold="another")], "the gold answer of d.jsonl:2 differs"),
        ([*values(1, 1), line(1, 1)], "answered different rows"),
    ],
)
def test_other_rows_are_refused_with_the_reason(tmp_path, lines, message):
    a, b = run_of(tmp_path, "a", values(0, 1, 0)), run_of(tmp_path, "b", lines)
    with pytest.raises(DataError) as raised:
        compare_answers(*read_pair(str(a.path), str(b.path)), RECIPE)
    assert message in raised.value.message


def test_what_a_name_may_be(tmp_path):
    run = run_of(tmp_path, "a", values(0, 1), ("base", "adapter", "merged", "merged+grammar", "baseline:lead-3"))
    text = str(run.path)
    assert [side.name for side in read_pair("lead-3", text)] == [f"{text}:baseline:lead-3", f"{text}:merged"]
    assert read_pair(f"{text}:adapter", "base")[1].name == f"{text}:base"
    assert read_answers(f"{text}:merged+grammar").name == f"{text}:merged+grammar"
    assert read_pair(text, text, variant="adapter")[0].name == f"{text}:adapter"
    assert select_tuned_variant(["baseline:x", "base", "merged+grammar"]) == "merged+grammar"
    assert select_tuned_variant(["baseline:x", "base"]) is None
    for wrong, message in ((f"{text}:mergd", "did you mean 'merged'"), ("nothing", "no run directory")):
        with pytest.raises(DataError, match=message):
            read_answers(wrong)
    with pytest.raises(DataError, match="did you mean 'lead-3'"):
        read_pair("lead3", text)
    with pytest.raises(DataError, match="has not been scored in this run; scored: eval"):
        read_answers(text, "other")


def invoke(*arguments):
    done = CliRunner().invoke(app, ["compare", *map(str, arguments)])
    return done.exit_code, done.output


def test_the_verb(tmp_path):
    lines = [[line(n, {"exact_match": float(v)}) for n, v in enumerate(each)] for each in (BEFORE, AFTER)]
    a, b = (run_of(tmp_path, name, each) for name, each in zip("ab", lines, strict=True))
    code, text = invoke(a.path, b.path, "--plot", tmp_path / "x.svg")
    assert code == 0
    assert "+20.0 [+" in text
    assert "B is better than A by more than chance (exact_match)" in text
    ElementTree.fromstring((tmp_path / "x.svg").read_text())
    code, text = invoke(a.path, b.path, "--json")
    found = json.loads(text.splitlines()[-1])
    assert (code, found["verdict"], found["n"]) == (0, "better", 100)
    assert "matched" not in found
    assert invoke(a.path, tmp_path / "nothing")[0] == 2
    assert "no metric 'exact_mach'; did you mean 'exact_match'?" in invoke(a.path, b.path, "--metric", "exact_mach")[1]
    other = run_of(tmp_path, "c", lines[0], version=2)
    assert "scored differently" in invoke(a.path, other.path)[1]
    assert "which judge?" in invoke(a.path, b.path, "--dry-run")[1]


def test_the_picture_holds_names_that_are_not_markup(tmp_path):
    run = run_of(tmp_path, "a<b>&", values(*BEFORE))
    found = compare_answers(*read_pair(str(run.path), str(run.path)), RECIPE)
    ElementTree.fromstring(draw_forest_plot(found.document()))


def gate(run, tuned, **section):
    rows = [one["scores"] for one in tuned]
    return evaluate_gate(GateSection(**section), RECIPE, {"merged": rows}, run)


def test_a_gate_against_another_run(tmp_path):
    old = run_of(tmp_path, "old", values(*[1] * 60, *[0] * 40))
    worse, same = values(*[1] * 40, *[0] * 60), values(*[1] * 60, *[0] * 40)
    failed = gate(run_of(tmp_path, "w", worse), worse, not_worse_than=str(old.path))
    assert not failed["passed"]
    assert "-0.200 [-0.2" in failed["reason"]
    assert f"against {old.path}:merged" in failed["reason"]
    assert gate(run_of(tmp_path, "s", same), same, not_worse_than=str(old.path))["passed"]
    assert gate(RunDir(tmp_path / "s"), same, not_worse_than=str(old.path), min=0.9)["outcome"] == "failed"


def test_a_gate_cannot_pass_on_other_rows_or_another_scorer(tmp_path):
    tuned = values(*[1] * 10)
    run = run_of(tmp_path, "run", tuned)
    run_of(tmp_path, "few", tuned[:5])
    run_of(tmp_path, "old", tuned, version=2)
    for name in ("few", "old"):
        found = gate(run, tuned, not_worse_than=str(tmp_path / name))
        assert found["outcome"] == "cannot tell"
        assert {"few": "different rows", "old": "version 2"}[name] in found["reason"]


def test_confidence_decides_how_sure_worse_must_be(tmp_path):
    base, tuned = values(*[1] * 60, *[0] * 40), values(*[1] * 53, *[0] * 47)
    scored = {name: [one["scores"] for one in each] for name, each in (("base", base), ("merged", tuned))}
    strict, lax = (
        evaluate_gate(GateSection(not_worse_than="base", confidence=c), RECIPE, scored, None) for c in (0.6, 0.999)
    )
    assert (strict["outcome"], lax["outcome"]) == ("failed", "cannot tell")
    assert "(99.9 %)" in lax["reason"]


def test_a_gate_against_a_baseline():
    rows = {"baseline:lead-3": [{"right": 1.0}] * 30, "base": [{"right": 0.0}] * 30, "merged": [{"right": 0.0}] * 30}
    found = evaluate_gate(GateSection(not_worse_than="lead-3"), RECIPE, rows, None)
    assert found["outcome"] == "failed"
    assert "against the baseline lead-3" in found["reason"]
    del rows["baseline:lead-3"]
    reason = evaluate_gate(GateSection(not_worse_than="lead-3"), RECIPE, rows, None)["reason"]
    assert "the baseline lead-3 has not been scored" in reason


def test_a_reference_that_is_not_there_is_found_early(tmp_path):
    with pytest.raises(ConfigError, match=r"neither base nor lead-3, nor a run directory.*did you mean 'lead-3'"):
        require_reference(GateSection(not_worse_than="led-3"), RECIPE)
    empty = RunDir(tmp_path / "empty")
    empty.create()
    with pytest.raises(ConfigError, match="has not been scored in this run"):
        require_reference(GateSection(not_worse_than=str(empty.path)), RECIPE)
