"""Every way of asking: under a grammar, by labels, in several draws, by a server, by no model; and going on after a
kill. The tiny models are those of test_runner.py, untrained where training does not matter."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
from tests.unit.evaluate.test_runner import LETTERS, RECIPE, examples_of, lines_of

from surefit.config.schema import EvaluateSection
from surefit.core.errors import ConfigError, DataError
from surefit.core.rundir import read_json
from surefit.evaluate import inference
from surefit.evaluate.in_training import build_scorer
from surefit.evaluate.runner import score_variants
from surefit.evaluate.settings import require_evaluation_settings
from surefit.generate import server
from surefit.generate.engine import Generation
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer
from surefit.task import Grammar, Prediction

pytestmark = pytest.mark.usefixtures("one_thread")

GRAMMATICAL = replace(RECIPE, grammar=lambda example: Grammar("regex", r"\[[A-H]\]"))


def vowels(example, found):
    return {"exact_match": float(any(p.parsed and p.parsed["letter"] == example.reference for p in found))}


def ranked(example, prediction):
    """The label that was ranked first, and a count for `aggregate`."""
    right = prediction.parsed is not None and next(iter(prediction.parsed)) == f"[{example.reference}]"
    return {"exact_match": float(right), "_labels": float(len(prediction.parsed or ()))}


SAMPLED = replace(RECIPE, score_samples=vowels)
RANKED = replace(RECIPE, choices=lambda example: ["[B]", f"[{example.reference}]", "[Z]"], score=ranked)


@pytest.fixture(scope="session")
def untrained(train_tiny):
    """A run whose adapter has seen one step: what it says does not matter."""
    return train_tiny([[10, 11, 12, 13]], steps=1)


@pytest.fixture
def run(untrained, copy_of):
    return copy_of(untrained)


def scored(run, recipe, variants=("base",), letters=LETTERS, seed=42, **changes):
    section = EvaluateSection.model_validate({**run.config.evaluate.model_dump(), **changes})
    train = run.config.train.model_copy(update={"seed": seed})
    config = run.config.model_copy(update={"evaluate": section, "train": train})
    return score_variants(config, recipe, run.hardware, run.run, {"eval": examples_of(letters)}, variants)


def record_of(run, variant):
    return read_json(run.run.eval / "eval" / f"{variant}.json")


def test_free_and_under_a_grammar_side_by_side(run):
    pytest.importorskip("xgrammar")
    summary = scored(run, GRAMMATICAL, ("base", "adapter"), constrained="both")["sets"]["eval"]
    assert list(summary["variants"]) == ["base", "base+grammar", "adapter", "adapter+grammar"]
    free, held = record_of(run, "base"), record_of(run, "base+grammar")
    assert (free["unparsed"], held["unparsed"], held["truncated"]) == (8, 0, 0)
    assert free["decoding"] == {"strategy": "greedy", "max_new_tokens": 12, "batch_size": 4}
    assert held["decoding"] == free["decoding"] | {"constrained": True}
    assert held["model_sha256"] == free["model_sha256"]
    assert held["tokens_per_second"] > 0
    assert summary["answers"]["base"] == {"truncated": free["truncated"], "unparsed": 8}
    pairs = {(line["a"], line["b"]) for line in summary["comparisons"]}
    assert ("base", "base+grammar") in pairs
    assert ("base+grammar", "adapter+grammar") in pairs
    assert ("adapter", "base+grammar") not in pairs
    only = scored(run, GRAMMATICAL, constrained="only")["sets"]["eval"]
    assert list(only["variants"]) == list(summary["variants"]), "what was scored before stays comparable"


def test_labels_are_ranked_and_nothing_is_generated(run, monkeypatch):
    monkeypatch.setattr(inference, "generate", None)
    summary = scored(run, RANKED, letters="DEFG")
    record, lines = record_of(run, "base"), lines_of(run, "eval", "base")
    assert record["decoding"] == {"strategy": "labels ranked", "batch_size": 4}
    assert (record["unparsed"], record["truncated"]) == (0, 0)
    for line, letter in zip(lines, "DEFG", strict=True):
        assert set(line["parsed"]) == {"[B]", f"[{letter}]", "[Z]"}
        assert line["text"] == next(iter(line["parsed"]))
        assert list(line["parsed"].values()) == sorted(line["parsed"].values(), reverse=True)
    assert lines[0]["scores"]["_labels"] == 3.0
    assert list(summary["sets"]["eval"]["variants"]["base"]) == ["exact_match"], "counts are no metrics"
    assert {line["metric"] for line in summary["sets"]["eval"]["comparisons"]} <= {"exact_match"}


def test_draws_depend_on_seed_and_row_only(run):
    drawn = {"samples": 3, "temperature": 1.5}
    scored(run, SAMPLED, **drawn)
    lines = lines_of(run, "eval", "base")
    assert [len(line["samples"]) for line in lines] == [3] * 8
    assert any(len({one["text"] for one in line["samples"]}) == 3 for line in lines)
    assert lines[0]["text"] == lines[0]["samples"][0]["text"]
    wanted = {"strategy": "sampled", "max_new_tokens": 12, "temperature": 1.5, "seed": 42, "samples": 3}
    assert record_of(run, "base")["decoding"] == wanted | {"batch_size": 4}
    scored(run, SAMPLED, batch_size=1, max_examples=4, **drawn)
    few = lines_of(run, "eval", "base")
    assert [line["samples"] for line in few] == [line["samples"] for line in lines[::2]], "rows 0, 2, 4, 6"
    scored(run, SAMPLED, seed=1, **drawn)
    assert lines_of(run, "eval", "base") != lines


def test_scores_that_were_drawn_otherwise_are_left_out(run):
    scored(run, SAMPLED, ("adapter",), samples=2, temperature=0.5)
    assert scored(run, SAMPLED, ("base",), samples=2, temperature=0.7)["left_out"] == [
        "eval/adapter: generated with temperature 0.5"
    ]
    assert scored(run, SAMPLED, ("base",))["left_out"] == ["eval/adapter: generated with strategy sampled"]


def test_baselines_are_variants_before_the_base_and_answered_once(run):
    asked = []

    def first(example):
        asked.append(example)
        return Prediction("[A]")

    recipe = replace(RECIPE, baselines={"always-a": first})
    summary = scored(run, recipe)["sets"]["eval"]
    assert list(summary["variants"]) == ["baseline:always-a", "base"]
    assert summary["variants"]["baseline:always-a"]["exact_match"]["mean"] == 1 / 8
    record = record_of(run, "baseline:always-a")
    assert (record["model"], record["model_sha256"], record["tokens_per_second"]) == (None, None, None)
    assert record["unparsed"] == 0, "its text is parsed like any answer"
    assert ("baseline:always-a", "base") in {(line["a"], line["b"]) for line in summary["comparisons"]}
    scored(run, recipe, ("adapter",))
    assert len(asked) == 8, "still comparable: not answered again"
    scored(run, replace(recipe, version=2), ("adapter",))
    assert len(asked) == 16


class FakeServer:
    """Answers as `ServedModel` does, and always right."""

    def __init__(self, url, switches=None):
        self.url = url

    def answer(self, messages_list, decoding, grammars=None, on_progress=None):
        on_progress(len(messages_list), len(messages_list), "")
        return [Generation(f"[{messages[-1]['content'][1]}]", False, 3) for messages in messages_list]


def test_a_server_answers_for_the_tuned_model(run, monkeypatch):
    monkeypatch.setattr(server, "ServedModel", FakeServer)
    url = {"server": "http://me:secret@localhost:1/v1"}
    summary = scored(run, RECIPE, None, **url)["sets"]["eval"]
    assert list(summary["variants"]) == ["base", "served"]
    assert summary["variants"]["served"]["exact_match"]["mean"] == 1.0
    record = record_of(run, "served")
    assert record["model"] == "http://***@localhost:1/v1"
    assert lines_of(run, "eval", "served")[0]["prompt"] == "user: KA"
    again = scored(run, RECIPE, ("adapter",), server="http://elsewhere/v1")
    assert again["left_out"] == ["eval/served: answered by a different model than the run's current one"]
    with pytest.raises(ConfigError, match="no server is named"):
        scored(run, RECIPE, ("served",))


def test_a_server_is_not_asked_what_it_cannot_be_told():
    examples = examples_of("A").examples
    rows = SimpleNamespace(examples=[replace(examples[0], tools=({},))], where=["x.jsonl:1"])
    with pytest.raises(DataError, match=r"x.jsonl:1.*tools"):
        inference.ServerModel(FakeServer("url"), RECIPE).prompts(rows)


def test_training_scores_as_evaluation_does(run):
    """With several draws and a limit, which both must read in the same way."""
    changes = {"samples": 2, "temperature": 0.5, "max_examples": 3, "constrained": "none"}
    summary = scored(run, SAMPLED, ("base",), **changes)["sets"]["eval"]["variants"]["base"]
    section = EvaluateSection.model_validate({**run.config.evaluate.model_dump(), **changes})
    config = run.config.model_copy(update={"evaluate": section})
    measure = build_scorer(config, SAMPLED, load_tokenizer(config.model), examples_of(LETTERS))
    assert measure(load_model(config.model, run.hardware)) == {m: value["mean"] for m, value in summary.items()}


@pytest.mark.parametrize(
    ("changes", "recipe", "field", "problem"),
    [
        ({"constrained": "both"}, RECIPE, "constrained", "letters has no grammar"),
        ({"samples": 4, "temperature": 0.5}, RECIPE, "samples", "scores one answer per prompt, not 4"),
        ({"samples": 4}, SAMPLED, "samples", "the 4 answers to a prompt are identical"),
        ({"num_beams": 2, "temperature": 0.5}, RECIPE, "num_beams", "2 beams .* a temperature of 0.5"),
        ({"num_beams": 2, "server": "http://x"}, RECIPE, "num_beams", "do not support beam search"),
        ({"server": "localhost:8000"}, RECIPE, "server", "must begin with http://"),
        ({"constrained": "only"}, RANKED, "constrained", "ranks labels .* constrained only has no effect"),
        ({"num_beams": 4}, RANKED, "num_beams", "ranks labels"),
    ],
)
def test_settings_that_exclude_each_other(changes, recipe, field, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        require_evaluation_settings(EvaluateSection.model_validate(changes), recipe)
    assert caught.value.field == f"evaluate.{field}"
    assert caught.value.help


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ConfigError) as caught:
        require_evaluation_settings(EvaluateSection.model_validate({"constrained": "only", "samples": 2}), RECIPE)
    assert [error.field for error in (caught.value, *caught.value.also)] == [
        "evaluate.constrained", "evaluate.samples", "evaluate.samples",
    ]  # fmt: skip


@pytest.fixture
def counting(monkeypatch):
    """How many prompts the engine was asked; `counting.fail_after` calls it dies."""
    seen = SimpleNamespace(prompts=0, calls=0, fail_after=None)
    original = inference.generate

    def counted(model, tokenizer, prompts, *rest):
        if seen.calls == seen.fail_after:
            raise KeyboardInterrupt
        seen.calls += 1
        seen.prompts += len(prompts)
        return original(model, tokenizer, prompts, *rest)

    monkeypatch.setattr(inference, "generate", counted)
    monkeypatch.setattr(inference, "PORTION", 1)
    return seen


def interrupted(run, counting, after, **changes):
    counting.fail_after = counting.calls + after
    with pytest.raises(KeyboardInterrupt):
        scored(run, RECIPE, batch_size=2, **changes)
    counting.fail_after, counting.prompts = None, 0


def test_an_evaluation_that_was_killed_goes_on(run, counting):
    scored(run, RECIPE, batch_size=2)
    whole, record = lines_of(run, "eval", "base"), record_of(run, "base")
    kept = run.run.eval / "eval" / "base.partial.jsonl"
    assert not kept.exists()
    interrupted(run, counting, after=2)
    assert len(kept.read_bytes().splitlines()) == 1 + 4
    scored(run, RECIPE, batch_size=3)
    assert counting.prompts == 4, "half of the rows; another batch size asks for the same answers"
    assert not kept.exists()
    assert lines_of(run, "eval", "base") == whole
    again = record_of(run, "base")
    assert again["metrics"] == record["metrics"]
    assert again["seconds"] > 0


def test_a_kept_answer_that_was_cut_short_is_asked_again(run, counting):
    interrupted(run, counting, after=2)
    kept = run.run.eval / "eval" / "base.partial.jsonl"
    kept.write_bytes(kept.read_bytes()[:-7])
    interrupted(run, counting, after=1)
    lines = kept.read_bytes().splitlines()
    assert len(lines) == 1 + 3 + 2
    assert all(json.loads(line) for line in lines)
    scored(run, RECIPE, batch_size=2)
    assert counting.prompts == 3


@pytest.mark.parametrize("change", ["tokens", "rows", "model"])
def test_answers_of_another_question_or_model_are_not_kept(run, counting, change):
    interrupted(run, counting, after=2)
    changes = {}
    if change == "tokens":
        changes["max_new_tokens"] = 5
    elif change == "rows":
        changes["letters"] = "ZBCDEFGH"
    else:
        (run.base / "extra.safetensors").write_bytes(b"other weights")
        (run.base / "model.safetensors.index.json").touch()
    scored(run, RECIPE, batch_size=2, **changes)
    assert counting.prompts == (5 if change == "rows" else 8), "the changed row, or all"
