"""The held-out side of a row is its own affair: not of its position, of other rows, or of the machine."""

from __future__ import annotations

import random

import pytest

from surefit.core.errors import DataError
from surefit.data.rows.layouts import Examples, split_eval
from surefit.task import Example

from .conftest import as_examples, chat


def rows(count, start=0):
    return [chat(f"question {i}", f"answer {i}") for i in range(start, start + count)]


def held(examples, share=0.2, seed=0):
    return {example.messages[0]["content"] for example in split_eval(as_examples(*examples), share, seed)[1]}


def test_every_row_is_on_one_side_and_keeps_its_place():
    examples = as_examples(*rows(500))
    train, held_out = split_eval(examples, 0.2, 0)
    assert sorted(train.where + held_out.where) == sorted(examples.where)
    assert 70 <= len(held_out) <= 130, "near a fifth"
    for side in (train, held_out):
        assert all(examples[int(where.split(":")[1]) - 1] == one for one, where in zip(side, side.where, strict=True))


def test_new_rows_and_a_new_order_move_no_old_row():
    old = rows(200)
    more = rows(300, start=200) + old
    random.Random(0).shuffle(more)
    assert held(old) == held(more) & {e.messages[0]["content"] for e in old}


def test_a_larger_share_keeps_what_was_held_out():
    assert held(rows(300), 0.1) < held(rows(300), 0.3)


def test_the_seed_decides():
    assert held(rows(300), seed=0) != held(rows(300), seed=1)


def test_the_split_is_the_same_on_every_machine():
    """Pinned: a split that moved would let rows that were trained on be scored on."""
    assert sorted(held(rows(30))) == PINNED


PINNED = ["question 13", "question 14", "question 22", "question 24", "question 29", "question 3"]


def test_equal_prompts_stay_on_one_side():
    examples = [chat(f"question {i % 40}", f"answer {i}") for i in range(400)]
    train, held_out = split_eval(as_examples(*examples), 0.3, 0)
    assert not {e.messages[0]["content"] for e in train} & {e.messages[0]["content"] for e in held_out}
    assert len(held_out) % 10 == 0


def test_texts_are_split_by_their_text():
    train, held_out = split_eval(as_examples(*(Example(text=f"text {i}") for i in range(200))), 0.2, 0)
    assert len(train) + len(held_out) == 200
    assert 20 <= len(held_out) <= 60


def test_too_few_rows_name_a_share_that_works():
    examples = as_examples(*rows(12))
    with pytest.raises(DataError, match="of 12 examples holds out none") as caught:
        split_eval(examples, 0.001, 0)
    share = float(caught.value.help.split()[3])
    assert len(split_eval(examples, share, 0)[1]) >= 1
    with pytest.raises(DataError) as caught:
        split_eval(as_examples(*[chat("same", "x")] * 10), 0.999, 0)
    assert caught.value.code == "E4351"


def test_the_note_of_skipped_rows_stays_with_the_training_rows():
    examples = as_examples(*rows(50))
    train, held_out = split_eval(Examples(examples.examples, examples.where, ["a.jsonl:7: empty"]), 0.2, 0)
    assert train.skipped == ["a.jsonl:7: empty"]
    assert held_out.skipped == []
