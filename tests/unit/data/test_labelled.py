"""Labelled answers: which rows are, what their labels mean, and their tokens; pairs as two of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from surefit import recipes
from surefit.config.schema import ModelSection, SureFitConfig
from surefit.core.errors import DataError
from surefit.data.audit.labelled import CONTRADICTION, LONGER, UNDESIRABLE, observe_labels
from surefit.data.read.load import load_rows
from surefit.data.rows.columns import recipe_for
from surefit.data.rows.labelled import preference_from_label
from surefit.data.rows.layouts import Examples, to_examples, without_undesirable
from surefit.data.tokens.cache import TokenDataset, cache_key
from surefit.data.tokens.dataset import build_dataset, require_both_labels
from surefit.model.tokenizer import load_tokenizer
from surefit.stages import starting

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelSection(name_or_path="surefit/nano"))


def read(folder: Path, *rows: dict[str, Any], objective: str = "kto", **data: Any) -> Examples:
    """The examples of some rows, as training with the objective reads them."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    config = SureFitConfig.model_validate(
        {
            "model": {"name_or_path": "surefit/nano"},
            "data": {"train": str(path), **data},
            "objective": objective,
            "output_dir": "runs/x",
        }
    )
    recipe = recipe_for(recipes.get_recipe("chat"), config)
    return to_examples(load_rows(str(path)), recipe, config.data.format)


LAYOUTS = [
    {"prompt": "Hi", "completion": "Hello", "label": True},
    {"prompt": [MESSAGES[0]], "completion": [MESSAGES[1]], "label": True},
    {"messages": MESSAGES, "label": "true"},
    {"messages": MESSAGES, "kto_tag": 1},
    {"instruction": "Hi", "output": "Hello", "kto_tag": True},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}], "label": True},
    {"prompt": "Hi", "completion": "Hello", "thumbs": "up"},
    {"prompt": "Hi", "completion": "Hello", "feedback": "thumbs_up"},
]


@pytest.mark.parametrize("row", LAYOUTS, ids=lambda row: " ".join(row))
def test_a_row_of_every_layout_is_read(row: dict[str, Any], tmp_path: Path) -> None:
    (example,) = read(tmp_path, row)
    assert example.desirable is True
    assert [turn["content"] for turn in example.messages] == ["Hi", "Hello"]


def test_only_the_last_answer_is_judged(tmp_path: Path) -> None:
    later = [*MESSAGES, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "Well"}]
    (example,) = read(tmp_path, {"messages": later, "label": False})
    assert example.desirable is False
    assert [turn.get("weight") for turn in example.messages] == [None, 0, None, None]
    with pytest.raises(DataError) as error:
        read(tmp_path, {"messages": [*later[:-1], later[-1] | {"weight": 0}], "label": True})
    assert error.value.field == "messages"


@pytest.mark.parametrize(
    ("rows", "line", "field"),
    [
        ([LAYOUTS[0], {"prompt": "Hi", "completion": "No", "label": None}], 2, "label"),
        ([LAYOUTS[0], {"prompt": "Hi", "completion": "No"}], 2, "label"),
        ([LAYOUTS[0], {"prompt": "Hi", "completion": "No", "label": 1}], 2, "label"),
        ([LAYOUTS[0], {"prompt": "Hi", "completion": "No", "label": "maybe"}], 2, "label"),
        ([LAYOUTS[3], {"messages": MESSAGES, "kto_tag": 3}], 2, "kto_tag"),
        ([{"prompt": "Hi", "completion": "Hello"}], None, "objective"),
        ([{"text": "Hi", "label": True}], None, "objective"),
    ],
    ids=["null", "absent", "number", "word", "tag", "no label", "no prompt"],
)
def test_labels_that_say_nothing_are_errors(rows: Any, line: int | None, field: str, tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        read(tmp_path, *rows)
    assert (error.value.line, error.value.field) == (line, field)
    assert Path(error.value.path or "").name == "rows.jsonl"
    assert error.value.help


def test_the_other_objectives_say_kto(tmp_path: Path) -> None:
    bad = {"prompt": "Hi", "completion": "No", "label": False}
    for objective in ("sft", "dpo"):
        with pytest.raises(DataError) as error:
            read(tmp_path, bad, objective=objective)
        assert "objective: kto" in (error.value.help or "")
    with pytest.raises(DataError) as error:
        read(tmp_path, bad, format="text")
    assert error.value.field == "data.format"


def test_a_label_with_another_name_is_read(tmp_path: Path) -> None:
    row = {"question": "Hi", "reply": "Hello", "is_good": False}
    names = {"prompt": "question", "completion": "reply", "label": "is_good"}
    (example,) = read(tmp_path, row, columns=names)
    assert example.desirable is False
    with pytest.raises(DataError) as error:
        read(tmp_path, row | {"is_good": 2}, columns=names)
    assert error.value.field == "is_good"


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [
        ("label", True, True), ("label", "FALSE", False), ("label", 1, None), ("label", "spam", None),
        ("kto_tag", 0, False), ("kto_tag", "bad", False), ("thumbs", "down", False), ("thumbs_up", 1, True),
        ("vote", -1, False), ("feedback", "It was slow", None),
    ],
)  # fmt: skip
def test_values_of_labels(name: str, value: Any, verdict: bool | None) -> None:
    assert preference_from_label(name, value) is verdict


