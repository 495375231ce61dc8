"""Scores of real (tiny) models: strict denominators, the same rows for all, one variant rerun, stale ones left out."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.helpers.tokens import tokenize_example

from surefit.core.errors import ConfigError, DataError, GateError
from surefit.core.rundir import read_json, write_json
from surefit.data.rows.layouts import Examples
from surefit.evaluate import inference, runner, variants
from surefit.evaluate.rows import select_eval_rows
from surefit.evaluate.runner import score_variants
from surefit.merge.merge import merge_and_certify
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer
from surefit.task import Example, TaskRecipe

pytestmark = pytest.mark.usefixtures("one_thread")


def letter(text):
    found = re.fullmatch(r"\[([A-Z])\]", text)
    return found and {"letter": found[1]}


def score(example, prediction):
    if example.reference is None:
        raise DataError("the row has no answer", field="answer", help="add it")
    right = prediction.parsed is not None and prediction.parsed["letter"] == example.reference
    scores = {"exact_match": float(right), "valid": float(prediction.parsed is not None)}
    return scores | ({"vowels": float(right)} if example.reference in "AEIOU" else {})


RECIPE = TaskRecipe(
    name="letters", version=1, citation="this test", columns=(), to_example=lambda row: row, parse=letter, score=score,
    primary_metric="exact_match",
)  # fmt: skip


def examples_of(letters, name="eval.jsonl"):
    made = [
        Example(({"role": "user", "content": f"K{a}"}, {"role": "assistant", "content": f"[{a}]"}), None, f"[{a}]", a)
        for a in letters
    ]
    return Examples(made, [f"{name}:{number}" for number in range(1, len(made) + 1)], [])


LETTERS = "ABCDEFGH"


@pytest.fixture(scope="session")
def letters_once(train_tiny, tiny_tokenizer):
    """An adapter that has learnt the letters by heart, merged."""
    sequences = [tokenize_example(example, tiny_tokenizer).input_ids for example in examples_of(LETTERS)]
    run = train_tiny(sequences, steps=60)
    merge_and_certify(run.config, run.hardware, run.run, sequences)
    return run


@pytest.fixture
def letters(letters_once, copy_of):
    return copy_of(letters_once)


def scored(run, sets=None, variants=None, recipe=RECIPE, **changes):
    """Evaluate with some settings of the section `evaluate` changed."""
    section = run.config.evaluate.model_validate({**run.config.evaluate.model_dump(), **changes})
    config = run.config.model_copy(update={"evaluate": section})
    steps = []
    summary = score_variants(
        config,
        recipe,
        run.hardware,
        run.run,
        sets or {"eval": examples_of(LETTERS)},
        variants,
        lambda *s: steps.append(s),
    )
    scored.steps = steps
    return summary


def lines_of(run, name, variant):
    return [json.loads(line) for line in open(run.run.eval / name / f"{variant}.predictions.jsonl", encoding="utf-8")]


def test_every_variant_answers_every_row_of_every_set(letters):
    sets = {"eval": examples_of(LETTERS), "old": examples_of("XYZ", "old.jsonl")}
    summary = scored(letters, sets)
    assert summary == read_json(letters.run.eval_summary)
    assert (summary["primary_metric"], summary["gate"], summary["left_out"]) == ("exact_match", None, [])
    assert {name: found["n"] for name, found in summary["sets"].items()} == {"eval": 8, "old": 3}
    found = summary["sets"]["eval"]["variants"]
    assert list(found) == ["base", "adapter", "merged"]
    assert found["base"]["exact_match"]["mean"] == 0.0
    assert found["merged"]["exact_match"]["mean"] == found["adapter"]["exact_match"]["mean"] >= 0.75
    low, high = found["base"]["exact_match"]["ci95"]
    assert low == 0.0
    assert high == pytest.approx(0.3244, abs=1e-3), "Wilson's upper limit for 0 of 8"
    line = summary["sets"]["eval"]["comparisons"][1]
    assert (line["a"], line["b"], line["metric"]) == ("base", "adapter", "valid")
    by_pair = {(c["a"], c["b"], c["metric"]): c for c in summary["sets"]["eval"]["comparisons"]}
    assert set(by_pair) == {
        (a, b, metric)
        for a, b in [("base", "adapter"), ("base", "merged"), ("adapter", "merged")]
        for metric in ("exact_match", "valid", "vowels")
    }
    gain = by_pair["base", "merged", "exact_match"]
    assert gain["difference"] == found["merged"]["exact_match"]["mean"]
    assert (gain["wins"] + gain["ties"], gain["losses"]) == (8, 0)
    assert by_pair["base", "merged", "vowels"]["wins"] + by_pair["base", "merged", "vowels"]["ties"] == 2
    assert by_pair["adapter", "merged", "exact_match"]["ties"] == 8
    done = [step[0] for step in scored.steps]
    assert done == sorted(done)
    assert scored.steps[-1][:2] == (33, 33)
    assert scored.steps[-1][2].startswith("merged on old")


def test_the_record_of_a_variant_says_how_it_came_about(letters):
    scored(letters)
    record = read_json(letters.run.eval / "eval" / "merged.json")
    assert record["model"] == str(letters.run.merged)
    assert record["model_sha256"] == read_json(letters.run.certificate)["merged_sha256"]
    assert (record["recipe"], record["recipe_version"], record["n"]) == ("letters", 1, 8)
    assert record["decoding"] == {"strategy": "greedy", "max_new_tokens": 12, "batch_size": 4}
    assert record["metrics"]["exact_match"]["n"] == 8
    assert record["metrics"]["vowels"]["n"] == 2, "A and E: the other rows do not have this metric"
    lines = lines_of(letters, "eval", "merged")
    assert [line["index"] for line in lines] == list(range(8))
    assert (lines[1]["where"], lines[1]["gold"]) == ("eval.jsonl:2", "[B]")
    assert lines[1]["prompt"] == "<|user|>KB<|end|><|assistant|>"
    right = [line for line in lines if line["scores"]["exact_match"]]
    assert all(line["text"] == line["gold"] and line["parsed"] == {"letter": line["gold"][1]} for line in right)
    assert record["metrics"]["exact_match"]["mean"] == len(right) / 8


def test_answers_that_do_not_parse_or_are_cut_are_rows_with_zeros(letters):
    scored(letters, variants=["base"])
    record, lines = read_json(letters.run.eval / "eval" / "base.json"), lines_of(letters, "eval", "base")
    assert record["unparsed"] == 8
    assert record["metrics"]["valid"] == {"mean": 0.0, "ci95": [0.0, pytest.approx(0.3244, abs=1e-3)], "n": 8}
    assert len(lines) == 8
    cut = scored(letters, variants=["adapter"], max_new_tokens=3)
    record, lines = read_json(letters.run.eval / "eval" / "adapter.json"), lines_of(letters, "eval", "adapter")
    assert record["truncated"] == 8
    assert any(letter(line["text"]) for line in lines), "without its end the answer would parse"
    assert all(line["truncated"] and line["parsed"] is None for line in lines)
    assert cut["sets"]["eval"]["variants"]["adapter"]["exact_match"]["mean"] == 0.0


def test_base_is_the_model_without_the_adapter(letters):
    together = scored(letters, variants=["base", "adapter"])
    lines = lines_of(letters, "eval", "base")
    alone = scored(letters, variants=["base"])
    assert lines_of(letters, "eval", "base") == lines
    assert alone["sets"]["eval"]["variants"]["base"] == together["sets"]["eval"]["variants"]["base"]


def test_models_are_opened_once_and_one_at_a_time(letters, monkeypatch):
    opened = []
    for name in ("load_adapted", "load_saved", "load_for_generation"):
        original = getattr(variants, name)
        monkeypatch.setattr(
            variants, name, lambda *args, original=original, name=name: opened.append(name) or original(*args)
        )
    scored(letters, {"eval": examples_of(LETTERS), "old": examples_of("XYZ")})
    assert opened == ["load_adapted", "load_saved"]


def test_one_variant_can_be_scored_again(letters):
    first = scored(letters)
    before = (letters.run.eval / "eval" / "base.json").read_bytes()
    again = scored(letters, variants=["merged"])
    assert again == first
    assert (letters.run.eval / "eval" / "base.json").read_bytes() == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"max_new_tokens": 11}, "generated with max_new_tokens 12"),
        ({"max_examples": 4}, "answered other rows"),
        ({"recipe": replace(RECIPE, version=2)}, "scored by letters version 1"),
        ({"sets": {"eval": examples_of("ABCDEFGX")}}, "answered other rows"),
    ],
)
def test_scores_that_are_not_comparable_are_left_out_by_name(letters, changes, reason):
    scored(letters, variants=["base", "adapter"])
    summary = scored(letters, variants=["merged"], **changes)
    assert list(summary["sets"]["eval"]["variants"]) == ["merged"]
    assert summary["left_out"] == [f"eval/base: {reason}", f"eval/adapter: {reason}"]


def test_scores_of_pairs_whose_rejected_answer_was_edited_are_left_out(letters):
    def pairs(rejected):
        turn = {"role": "assistant", "content": rejected}
        rows = examples_of(LETTERS)
        made = [replace(example, rejected=(*example.prompt, turn)) for example in rows]
        return {"eval": Examples(made, list(rows.where), [])}

    scored(letters, pairs("[Z]"), variants=["base"])
    summary = scored(letters, pairs("[Y]"), variants=["merged"])
    assert summary["left_out"] == ["eval/base: answered other rows"]


def test_scores_of_a_model_that_has_changed_are_left_out(letters):
    scored(letters)
    (letters.run.adapter / "adapter_config.json").write_text("{}")
    summary = scored(letters, variants=["base"])  # base alone does not need the adapter
    assert summary["left_out"] == ["eval/adapter: answered by a different model than the run's current one"]


@pytest.mark.parametrize("damage", ["gone", "cut", "broken"])
def test_predictions_that_are_damaged_are_left_out_by_name(letters, damage):
    scored(letters, variants=["base"])
    path = letters.run.eval / "eval" / "base.predictions.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    changed = {"gone": None, "cut": lines[:-1], "broken": [b"{\n", *lines[1:]]}[damage]
    path.unlink() if changed is None else path.write_bytes(b"".join(changed))
    summary = scored(letters, variants=["adapter"])
    assert list(summary["sets"]["eval"]["variants"]) == ["adapter"]
    (reason,) = summary["left_out"]
    assert reason.startswith("eval/base: damaged" if damage == "broken" else "eval/base: answered other rows")


def test_a_share_of_the_rows_is_taken_evenly(letters):
    scored(letters, variants=["base"], max_examples=3)
    assert [line["index"] for line in lines_of(letters, "eval", "base")] == [0, 2, 5]
    scored(letters, variants=["base"], max_examples=99)
    assert len(lines_of(letters, "eval", "base")) == 8


def test_answers_with_strange_line_ends_are_read_back(letters, monkeypatch):
    original = inference.generate

    def strange(*args):
        return [replace(answer, text="one\u2028two\x85three\n") for answer in original(*args)]

    monkeypatch.setattr(inference, "generate", strange)
    summary = scored(letters, variants=["base"])
    assert summary["sets"]["eval"]["n"] == 8
    assert lines_of(letters, "eval", "base")[0]["text"] == "one\u2028two\x85three\n"


def test_the_gate_passes_and_fails(letters):
    passed = scored(letters, gate={"min": 0.5, "not_worse_than": "base", "margin": 0.5})["gate"]
    assert passed["passed"]
    assert passed["reason"].startswith("exact_match of merged is ")
    assert "against the base" in passed["reason"]
    failed = scored(letters, gate={"metric": "valid", "min": 1.0}, max_new_tokens=3)["gate"]
    reason = "valid of merged is 0.000; at least 1 is required"
    assert failed == {"outcome": "failed", "passed": False, "margin": 0.05, "reason": reason}


def test_a_gate_on_an_unknown_metric_stops_after_the_first_set(letters, monkeypatch):
    with pytest.raises(ConfigError, match="no metric 'exact_macht'; did you mean 'exact_match'") as caught:
        scored(letters, gate={"metric": "exact_macht", "min": 0.5})
    assert caught.value.field == "evaluate.gate.metric"
    assert not list(letters.run.eval.rglob("*.json"))
    monkeypatch.setattr(inference, "generate", None)
    scored(letters, variants=["base"], gate={"metric": "exact_match", "min": 0.5})
    assert (letters.run.eval / "eval" / "base.json").exists(), "what was answered before is not asked again"


def test_an_empty_set_is_an_error_before_anything_is_loaded(letters, monkeypatch):
    monkeypatch.setattr(runner, "open_variants", None)
    with pytest.raises(DataError, match="'eval' has no rows") as caught:
        scored(letters, {"eval": Examples([], [], [])})
    assert caught.value.field == "data.eval"
    with pytest.raises(DataError, match="'old' has no rows") as caught:
        scored(letters, {"eval": examples_of("A"), "old": Examples([], [], [])})
    assert caught.value.field == "evaluate.extra_sets.old"


def test_a_row_without_an_answer_is_found_before_anything_is_generated(letters, monkeypatch):
    monkeypatch.setattr(runner, "open_variants", None)
    examples = examples_of("ABC")
    examples.examples[1] = replace(examples.examples[1], reference=None)
    with pytest.raises(DataError) as caught:
        scored(letters, {"eval": examples})
    assert (caught.value.path, caught.value.field, caught.value.help) == ("eval.jsonl:2", "answer", "add it")


def test_a_metric_that_depends_on_the_answer_is_the_recipes_fault(letters):
    def whimsical(example, prediction):
        return {"exact_match": 0.0} | ({"bonus": 1.0} if prediction.parsed else {})

    with pytest.raises(DataError, match=r"row \d has 'bonus' for adapter"):
        scored(letters, recipe=replace(RECIPE, score=whimsical), variants=["base", "adapter"])


@pytest.mark.parametrize("wanted", [["model"], ["base", "megred"]])
def test_unknown_variants(letters, wanted):
    with pytest.raises(ConfigError, match="has no variant") as caught:
        scored(letters, variants=wanted)
    assert caught.value.help == "choose from base, adapter, merged, or a checkpoint: step-N"


def test_a_variant_that_is_not_there_yet(letters):
    letters.run.merged.rename(letters.run.path / "elsewhere")
    with pytest.raises(ConfigError, match="this run has no merged/ yet") as caught:
        scored(letters)
    assert caught.value.help == "`surefit merge` writes it; without it: --variant base --variant adapter"


@pytest.mark.parametrize("how", ["changed", "refused", "missing"])
def test_a_merged_model_without_its_certificate_is_not_scored(letters, how):
    if how == "changed":
        file = min(letters.run.merged.glob("*.safetensors"))
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(bytes(data))
    elif how == "refused":
        write_json(letters.run.certificate, {**read_json(letters.run.certificate), "passed": False})
    else:
        letters.run.certificate.unlink()
    with pytest.raises(GateError, match="merged/ has changed since its certificate was written"):
        scored(letters)


def test_a_whole_model_is_scored_against_its_base(train_tiny, tiny_tokenizer):
    sequences = [tokenize_example(example, tiny_tokenizer).input_ids for example in examples_of(LETTERS)]
    run = train_tiny(sequences, kind="full", steps=60)
    summary = scored(run)
    assert list(summary["sets"]["eval"]["variants"]) == ["base", "model"]
    assert summary["sets"]["eval"]["variants"]["model"]["exact_match"]["mean"] >= 0.75


def test_nothing_half_written_when_interrupted(letters, monkeypatch):
    scored(letters)

    def interrupt(*args):
        raise KeyboardInterrupt

    before = {path: path.read_bytes() for path in letters.run.eval.rglob("*") if path.is_file()}
    monkeypatch.setattr(inference, "generate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        scored(letters)
    assert {path: path.read_bytes() for path in letters.run.eval.rglob("*") if path.is_file()} == before


def test_the_tuned_model_answers_with_its_own_tokenizer(letters):
    config = letters.config
    opened = [
        (name, tokenizer.name_or_path)
        for name, _, tokenizer in variants.open_variants(config, letters.hardware, letters.run, ("base", "merged"))
    ]
    assert opened == [("base", str(letters.base)), ("merged", str(letters.run.merged))]


def test_disabling_the_adapter_gives_the_base_to_the_bit(letters):
    ids = torch.tensor([load_tokenizer(letters.config.model)("sum 3 and 14").input_ids])
    plain = load_model(letters.config.model, letters.hardware)(ids).logits
    opened = variants.open_variants(letters.config, letters.hardware, letters.run, ("base", "adapter"))
    _, model, _ = next(opened)
    torch.testing.assert_close(model(ids).logits, plain, rtol=0, atol=0)
    _, model, _ = next(opened)
    assert float((model(ids).logits - plain).abs().max()) > 0.1


def test_scores_of_another_recipe_are_kept_and_out_of_the_way(letters):
    scored(letters)
    before = {path.name: path.read_bytes() for path in (letters.run.eval / "eval").iterdir()}
    summary = scored(letters, variants=["merged"], recipe=replace(RECIPE, name="numbers"))
    (home,) = (letters.run.eval / "earlier").iterdir()
    assert home.name.startswith("letters-v1-")
    assert {path.name: path.read_bytes() for path in (home / "eval").iterdir()} == before
    assert sorted(path.name for path in (letters.run.eval / "eval").iterdir()) == [
        "merged.json", "merged.predictions.jsonl",
    ]  # fmt: skip
    assert summary["left_out"] == []
    assert f"eval/base, scored by letters version 1: eval/earlier/{home.name}" in summary["set_aside"]


def test_scores_with_other_settings_are_kept_when_new_ones_are_written(letters):
    scored(letters, variants=["merged"])
    before = (letters.run.eval / "eval" / "merged.json").read_bytes()
    summary = scored(letters, variants=["merged"], max_new_tokens=11)
    (kept,) = (letters.run.eval / "earlier").glob("*/eval/merged.json")
    assert kept.read_bytes() == before
    assert len(summary["set_aside"]) == 1
    assert scored(letters, variants=["merged"], max_new_tokens=11)["set_aside"] == []


THINKING = Path(__file__).parents[1] / "model" / "thinking.jinja"
OFF = {"enable_thinking": False}


@pytest.mark.parametrize("trained", [{}, OFF], ids=["trained on", "trained off"])
@pytest.mark.parametrize("asked", [{}, OFF, {"enable_thinking": True}], ids=["as trained", "off", "on"])
def test_every_variant_is_asked_with_the_switches_of_the_section(letters, trained, asked):
    model = letters.config.model.model_copy(update={"chat_template": str(THINKING), "chat_template_kwargs": trained})
    section = letters.config.evaluate.model_copy(update={"chat_template_kwargs": asked})
    config = letters.config.model_copy(update={"model": model, "evaluate": section})
    load_tokenizer(model).save_pretrained(letters.run.adapter)  # as training with these switches leaves it
    merge_and_certify(config, letters.hardware, letters.run, [[1, 2, 3]])
    rows = select_eval_rows("eval", examples_of("A"), None)
    given = {
        name: answers.tokenizer.decode(answers.prompts(rows)[0])
        for name, answers in runner.open_prompt_models(
            config, RECIPE, letters.hardware, letters.run, ("base", "adapter", "merged")
        )
    }
    off = (trained | asked) == OFF
    prompt = "<|im_start|>user\nKA<|im_end|>\n<|im_start|>assistant\n" + "<think>\n\n</think>\n\n" * off
    assert given == dict.fromkeys(("base", "adapter", "merged"), prompt)


def test_scores_with_other_switches_are_kept_apart(letters):
    def asked(**switches):
        return scored(letters, variants=("base",), chat_template_kwargs=switches)

    asked()
    record = letters.run.eval / "eval" / "base.json"
    assert "chat_template_kwargs" not in read_json(record)["decoding"]
    asked(enable_thinking=False)
    assert read_json(record)["decoding"]["chat_template_kwargs"] == OFF
    (earlier,) = (letters.run.eval / "earlier").glob("*/eval/base.json")
    assert "chat_template_kwargs" not in read_json(earlier)["decoding"]
    # What was scored before the switch was thrown is not compared with what was scored after it.
    summary = scored(letters, variants=("adapter",))
    assert "base" not in summary["sets"]["eval"]["variants"]
