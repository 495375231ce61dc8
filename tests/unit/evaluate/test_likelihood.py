"""Likelihood of held-out answers: by hand on the built-in model, which tokens count, and what is said of the others."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tests.unit.evaluate.test_runner import LETTERS, examples_of, letters, letters_once, lines_of, scored  # noqa: F401
from tests.unit.evaluate.test_runner import RECIPE as LETTER_RECIPE

from surefit.config.schema import ModelSection
from surefit.core.errors import ConfigError
from surefit.core.rundir import read_json, write_json
from surefit.data.tokens.tokenize import encode, tokenize_prompt
from surefit.evaluate import likelihood as likelihood_module
from surefit.evaluate.answers import CUT, READ_WITH
from surefit.evaluate.free_text import LOSS, OTHER_LOSS
from surefit.evaluate.inference import LocalModel
from surefit.evaluate.likelihood import pair_with_other_prompts, read_answer_likelihoods, reference_tokens
from surefit.evaluate.record import ResultStore
from surefit.evaluate.rows import EvalRows, select_eval_rows
from surefit.facts.free_text import LIKELIHOOD
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer
from surefit.recipes.chat import RECIPE

pytestmark = pytest.mark.usefixtures("one_thread")

NANO = ModelSection(name_or_path="surefit/nano", dtype="float32")
ANSWERS = {
    "My kettle is broken.": "Hi, we will replace the kettle within three days.",
    "Where is my parcel?": "It is on its way.",
    "The lamp is loud.": "Please send the lamp back to us, and we will refund the full price to your card.",
    "Is the oven blue?": "Yes.",
}


def example_of(question, answer, *before, **last):
    asked = [*before, {"role": "user", "content": question}, {"role": "assistant", "content": answer, **last}]
    return RECIPE.to_example({"messages": asked})


EXAMPLES = [example_of(*pair) for pair in ANSWERS.items()]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(NANO)


@pytest.fixture(scope="module")
def model():
    return load_model(NANO, SimpleNamespace(kind="cpu"))


def rows_of(examples):
    return pair_with_other_prompts(EvalRows(list(range(len(examples))), examples, [f"r:{n}" for n in examples]))


def read(model, tokenizer, examples=EXAMPLES, batch_size=4, max_length=None):
    rows = rows_of(examples)
    prompts = [tokenize_prompt(example, tokenizer) for example in examples]
    others = [None if other is None else tokenize_prompt(other, tokenizer) for other in rows.others]
    return read_answer_likelihoods(model, tokenizer, rows, prompts, others, batch_size, max_length)


def by_hand(model, prompt, answer):
    """Mean log-probability of the answer's ids behind the prompt's, from the logits of all positions."""
    with torch.no_grad():
        logs = model.eval()(torch.tensor([prompt + answer])).logits[0].double().log_softmax(-1)
    values = [logs[len(prompt) + n - 1, token].item() for n, token in enumerate(answer)]
    return sum(values) / len(values)


def test_it_is_the_mean_log_probability_of_the_answers_own_tokens(model, tokenizer):
    found = read(model, tokenizer)
    assert found.counts == {"answers_cut": 0, "answers_unread": 0}
    rows = rows_of(EXAMPLES)
    for example, other, scores in zip(EXAMPLES, rows.others, found.scores, strict=True):
        ids = tokenizer(example.completion, add_special_tokens=False).input_ids
        mean = by_hand(model, tokenize_prompt(example, tokenizer), ids)
        assert scores[LOSS] == pytest.approx(-mean, abs=1e-5)
        assert scores[LIKELIHOOD] == pytest.approx(math.exp(mean), rel=1e-4)
        assert scores[OTHER_LOSS] == pytest.approx(-by_hand(model, tokenize_prompt(other, tokenizer), ids), abs=1e-5)
    # The values themselves, so that no later change of tokens or model goes unseen.
    assert [round(scores[LOSS], 2) for scores in found.scores] == VALUES


VALUES = [6.75, 6.59, 6.5, 11.73]


def test_what_the_template_writes_does_not_count(model, tokenizer):
    example = EXAMPLES[0]
    tokens = reference_tokens(example, tokenizer)
    assert tokenizer.decode(tokens.ids[tokens.first :]) == example.completion
    ids, supervised = encode(tokenizer, [example])[0]
    trained = [token for token, learnt in zip(ids, supervised, strict=True) if learnt]
    assert tokenizer.decode(trained) == example.completion + "<|end|>"
    assert trained == [*tokens.ids, *tokenizer("<|end|>", add_special_tokens=False).input_ids]
    # With the end of the turn, which any training learns, the loss would be another one.
    assert len(trained) == len(tokens.ids) + 1


@pytest.mark.parametrize("answer", ["e", "d", "n", "end", "im"])
def test_the_end_of_the_turn_is_not_searched_for_the_answer(tokenizer, answer):
    found = reference_tokens(example_of("Which letter?", answer), tokenizer)
    assert tokenizer.decode(found.ids[found.first :]).strip() == answer


@pytest.mark.parametrize("batch_size", [1, 2, 64])
def test_the_batch_does_not_change_it(model, tokenizer, batch_size):
    expected, found = read(model, tokenizer), read(model, tokenizer, batch_size=batch_size)
    for row, other in zip(expected.scores, found.scores, strict=True):
        assert row == pytest.approx(other, abs=2e-6)


def test_a_head_inside_of_the_decoder_gives_the_same(model, tokenizer, monkeypatch):
    expected = read(model, tokenizer)
    monkeypatch.setattr(likelihood_module, "separate_decoder", lambda model: None)
    for row, other in zip(expected.scores, read(model, tokenizer).scores, strict=True):
        assert row == pytest.approx(other, abs=2e-6)


def test_the_logits_of_few_tokens_exist_at_a_time(model, tokenizer, monkeypatch):
    expected = read(model, tokenizer)
    sizes = []
    gather = likelihood_module._gather
    monkeypatch.setattr(likelihood_module, "FEWEST_LOGITS", 3)

    def counted(logits, targets):
        sizes.append(len(logits))
        return gather(logits, targets)

    monkeypatch.setattr(likelihood_module, "_gather", counted)
    for row, other in zip(expected.scores, read(model, tokenizer, batch_size=2).scores, strict=True):
        assert row == pytest.approx(other, abs=2e-6)
    assert max(sizes) == 3


def test_the_last_answer_of_a_conversation_counts_behind_all_turns(model, tokenizer):
    before = ({"role": "user", "content": "Hello."}, {"role": "assistant", "content": "Good day."})
    talk = example_of("My kettle is broken.", "We are sorry.", *before)
    (scores, *_) = read(model, tokenizer, [talk, EXAMPLES[1]]).scores
    ids = tokenizer("We are sorry.", add_special_tokens=False).input_ids
    assert scores[LOSS] == pytest.approx(-by_hand(model, tokenize_prompt(talk, tokenizer), ids), abs=1e-5)
    untrained = example_of("My kettle is broken.", "We are sorry.", *before, weight=0)
    assert read(model, tokenizer, [untrained, EXAMPLES[1]]).scores[0] == pytest.approx(scores)


def test_only_the_answer_behind_a_thought_counts(tokenizer):
    tokens = reference_tokens(example_of("2 + 2?", "<think>\nadd them\n</think>\n\nfour"), tokenizer)
    assert tokenizer.decode(tokens.ids[tokens.first :]).strip() == "four"
    assert tokens.first > 0


def test_an_answer_longer_than_the_limit_is_read_in_part_and_counted(model, tokenizer):
    prompt = tokenize_prompt(EXAMPLES[2], tokenizer)
    ids = tokenizer(EXAMPLES[2].completion, add_special_tokens=False).input_ids
    found = read(model, tokenizer, max_length=len(prompt) + 5)
    assert found.scores[2][LOSS] == pytest.approx(-by_hand(model, prompt, ids[:5]), abs=1e-5)
    assert found.counts["answers_cut"] >= 1
    assert read(model, tokenizer, max_length=len(prompt)).scores[2] == {}


def test_rows_without_a_readable_answer_are_counted(model, tokenizer):
    blank = replace(EXAMPLES[0], completion=" \n")
    thought = example_of("2 + 2?", "<think>\nadd them")
    found = read(model, tokenizer, [EXAMPLES[0], blank, thought])
    assert found.scores[1:] == [{}, {}]
    assert found.counts == {"answers_cut": 0, "answers_unread": 2}


def test_the_other_row_has_another_prompt_and_another_answer():
    again = [EXAMPLES[0], EXAMPLES[0], EXAMPLES[1], replace(EXAMPLES[2], completion=EXAMPLES[0].completion)]
    rows = rows_of(again)
    assert all(other is EXAMPLES[1] for other in (rows.others[0], rows.others[1], rows.others[3]))
    assert rows_of(again).others == rows.others
    assert rows.subset([3, 2]).others == (rows.others[3], rows.others[2])
    assert rows_of([EXAMPLES[0], EXAMPLES[0]]).others == (None, None)


FREE = replace(LETTER_RECIPE, free_text=True, metrics=("exact_match", "valid", "vowels", LIKELIHOOD))


def test_base_adapter_and_merged_model(letters):  # noqa: F811
    """The adapter has learned the answers, and merged weights give what it gives."""
    summary = scored(letters, recipe=FREE)
    by_variant = {name: lines_of(letters, "eval", name) for name in ("base", "adapter", "merged")}
    for adapter, merged, base in zip(*(by_variant[name] for name in ("adapter", "merged", "base")), strict=True):
        assert adapter["scores"][LOSS] == pytest.approx(merged["scores"][LOSS], abs=1e-4)
        assert base["scores"][LOSS] > merged["scores"][LOSS] + 1
    gaps = [line["scores"][OTHER_LOSS] - line["scores"][LOSS] for line in by_variant["merged"]]
    assert min(gaps) > 0
    assert sum(gaps) / len(gaps) > 1, "an answer is far less likely behind another row's letter"
    found = summary["sets"]["eval"]
    assert found["variants"]["merged"][LIKELIHOOD]["mean"] > 10 * found["variants"]["base"][LIKELIHOOD]["mean"]
    # One word: exact match decides, and says so.
    assert summary["primary_metric"] == "exact_match"
    assert (found["fit"]["decides"], found["fit"]["median_words"]) == (False, 1)
    effect = next(effect for effect in found["fit"]["effects"] if effect["b"] == "merged")
    assert (effect["a"], effect["outcome"]) == ("base", "better")
    assert found["answers"]["merged"]["answers_unread"] == 0


def long_answers():
    """The letters' rows with answers of many words, none of which the model has learned."""
    examples = examples_of(LETTERS)
    text = " ".join(["[A]"] * 12)
    longer = []
    for example in examples.examples:
        answer = f"{text} {example.completion}"
        turns = (example.messages[0], {"role": "assistant", "content": answer})
        longer.append(replace(example, completion=answer, messages=turns))
    return replace(examples, examples=longer)


