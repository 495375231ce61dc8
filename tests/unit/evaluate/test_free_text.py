"""Which metric judges free text, and what is said of a model: fits better, worse, learned the wording only."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace

import pytest

from surefit.config.schema import GateSection
from surefit.core.rundir import RunDir, write_json
from surefit.evaluate.answers import PREDICTIONS, READ_WITH, Answers
from surefit.evaluate.compare import compare_answers
from surefit.evaluate.free_text import (
    LOSS,
    OTHER_LOSS,
    PHRASES,
    choose_metric,
    choose_metric_of_scores,
    describe_fit,
    measure_fit_effect,
)
from surefit.evaluate.paired import paired_differences
from surefit.evaluate.scoring import score_files
from surefit.evaluate.show_more import suggest_more
from surefit.evaluate.summary import summarize_evaluation
from surefit.facts.free_text import LIKELIHOOD, SHORT_ANSWER
from surefit.recipes import get_recipe
from surefit.task import Example, add_task_prefix

CHAT = get_recipe("chat")


def examples(*words):
    return [Example(completion=" ".join(["word"] * count)) for count in words]


def scores(own, other=None, exact=0.0):
    rows = []
    for n, loss in enumerate(own):
        row = {"exact_match": exact, LIKELIHOOD: math.exp(-loss), LOSS: loss}
        rows.append(row if other is None else row | {OTHER_LOSS: other[n]})
    return rows


def noisy(mean, seed, spread=0.1, count=20):
    rng = random.Random(seed)
    return [mean + rng.uniform(-spread, spread) for _ in range(count)]


BASE = scores(noisy(4.0, 1), noisy(4.2, 2))


@pytest.mark.parametrize(
    ("words", "metric"),
    [
        ((1, 2, 30), "exact_match"),
        ((SHORT_ANSWER,), "exact_match"),
        ((SHORT_ANSWER + 1,), LIKELIHOOD),
        ((1, 20, 30), LIKELIHOOD),
    ],
)
def test_the_median_length_decides(words, metric):
    choice = choose_metric(CHAT, examples(*words))
    assert choice.recipe.primary_metric == metric
    assert str(SHORT_ANSWER) in choice.reason
    assert f"{choice.words:g} words" in choice.reason


def test_a_row_that_one_side_could_not_read_is_left_out_for_both():
    before, after = scores([2.0, 3.0, 4.0]), scores([1.0, 2.0, 3.0])
    del after[1][LIKELIHOOD]
    pair = paired_differences("base", "merged", before, after, CHAT)[LIKELIHOOD]
    assert pair.wins + pair.losses + pair.ties == 2
    assert pair.difference == pytest.approx((math.exp(-1) - math.exp(-2) + math.exp(-3) - math.exp(-4)) / 2)


def test_where_no_likelihood_is_to_be_had_or_answers_are_no_free_text():
    served = choose_metric(CHAT, examples(20), server=True)
    assert served.recipe.primary_metric == "exact_match"
    assert "run `surefit evaluate RUN` to judge by likelihood" in served.reason
    calls = choose_metric(get_recipe("function_calling"), examples(20))
    assert (calls.recipe.primary_metric, calls.words, calls.reason) == ("exact_match", None, "")
    assert choose_metric(get_recipe("chat + math_reasoning"), examples(20)).words is None
    assert choose_metric(CHAT, [Example(text="plain")]).words is None


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        (scores(noisy(1.0, 3), noisy(2.5, 4)), "better"),
        (scores(noisy(1.0, 3)), "better"),  # no other prompt to read it behind
        (scores(noisy(1.0, 3), noisy(1.0, 4)), "wording"),
        (scores(noisy(1.0, 3), noisy(1.04, 4)), "wording"),
        (scores(noisy(1.0, 3, 0.4), noisy(1.04, 4, 0.4)), "unsure"),  # too noisy to tell
        (scores(noisy(6.0, 3), noisy(6.2, 4)), "worse"),
        (scores(noisy(4.0, 5), noisy(4.2, 6)), "unclear"),
        # The same by chance in no row, and nothing to speak of.
        (scores([loss - 0.004 for loss in noisy(4.0, 1)], noisy(4.2, 2)), "unclear"),
        # Most answers are known by heart, two are far off: likelihood up, mean loss up.
        (scores([0.1] * 5 + [9.0] * 15, [9.0] * 20), "mixed"),
    ],
)
def test_what_training_did_to_the_fit(after, outcome):
    effect = measure_fit_effect("base", "merged", BASE, after)
    assert effect.outcome == outcome
    assert PHRASES[outcome] in effect.headline
    assert PHRASES[outcome] in effect.sentence
    difference, low, high = effect.change
    assert low <= difference <= high
    assert difference == pytest.approx(effect.loss_b - effect.loss_a)
    assert f"{effect.loss_a:.2f} → {effect.loss_b:.2f}" in effect.sentence
    assert json.loads(json.dumps(effect.document()))["outcome"] == outcome


def test_no_phrase_calls_a_model_better_or_worse_as_such():
    assert not [phrase for phrase in PHRASES.values() if phrase.startswith(("is better", "better", "is worse"))]
    assert "fits your answers better" in PHRASES["better"]
    assert PHRASES["wording"] == "learned the wording of your answers, not what they say about the prompt"


def test_without_losses_there_is_no_effect():
    assert measure_fit_effect("base", "served", BASE, [{"exact_match": 0.0}] * 20) is None
    assert describe_fit(choose_metric(get_recipe("rec_ranking"), examples(20)), {"base": [{"hit": 0.0}] * 20}) is None


def test_the_summary_names_every_tuned_model_against_its_base():
    tuned = scores(noisy(1.0, 3), noisy(2.5, 4))
    choice = choose_metric(CHAT, examples(20))
    fit = describe_fit(choice, {"base": BASE, "adapter": tuned, "merged": tuned, "served": [{"exact_match": 0.0}] * 20})
    assert (fit["decides"], fit["median_words"], set(fit["losses"])) == (True, 20, {"base", "adapter", "merged"})
    assert [(effect["a"], effect["b"]) for effect in fit["effects"]] == [("base", "adapter"), ("base", "merged")]
    assert fit["losses"]["merged"] == pytest.approx(sum(row[LOSS] for row in tuned) / 20)


GATE = GateSection(not_worse_than="base")


def gate_of(gate, recipe, **variants):
    return summarize_evaluation(recipe, gate, {"eval": variants}, [], RunDir("none"))["gate"]


def test_the_gate_reads_the_metric_that_decides_or_the_one_it_names():
    long = choose_metric(CHAT, examples(20)).recipe
    tuned = scores(noisy(1.0, 3), noisy(2.5, 4))
    assert gate_of(GATE, long, base=BASE, merged=tuned)["outcome"] == "passed"
    assert gate_of(GATE, long, base=BASE, merged=tuned)["reason"].startswith(LIKELIHOOD)
    named = gate_of(replace_gate(metric="exact_match"), long, base=BASE, merged=tuned)
    assert named["reason"].startswith("exact_match")
    assert gate_of(replace_gate(min=0.9), long, base=BASE, merged=tuned)["outcome"] == "failed"


def replace_gate(**changes):
    return GateSection.model_validate(GATE.model_dump() | changes)


def test_a_gate_cannot_tell_what_a_server_does_not_say():
    served = [{"exact_match": 0.0}] * 20
    found = gate_of(replace_gate(metric=LIKELIHOOD), CHAT, base=BASE, served=served)
    assert found["outcome"] == "cannot tell"
    assert LIKELIHOOD in found["reason"]
    assert gate_of(GATE, CHAT, base=BASE, served=served)["outcome"] in ("passed", "cannot tell")


MATH = get_recipe("math_reasoning")
FITS = scores(noisy(1.0, 3), noisy(2.5, 4))


def told(after, recipe=MATH, before=BASE):
    """The effect on the merged model in a summary of math rows, none of which is solved unless the scores say so."""
    choice = choose_metric(recipe, examples(20))
    scored = {"base": before, "merged": after}
    found = summarize_evaluation(choice.recipe, None, {"eval": scored}, [])["sets"]["eval"]
    fit = describe_fit(choice, scored, found["variants"], found["comparisons"])
    (effect,) = fit["effects"]
    return effect, found | {"fit": fit, "answers": {"merged": {"truncated": 0}}}


def test_a_metric_that_cannot_move_is_told_with_what_the_loss_shows():
    effect, found = told(FITS)
    assert (found["primary_metric"], found["fit"]["decides"]) == ("exact_match", False)
    assert effect["metric_text"] == "No clear change of exact match (0 of 20 before and after)"
    assert effect["headline"] == f"{effect['metric_text']}; the trained model {PHRASES['better']}"
    assert effect["sentence"].startswith(f"{effect['metric_text']}; merged {PHRASES['better']} than base: mean loss")
    assert effect["n"] == 20
    shuffled, _ = told(scores(noisy(1.0, 3), noisy(1.0, 4)))
    assert shuffled["outcome"] == "wording"
    assert shuffled["headline"].endswith(PHRASES["wording"])
    assert PHRASES["better"] not in shuffled["sentence"]


def test_where_the_metric_is_clear_it_is_told_alone():
    solved = [row | {"exact_match": 1.0} for row in FITS]
    assert told(solved)[0]["metric_text"] == ""
    same = scores(noisy(4.0, 5), noisy(4.2, 6))
    assert told(same)[0]["metric_text"] == "", "neither shows anything"
    some = [row | {"exact_match": float(n == 0)} for n, row in enumerate(FITS)]
    assert told(some)[0]["metric_text"] == "No clear change of exact match (0 of 20 before, 1 of 20 after)"
    graded = [row | {"exact_match": 0.015} for row in FITS]
    assert "(0 of 20 before, 1.5 % after)" in told(graded)[0]["metric_text"]


def test_several_tasks_in_one_run_are_read_together():
    both = get_recipe("chat + math_reasoning")

    def mixed(rows):
        return [
            {"mean_of_tasks": 0.0} | add_task_prefix(("chat", "math_reasoning")[n % 2], row)
            for n, row in enumerate(rows)
        ]

    effect, found = told(mixed(FITS), both, mixed(BASE))
    assert (found["primary_metric"], effect["outcome"], effect["n"]) == ("mean_of_tasks", "better", 20)
    assert effect["metric_text"].startswith("No clear change of mean of tasks (0")


def run_with(tmp_path, losses=(), parameters=None):
    run = RunDir(tmp_path)
    run.metrics.write_text("".join(json.dumps({"step": n, "eval_loss": loss}) + "\n" for n, loss in enumerate(losses)))
    if parameters:
        write_json(run.plan, {"model": {"parameters": parameters}})
    return run


def test_only_what_the_numbers_support_is_said_to_show_more(tmp_path):
    _, found = told(FITS)
    fit = found["fit"]
    assert suggest_more(found, fit, RunDir(tmp_path / "none"), 64) == []
    more = suggest_more(found, fit, run_with(tmp_path, (2.0, 1.6, 1.5), 135_000_000), 64)
    assert [text.partition(" (")[0] for text in more] == ["a larger model", "more steps"]
    assert "135.00M" in more[0]
    assert "1.60 → 1.50" in more[1]
    assert suggest_more(found, fit, run_with(tmp_path, (1.5, 1.4, 1.45), 70_000_000_000), 64) == []
    cut = found | {"answers": {"merged": {"truncated": 12}}}
    (limit,) = suggest_more(cut, fit, run_with(tmp_path), 64)
    assert limit == "a higher evaluate.max_new_tokens (12 of 20 answers were cut at 64 tokens)"
    some = [row | {"exact_match": float(n < 3)} for n, row in enumerate(FITS)]
    _, changed = told(some)
    (rows,) = suggest_more(changed, changed["fit"], run_with(tmp_path), 64)
    assert rows.startswith("more rows to score (about ")
    worse, worse_found = told(scores(noisy(6.0, 3), noisy(6.2, 4)))
    assert (worse["outcome"], bool(worse["metric_text"])) == ("worse", True)
    assert suggest_more(worse_found, worse_found["fit"], run_with(tmp_path, (2.0, 1.5), 1000), 64) == []
    _, told_alone = told([row | {"exact_match": 1.0} for row in FITS])
    assert suggest_more(told_alone, told_alone["fit"], run_with(tmp_path, (2.0, 1.5), 1000), 64) == []


def answers(name, rows, **read_with):
    gold = " ".join(["word"] * 20)
    lines = [{"index": n, "where": f"r:{n}", "gold": gold, "text": "x", "scores": row} for n, row in enumerate(rows)]
    return Answers(name, lines, "chat", CHAT.version, read_with=read_with)


READ = {"tokenizer": "one", "max_length": 512, "answers_cut": 0}


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (READ, ""),
        ({}, ""),
        (READ | {"max_length": 1024}, ""),  # no answer was cut by either
        (READ | {"tokenizer": "two"}, "tokenizers differ"),
        (READ | {"max_length": 1024, "answers_cut": 1}, "512 and 1024"),
    ],
)
def test_likelihoods_of_other_tokens_are_not_compared(other, said):
    found = compare_answers(answers("a", BASE, **READ), answers("b", FITS, **other), CHAT)
    assert said in found.reason
    assert found.unlike == bool(said)
    if said:
        assert (found.metric, found.fit, list(found.metrics)) == ("exact_match", None, ["exact_match"])
        assert "likelihoods are not compared" in found.reason
        assert "exact match decides" in found.reason
    else:
        assert (found.metric, found.fit.outcome) == (LIKELIHOOD, "better")


def test_a_gate_against_another_run_cannot_tell_by_likelihoods_of_other_tokens(tmp_path):
    def saved(name, rows, tokenizer):
        run = RunDir(tmp_path / name)
        lines = answers(name, rows).lines
        (run.eval / "eval").mkdir(parents=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (run.eval / "eval" / f"merged{PREDICTIONS}").write_text(text)
        record = {"recipe": "chat", "recipe_version": CHAT.version, READ_WITH: READ | {"tokenizer": tokenizer}}
        write_json(run.eval / "eval" / "merged.json", record)
        return run

    own = saved("own", FITS, "one")
    long = choose_metric(CHAT, examples(20)).recipe
    for tokenizer, outcome in (("one", "passed"), ("two", "cannot tell")):
        other = saved(f"other-{tokenizer}", BASE, tokenizer)
        gate = GateSection(not_worse_than=str(other.path))
        found = summarize_evaluation(long, gate, {"eval": {"merged": FITS}}, [], own)["gate"]
        assert found["outcome"] == outcome, found
        assert ("tokenizers differ" in found["reason"]) == (tokenizer == "two")


def test_compare_says_what_the_loss_shows_beside_a_metric_that_does_not_move():
    sides = [
        replace(answers(name, rows), recipe="math_reasoning", version=3) for name, rows in (("a", BASE), ("b", FITS))
    ]
    found = compare_answers(*sides, MATH)
    assert (found.metric, found.verdict) == ("exact_match", "undecided")
    assert found.fit.metric_text == "No clear difference in exact match (0 of 20 in both)"


def test_compare_judges_by_likelihood_where_both_sides_have_it():
    tuned = scores(noisy(1.0, 3), noisy(2.5, 4))
    found = compare_answers(answers("a", BASE), answers("b", tuned), CHAT)
    assert (found.metric, found.verdict, found.fit.outcome) == (LIKELIHOOD, "better", "better")
    wording = compare_answers(answers("a", BASE), answers("b", scores(noisy(1.0, 3), noisy(1.0, 4))), CHAT)
    assert (wording.verdict, wording.document()["fit"]["outcome"]) == ("undecided", "wording")
    files = compare_answers(answers("a", [{"exact_match": 0.0}] * 20), answers("b", tuned), CHAT)
    assert (files.metric, files.fit) == ("exact_match", None)
    assert "judge by likelihood" in files.reason
    assert list(files.metrics) == ["exact_match"]


def test_scores_of_a_file_say_that_exact_match_cannot_move(tmp_path):
    rows = [{"prompt": f"ask {n}", "completion": " ".join(["word"] * 20)} for n in range(3)]
    gold, predicted = tmp_path / "gold.jsonl", tmp_path / "predicted.jsonl"
    gold.write_text("".join(json.dumps(row) + "\n" for row in rows))
    predicted.write_text("".join(json.dumps({"text": "word"}) + "\n" for _ in rows))
    record = score_files(CHAT, str(predicted), str(gold)).record
    assert (record["primary_metric"], list(record["metrics"])) == ("exact_match", ["exact_match"])
    assert "can hardly move for answers this long" in record["reason"]
    short = choose_metric_of_scores(CHAT, [{"gold": "yes"}], [[{"exact_match": 1.0}]])
    assert (short.recipe.primary_metric, short.recipe) == ("exact_match", replace(CHAT))
