"""Tokenised once: found again for the same content, never for other content, rebuilt when damaged."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tests.helpers.tokens import tokenize_example

from surefit.core.errors import DataError, MachineError
from surefit.data.rows.layouts import Examples
from surefit.data.tokens import dataset as token_dataset
from surefit.data.tokens.cache import MASKED, cache_key
from surefit.data.tokens.dataset import build_dataset
from surefit.task import Example

from .conftest import MARKED_TEMPLATE, as_examples, chat

EXAMPLES = as_examples(*(chat(f"question {i}", "yes " * (i + 1)) for i in range(10)), Example(text="plain"))


@pytest.fixture
def build(tokenizer, tmp_path, monkeypatch):
    """build(…) → (data set, whether it was tokenised now)."""
    calls = []
    real = token_dataset.encode_turns
    monkeypatch.setattr(token_dataset, "encode_turns", lambda *args: calls.append(1) or real(*args))

    def run(examples=EXAMPLES, tokenizer=tokenizer, max_length=64, cache=tmp_path, **more):
        calls.clear()
        dataset = build_dataset(examples, tokenizer, max_length=max_length, cache=cache, **more)
        return dataset, bool(calls)

    return run


def contents(dataset):
    return [(ids.tolist(), labels.tolist()) for ids, labels in dataset]


def test_the_data_set_holds_the_examples(build, tokenizer):
    dataset, _ = build()
    expected = [tokenize_example(example, tokenizer) for example in EXAMPLES]
    assert contents(dataset) == [(one.input_ids, one.labels) for one in expected]
    assert dataset.lengths.tolist() == [len(one.input_ids) for one in expected]
    ids, labels = dataset[-1]
    assert ids.dtype == labels.dtype == np.int64
    assert ids.tolist() == expected[-1].input_ids
    with pytest.raises(IndexError):
        dataset[len(dataset)]
    stats = dataset.stats
    assert (stats.rows, stats.kept, stats.dropped_too_long, stats.skipped) == (11, 11, 0, 0)
    assert stats.tokens == sum(len(one.input_ids) for one in expected)
    assert stats.supervised_tokens == sum(label != MASKED for one in expected for label in one.labels)
    assert stats.longest == max(len(one.input_ids) for one in expected)


def test_the_second_time_it_is_found(build):
    first, built = build()
    again, built_again = build()
    assert (built, built_again) == (True, False)
    assert contents(first) == contents(again)
    assert first.stats == again.stats


def test_two_builds_write_the_same_bytes(build, tmp_path):
    first, _ = build(cache=tmp_path / "a")
    second, _ = build(cache=tmp_path / "b")
    for name in ("input_ids.npy", "supervised.npy", "offsets.npy", "meta.json"):
        assert (first.path / name).read_bytes() == (second.path / name).read_bytes()


def test_whatever_the_tokens_depend_on_is_in_the_key(make_tokenizer, tokenizer):
    settings = {"max_length": 64}
    reordered = (
        chat("question 0", "yes ", tools=({"a": 1, "b": 2},)),
        chat("question 0", "yes ", tools=({"b": 2, "a": 1},)),
    )
    ends = make_tokenizer()
    ends.eos_token = "<|end|>"
    more = make_tokenizer()
    more.add_tokens(["question"])
    keys = [
        cache_key(EXAMPLES, tokenizer, settings),
        cache_key(EXAMPLES.subset(range(9)), tokenizer, settings),
        cache_key(as_examples(*reversed(EXAMPLES.examples)), tokenizer, settings),
        cache_key(as_examples(reordered[0]), tokenizer, settings),
        cache_key(as_examples(reordered[1]), tokenizer, settings),
        cache_key(EXAMPLES, tokenizer, {"max_length": 65}),
        cache_key(EXAMPLES, make_tokenizer(MARKED_TEMPLATE + " "), settings),
        cache_key(EXAMPLES, ends, settings),
        cache_key(EXAMPLES, more, settings),
    ]
    assert len(set(keys)) == len(keys)
    assert cache_key(EXAMPLES, make_tokenizer(), settings) == keys[0]


def test_padding_used_for_generation_does_not_change_the_key(make_tokenizer):
    tokenizer = make_tokenizer()
    before = cache_key(EXAMPLES, tokenizer, {})
    tokenizer(["a", "bbbb"], padding=True, truncation=True, max_length=3)
    assert cache_key(EXAMPLES, tokenizer, {}) == before


def test_a_template_with_todays_date_is_tokenised_anew_each_day(make_tokenizer, monkeypatch):
    class Tomorrow:
        @staticmethod
        def today():
            return "2999-01-01"

    dated = make_tokenizer("{{ strftime_now('%Y') }}" + MARKED_TEMPLATE)
    plain = make_tokenizer()
    before = cache_key(EXAMPLES, dated, {}), cache_key(EXAMPLES, plain, {})
    monkeypatch.setattr("surefit.data.tokens.cache.date", Tomorrow)
    after = cache_key(EXAMPLES, dated, {}), cache_key(EXAMPLES, plain, {})
    assert before[0] != after[0]
    assert before[1] == after[1]


@pytest.mark.parametrize("name", ["input_ids.npy", "supervised.npy", "offsets.npy", "meta.json"])
@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_a_damaged_cache_is_rebuilt(build, name, damage):
    dataset, _ = build()
    expected, path = contents(dataset), dataset.path / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-1] if name != "meta.json" else b'{"sizes": {}')
    elif damage == "gone":
        path.unlink()
    elif name != "meta.json":
        np.save(path, np.load(path)[:-1])
    else:
        path.write_text(path.read_text().replace('"input_ids.npy": ', '"input_ids.npy": 1'))
    dataset, built = build()
    assert built
    assert contents(dataset) == expected
    assert not build()[1]


@pytest.mark.parametrize("meta", ["[]", '{"sizes": {}}', '{"sizes": {}, "stats": {"x": 1}}', "null"])
def test_a_strange_meta_file_is_rebuilt(build, meta):
    dataset, _ = build()
    (dataset.path / "meta.json").write_text(meta)
    assert build()[1]


def test_nothing_half_written_is_left_behind(build, tmp_path, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(MachineError) as caught:
        build()
    assert "No space left" in caught.value.message
    assert "SUREFIT_CACHE" in caught.value.help
    assert list((tmp_path / "tokens").iterdir()) == []


def test_a_cache_that_cannot_be_written(build, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(MachineError, match="cannot write"):
        build(cache=tmp_path / "file")


def test_the_users_cache_is_used_by_default(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "mine"))
    dataset = build_dataset(EXAMPLES, tokenizer, max_length=64)
    assert dataset.path.parent == tmp_path / "mine" / "tokens"


def test_long_examples_are_dropped_and_counted(build):
    dataset, _ = build(max_length=18)
    stats = dataset.stats
    assert stats.dropped_too_long == sum(length > 18 for length in build()[0].lengths) > 0
    assert stats.kept == len(dataset) == stats.rows - stats.dropped_too_long
    assert stats.longest <= 18


def test_long_examples_can_be_an_error(build):
    with pytest.raises(DataError) as caught:
        build(max_length=18, too_long="error")
    longest = max(build()[0].lengths)
    assert "of 11 rows cannot be used" in caught.value.message
    assert caught.value.also[0].path.startswith("rows.jsonl:")
    assert "over max_length 18" in caught.value.also[0].message
    assert f"data.max_length to {longest}" in caught.value.help


def test_an_example_with_nothing_to_learn_is_not_trained_on(build):
    silent = Example(({"role": "user", "content": "a"},))
    dataset, _ = build(as_examples(chat("a", "b"), silent))
    assert len(dataset) == 1
    assert dataset.stats.dropped_unsupervised == 1


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        (EXAMPLES, "of 11, 11 are longer than max_length 8"),
        (as_examples(Example(({"role": "user", "content": "a"},))), "1 have no token to train on"),
    ],
)
def test_a_data_set_that_ends_empty_is_an_error(build, tmp_path, examples, message):
    with pytest.raises(DataError, match="no example is left") as caught:
        build(examples, max_length=2 if "longer" in message else 64)
    assert message.replace("max_length 8", "max_length 2") in caught.value.message
    assert not (tmp_path / "tokens").exists()


def test_a_conversation_that_the_template_refuses_is_named(build, make_tokenizer):
    template = "{% if messages[0].content == 'bad' %}{{ raise_exception('no') }}{% endif %}" + MARKED_TEMPLATE
    with pytest.raises(DataError) as caught:
        build(as_examples(chat("a", "b"), chat("bad", "b")), make_tokenizer(template))
    error = caught.value
    assert (error.code, error.path, error.line) == ("E4136", "rows.jsonl", 2)


def test_progress_and_skipped_rows(build):
    seen = []
    examples = Examples(EXAMPLES.examples, EXAMPLES.where, ["a.jsonl:3: prompt: empty"])
    dataset, _ = build(examples, on_progress=lambda *args: seen.append(args))
    assert seen == [(0, 11, ""), (11, 11, f"{dataset.stats.tokens} tokens")]
    assert (dataset.stats.skipped, dataset.stats.rows, dataset.stats.kept) == (1, 12, 11)
    again, built = build(on_progress=lambda *args: seen.append(args))
    assert seen[2:] == [(11, 11, "from the cache")]
    assert not built
    assert (again.stats.skipped, again.stats.rows) == (0, 11)


def test_meta_is_readable(build):
    dataset, _ = build()
    meta = json.loads((dataset.path / "meta.json").read_text())
    assert meta["stats"]["kept"] == 11
    assert set(meta["sizes"]) == {"input_ids.npy", "supervised.npy", "offsets.npy"}