def test_each_set_is_decided_by_its_own_answers(letters):  # noqa: F811
    sets = {"eval": examples_of(LETTERS), "long": long_answers()}
    summary = scored(letters, sets, recipe=FREE)
    assert summary["primary_metric"] == "exact_match"
    found = {name: (one["primary_metric"], one["fit"]["decides"]) for name, one in summary["sets"].items()}
    assert found == {"eval": ("exact_match", False), "long": (LIKELIHOOD, True)}
    assert {name: one["fit"]["median_words"] for name, one in summary["sets"].items()} == {"eval": 1, "long": 13}
    for name, metric in (("eval", "exact_match"), ("long", LIKELIHOOD)):
        record = read_json(letters.run.eval / name / "merged.json")
        assert record["primary_metric"] == metric
        assert record[READ_WITH]["max_length"] == letters.config.data.max_length
    other = letters.config.model_copy(update={"data": letters.config.data.model_copy(update={"max_length": 7})})
    files = ResultStore(other, FREE, letters.run)
    fault = files.read("eval", "base", record["decoding"], select_eval_rows("eval", sets["eval"], None))
    assert "data.max_length" in fault
    data = letters.config.data.model_copy(update={"max_length": 2 * letters.config.data.max_length})
    longer = ResultStore(letters.config.model_copy(update={"data": data}), FREE, letters.run)
    rows = select_eval_rows("eval", sets["eval"], None)
    kept, _ = longer.read("eval", "base", record["decoding"], rows)  # every answer was read whole, and would be again
    path = letters.run.eval / "eval" / "base.json"
    write_json(path, kept | {CUT: 1})
    assert "data.max_length" in longer.read("eval", "base", record["decoding"], rows)


