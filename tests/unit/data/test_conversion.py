"""Rows are converted once: samples and the whole source share the examples."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest

from surefit import recipes, samples
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.rows import layouts
from surefit.data.rows.conversion import RecordingRow
from surefit.data.rows.layouts import row_conversion, row_converter, to_examples
from surefit.data.rows.unread_fields import find_read_columns
from surefit.task import Example

SFT = recipes.get_recipe("chat")


@pytest.fixture
def counted(tmp_path):
    """Return (thirty rows, a recipe that counts its conversions, the counts); two rows cannot be used."""
    path = tmp_path / "rows.jsonl"
    rows = [{"instruction": f"Say {n}", "output": "" if n in (0, 29) else str(n), "note": "x"} for n in range(30)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    counts: Counter[str] = Counter()

    def to_example(row):
        counts[row["messages"][0]["content"]] += 1
        return SFT.to_example(row)

    return load_rows(str(path)), replace(SFT, to_example=to_example), counts


def test_samples_and_the_source_share_the_examples(counted):
    rows, recipe, counts = counted
    sampled = to_examples(rows.sample(5), recipe, bad_rows="skip")
    columns = find_read_columns(rows.chosen([3, 4]), recipe, "auto")
    examples = to_examples(rows, recipe, bad_rows="skip")
    assert columns == {"instruction", "output", "input", "history", "label", "kto_tag"} | columns - {"note"}
    assert set(counts.values()) == {1}
    assert all(any(example is other for other in examples) for example in sampled)
    assert to_examples(rows, replace(recipe), bad_rows="skip")[0] is not examples[0]  # another recipe
    assert examples.examples == to_examples(load_rows(rows.source), SFT, bad_rows="skip").examples


def test_a_bad_row_is_an_error_each_time(counted):
    rows, recipe, _ = counted
    errors = []
    for part in (rows.sample(1), rows.sample(1), rows.chosen([0])):
        with pytest.raises(DataError) as error:
            to_examples(part, recipe)
        errors.append(error.value)
    assert {(error.code, error.field, error.line) for error in errors} == {("E4012", "output", 1)}
    assert len({id(error) for error in errors}) == 3


def test_many_rows_are_not_kept(counted, monkeypatch):
    rows, recipe, counts = counted
    monkeypatch.setattr(layouts, "REMEMBERED_ROWS", 10)
    sampled = to_examples(rows.sample(10), recipe, bad_rows="skip")
    for _ in range(2):
        to_examples(rows, recipe, bad_rows="skip")
    assert Counter(counts.values()) == {1: len(sampled), 2: 28 - len(sampled)}


def test_a_sample_without_a_column_has_the_same_layout_or_its_own_examples(tmp_path):
    path = tmp_path / "rows.jsonl"
    plain = {"instruction": "Say", "output": "so"}
    chat = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path.write_text("".join(json.dumps(row) + "\n" for row in (plain, plain | chat)), encoding="utf-8")
    rows = load_rows(str(path))
    assert to_examples(rows.chosen([0]), SFT)[0].messages[0]["content"] == "Say"  # as alpaca
    with pytest.raises(DataError) as error:  # as messages, which the first row lacks
        to_examples(rows, SFT)
    assert (error.value.code, error.value.line) == ("E4019", 1)


@pytest.mark.parametrize(
    ("use", "columns"),
    [
        (lambda row: row["a"], {"a"}),
        (lambda row: row.get("b"), {"b"}),
        (lambda row: row.get("missing"), {"missing"}),
        (lambda row: row.pop("a"), {"a"}),
        (lambda row: {**row}, {"a", "b"}),
        (lambda row: dict(row), {"a", "b"}),
        (lambda row: row.copy(), {"a", "b"}),
        (lambda row: row | {"c": 3}, {"a", "b"}),
        (lambda row: {"c": 3} | row, {"a", "b"}),
        (lambda row: [*row], set()),
        (lambda row: "a" in row and row.items(), set()),
    ],
)
def test_a_row_records_the_columns_that_are_read(use, columns):
    row = RecordingRow({"a": 1, "b": 2})
    plain = {"a": 1, "b": 2}
    assert use(row) == use(plain)
    assert row.columns_read == columns


@pytest.mark.parametrize("name", samples.list_samples())
def test_a_recorded_row_becomes_the_same_example(name):
    rows = load_rows(name)
    for recipe_name in recipes.list_recipes():
        recipe = recipes.get_recipe(recipe_name)
        try:
            convert = row_converter(rows.columns, rows.source, recipe, "auto")
            conversion = row_conversion(rows, recipe, "auto")
        except DataError:
            continue
        for placed in list(rows.placed())[:50]:
            result = conversion.converted(placed).result
            assert isinstance(result, DataError) or (isinstance(result, Example) and result == convert(placed.row))
