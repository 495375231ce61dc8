"""Documents that are too long: cut to fit, with template and answer whole, in training and when answering."""

import pytest

from surefit.config.schema import ModelSection, SureFitConfig
from surefit.core.errors import DataError
from surefit.data.rows.layouts import Examples
from surefit.data.rows.sample_checks import find_missing_documents
from surefit.data.rows.shorten import MARK, UNUSED, build_prompt_cutter, cut_document, prompt_limit, shorten_document
from surefit.data.tokens.dataset import build_dataset
from surefit.data.tokens.tokenize import count_token_lengths, encode
from surefit.model.tokenizer import load_tokenizer
from surefit.recipes import get_recipe
from surefit.task import Example

RECIPE = get_recipe("long_summarization")
SENTENCES = [f"Section {n} names the tower of Oslo after Kira." for n in range(200)]
LONG = {"document": " ".join(SENTENCES), "summary": "Names the tower.\nBans salt."}
SHORT = {"document": SENTENCES[0], "summary": "Names the tower."}
LIMIT = 300


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ModelSection(name_or_path="surefit/nano"))


def examples_of(*rows):
    return Examples([RECIPE.to_example(row) for row in rows], [f"rows.jsonl:{n}" for n in range(1, len(rows) + 1)], [])


def config(**changes):
    data = {"train": "rows.jsonl", "max_length": LIMIT, "too_long": "truncate"} | changes
    return SureFitConfig(
        model={"name_or_path": "surefit/nano"}, data=data, evaluate={"max_new_tokens": 40}, output_dir="r"
    )


@pytest.mark.parametrize("too_long", ["truncate", "truncate_middle"])
def test_only_the_document_is_cut_and_the_limit_is_used(tokenizer, too_long):
    example = RECIPE.to_example(LONG)
    short = shorten_document(example, tokenizer, LIMIT, too_long)
    ((total, learnt),) = count_token_lengths(tokenizer, [short])[0]
    assert LIMIT * (1 - UNUSED) - 15 <= total <= LIMIT  # a cut goes back to a space
    assert learnt == count_token_lengths(tokenizer, [example])[0][0][1]
    assert (short.messages[0], short.messages[2]) == (example.messages[0], example.messages[2])
    assert (short.completion, short.reference) == (example.completion, example.reference)
    assert short.messages[1]["content"] == short.document
    assert short.document.startswith(SENTENCES[0])
    assert (MARK in short.document) == (too_long == "truncate_middle")
    assert short.document.endswith(SENTENCES[-1]) == (too_long == "truncate_middle")


def test_what_fits_stays_as_it_is(tokenizer):
    example = RECIPE.to_example(SHORT)
    assert shorten_document(example, tokenizer, LIMIT, "truncate") is example


@pytest.mark.parametrize("limit", [60, 61, 100, 555, 1500])
def test_every_limit_is_kept(tokenizer, limit):
    for too_long in ("truncate", "truncate_middle"):
        short = shorten_document(RECIPE.to_example(LONG), tokenizer, limit, too_long)
        assert count_token_lengths(tokenizer, [short])[0][0][0] <= limit
        assert short.document


def test_a_document_of_one_word_is_cut_inside_of_it(tokenizer):
    short = shorten_document(RECIPE.to_example({"document": "x" * 5000, "summary": "x"}), tokenizer, 100, "truncate")
    assert set(short.document) == {"x"}


def test_the_parts_that_are_kept():
    assert (
        cut_document("one two three", 13, "truncate")
        == cut_document("one two three", 99, "truncate_middle")
        == "one two three"
    )
    assert cut_document("one two three", 7, "truncate") == cut_document("one two three", 9, "truncate") == "one two"
    assert cut_document("one two three", 0, "truncate") == cut_document("one two three", 0, "truncate_middle") == ""


def test_the_rest_alone_is_too_long(tokenizer):
    with pytest.raises(DataError, match=r"even without the document, over the limit of 20") as found:
        shorten_document(RECIPE.to_example(LONG), tokenizer, 20, "truncate")
    assert found.value.field == "data.max_length"


def test_a_data_set_counts_what_was_cut(tokenizer, tmp_path):
    examples = examples_of(SHORT, LONG, SHORT | {"summary": "Other."})
    built = build_dataset(examples, tokenizer, max_length=LIMIT, too_long="truncate", cache=tmp_path)
    assert (built.stats.kept, built.stats.cut, built.stats.dropped_too_long) == (3, 1, 0)
    assert built.stats.longest <= LIMIT
    ids, labels = built[1]
    gold, _ = encode(tokenizer, [examples[1]])[0]
    learnt = labels[labels != -100]
    assert tokenizer.decode(learnt).startswith(LONG["summary"])
    assert list(learnt) == gold[-len(learnt) :]
    assert len(ids) <= LIMIT
    again = build_dataset(examples, tokenizer, max_length=LIMIT, too_long="truncate", cache=tmp_path)
    assert (again.path, again.stats) == (built.path, built.stats)
    dropped = build_dataset(examples, tokenizer, max_length=LIMIT, too_long="drop", cache=tmp_path)
    assert (dropped.stats.kept, dropped.stats.cut, dropped.stats.dropped_too_long) == (2, 0, 1)


def test_a_recipe_without_documents_cannot_be_cut(tokenizer, tmp_path):
    turns = ({"role": "user", "content": LONG["document"]}, {"role": "assistant", "content": "Yes."})
    examples = Examples([Example(turns, completion="Yes.")], ["rows.jsonl:7"], [])
    with pytest.raises(DataError, match="which part of the prompt may be cut") as found:
        build_dataset(examples, tokenizer, max_length=LIMIT, too_long="truncate", cache=tmp_path)
    assert (found.value.field, found.value.path) == ("data.too_long", "rows.jsonl:7")
    assert list(find_missing_documents(config().data, examples))
    assert not list(find_missing_documents(config(too_long="drop").data, examples))
    assert not list(find_missing_documents(config().data, examples_of(SHORT)))


def test_prompts_leave_room_for_the_answer(tokenizer):
    cut = build_prompt_cutter(config(), tokenizer)
    asked = cut(RECIPE.to_example(LONG))
    assert prompt_limit(config()) == 260
    assert 240 <= count_token_lengths(tokenizer, [asked])[0][0][0] <= 260
    assert [turn["role"] for turn in asked.messages] == ["system", "user"]
    assert asked.completion is None


def test_prompts_stay_whole_where_nothing_is_to_be_cut(tokenizer):
    example = RECIPE.to_example(LONG)
    assert prompt_limit(config(too_long="drop")) is None
    assert build_prompt_cutter(config(too_long="drop"), tokenizer)(example).messages == example.prompt
    plain = Example(({"role": "user", "content": LONG["document"]},))
    assert build_prompt_cutter(config(), tokenizer)(plain).messages == plain.messages