def test_a_recipe_that_lists_the_likelihood_has_it_beside_its_own_metric(letters):  # noqa: F811
    listed = replace(LETTER_RECIPE, metrics=("exact_match", "valid", "vowels", LIKELIHOOD))
    rows = long_answers()
    rows = replace(rows, examples=[replace(example, reference="none of them") for example in rows.examples])
    found = scored(letters, {"eval": rows}, recipe=listed)["sets"]["eval"]
    assert (found["primary_metric"], found["fit"]["decides"], found["fit"]["reason"]) == ("exact_match", False, "")
    effect = next(effect for effect in found["fit"]["effects"] if effect["b"] == "merged")
    assert effect["outcome"] != "unclear"
    assert effect["metric_text"].startswith("No clear change of exact match (0 of 8 before")
    assert {"base", "merged"} <= set(found["fit"]["losses"])


def test_nothing_is_read_or_written_twice(model, tokenizer, monkeypatch):
    """A grammar changes no likelihood, and the other row's prompt is one of the prompts."""
    rows = rows_of(EXAMPLES)
    local = LocalModel(model, tokenizer, RECIPE, lambda example: example)
    prompts = local.prompts(rows)
    way = SimpleNamespace(decoding=SimpleNamespace(batch_size=4))
    made = []
    monkeypatch.setattr(
        local, "prompts", lambda rows: made.append(len(rows)) or [tokenize_prompt(e, tokenizer) for e in rows.examples]
    )
    found = local.likelihoods(rows, prompts, way)
    assert local.likelihoods(rows, prompts, way) is found
    assert made == [0] or made == []
    assert [row[LOSS] for row in found.scores] == pytest.approx([row[LOSS] for row in read(model, tokenizer).scores])
    part = rows.subset([0, 1])
    assert local.likelihoods(part, prompts[:2], way).scores == [
        pytest.approx(row, abs=2e-6) for row in found.scores[:2]
    ]
    assert sum(made) == sum(other not in part.examples for other in part.others)


def test_long_answers_are_decided_by_likelihood_in_summary_gate_and_records(letters):  # noqa: F811
    gate = {"metric": None, "not_worse_than": "base", "margin": 0.5}
    summary = scored(letters, {"eval": long_answers()}, recipe=FREE, gate=gate)
    assert summary["primary_metric"] == LIKELIHOOD
    assert summary["sets"]["eval"]["fit"]["decides"]
    assert summary["gate"]["reason"].startswith(f"{LIKELIHOOD} of merged is")
    gate["metric"] = "exact_match"
    assert scored(letters, {"eval": long_answers()}, recipe=FREE, gate=gate)["gate"]["reason"].startswith("exact_match")
    gate["metric"] = "answer_likelihod"
    with pytest.raises(ConfigError) as caught:
        scored(letters, {"eval": long_answers()}, recipe=FREE, gate=gate)
    assert caught.value.field == "evaluate.gate.metric"