def test_tokens_have_their_labels_and_a_pair_is_two(tokenizer: Any, tmp_path: Path) -> None:
    pair = {"prompt": "Where?", "chosen": "Here", "rejected": "I am glad to say that it is here"}
    pairs = build_dataset(read(tmp_path, pair), tokenizer, max_length=120, cache=tmp_path, labelled=True)
    assert pairs.desirable is not None
    assert pairs.desirable.tolist() == [True, False]
    assert (pairs.stats.rows, pairs.stats.kept, pairs.stats.split) == (1, 2, 1)
    long = {"prompt": "Hi", "completion": "Hello " * 200, "label": True}
    rows = read(tmp_path, LAYOUTS[0], long, LAYOUTS[0] | {"completion": "No", "label": False})
    data = build_dataset(rows, tokenizer, max_length=120, cache=tmp_path, labelled=True)
    assert data.desirable is not None
    assert data.desirable.tolist() == [True, False]
    assert data.stats.dropped_too_long == 1
    assert TokenDataset(data.path, data.stats).desirable.tolist() == [True, False]  # type: ignore[union-attr]
    flipped = read(tmp_path, LAYOUTS[0] | {"label": False}, long, LAYOUTS[0] | {"completion": "No", "label": False})
    assert cache_key(rows, tokenizer, {}) != cache_key(flipped, tokenizer, {})
    with pytest.raises(DataError) as error:
        require_both_labels(
            build_dataset(flipped, tokenizer, max_length=120, cache=tmp_path, labelled=True), "rows.jsonl"
        )
    assert (error.value.path, error.value.field) == ("rows.jsonl", "label")
    require_both_labels(data, "rows.jsonl")


def test_bad_answers_are_nothing_to_compare_with(tmp_path: Path) -> None:
    bad = LAYOUTS[0] | {"completion": "No", "label": False}
    kept = without_undesirable(read(tmp_path, LAYOUTS[0], bad, LAYOUTS[0]))
    assert [example.desirable for example in kept] == [True, True]
    assert kept.where[1].endswith(":3")
    with pytest.raises(DataError):
        without_undesirable(read(tmp_path, bad))


def test_the_audit_counts_labels_and_finds_contradictions(tmp_path: Path) -> None:
    rows = [LAYOUTS[0], LAYOUTS[0] | {"label": False}, {"prompt": "Bye", "completion": "See you", "label": False}]
    found = observe_labels(read(tmp_path, *rows))
    assert (found[UNDESIRABLE].rows, found[UNDESIRABLE].of) == (2, 3)
    assert found[CONTRADICTION].rows == 1
    assert ":2: the same answer as" in found[CONTRADICTION].examples[0]
    assert (found[LONGER].rows, found[LONGER].of) == (0, 2)  # Hello against Hello and See you; the even .5 rounds to 0
    assert observe_labels(read(tmp_path, {"messages": MESSAGES}, objective="sft")) == {}


def rows_file(folder: Path, label: str, values: list[Any]) -> str:
    path = folder / "data.jsonl"
    rows = [{"prompt": f"Ask {n}", "completion": f"Say {n}", label: value} for n, value in enumerate(values)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("label", "values", "objective"),
    [
        ("label", [True, False], "kto"),
        ("thumbs", ["up", "down"], "kto"),
        ("label", [True, True], "sft"),  # good answers alone
        ("label", ["spam", "ham"], "sft"),  # a class
        ("label", [0, 1], "sft"),
    ],
)
def test_init_recognizes_them(label: str, values: list[Any], objective: str, tmp_path: Path) -> None:
    rows = starting._read(rows_file(tmp_path, label, values * 20))
    assert starting._recognize(rows, None).objective == objective
