"""Pairs as token rows: two by two, both or none, the same prompt before both answers, the end of each supervised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefit.config.schema import ModelSection
from surefit.core.errors import DataError
from surefit.data.rows.layouts import Examples
from surefit.data.tokens.cache import cache_key
from surefit.data.tokens.dataset import build_dataset
from surefit.data.tokens.tokenize import encode, encode_pairs
from surefit.data.tokens.turns import answers_of
from surefit.model.tokenizer import load_tokenizer
from surefit.task import Example


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(ModelSection(name_or_path="surefit/nano"))


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def pair(number: int, chosen: str = "On the shelf", rejected: str = "It is on the shelf") -> Example:
    turns = (said("user", f"Where is lamp {number}?"), said("assistant", "Which?"), said("user", "The red one"))
    return Example((*turns, said("assistant", chosen)), rejected=(*turns, said("assistant", rejected)))


def examples(*pairs: Example) -> Examples:
    return Examples(list(pairs), [f"rows.jsonl:{n}" for n, _ in enumerate(pairs, start=1)], [])


def test_only_the_last_turn_of_both_is_supervised(tokenizer: Any) -> None:
    [[chosen, rejected]] = encode_pairs(tokenizer, [pair(1)])
    for (ids, supervised), text in ((chosen, "On the shelf"), (rejected, "It is on the shelf")):
        learnt = [token for token, counts in zip(ids, supervised, strict=True) if counts]
        assert tokenizer.decode(learnt).startswith(text)
        assert tokenizer.decode(learnt).endswith(tokenizer.eos_token)
        assert learnt.count(tokenizer.eos_token_id) == 1  # TRL #4908: conversational rows got a second one
        assert "Which" not in tokenizer.decode(learnt)
    start = chosen[1].index(True)
    assert chosen[0][:start] == rejected[0][:start]


def test_a_pair_is_left_out_as_a_whole_and_counted(tokenizer: Any, tmp_path: Path) -> None:
    long = "On the shelf, and " * 40
    rows = examples(pair(1), pair(2, rejected=long), pair(3, chosen=long), pair(4))
    data = build_dataset(rows, tokenizer, max_length=120, cache=tmp_path, paired=True)
    assert len(data) == 4
    assert (data.stats.rows, data.stats.kept, data.stats.dropped_too_long, data.stats.split) == (4, 2, 2, 0)
    whole = encode(tokenizer, [answer for example in (pair(1), pair(4)) for answer in answers_of(example)])
    assert [data[n][0].tolist() for n in range(4)] == [ids for ids, _ in whole]
    with pytest.raises(DataError) as error:
        build_dataset(rows, tokenizer, max_length=120, too_long="error", cache=tmp_path, paired=True)
    assert "rows.jsonl:2" in str(error.value)


def test_another_rejected_answer_is_another_data_set(tokenizer: Any) -> None:
    keys = {
        cache_key(examples(each), tokenizer, {})
        for each in (pair(1), pair(1, rejected="No"), replace(pair(1), rejected=None))
    }
    assert len(keys) == 3


@pytest.mark.parametrize(
    "wrong",
    [replace(pair(1), rejected=pair(2).rejected), replace(pair(1), rejected=pair(1).prompt)],
    ids=["another prompt", "no answer"],
)
def test_answers_to_different_prompts_are_refused_with_their_row(
    tokenizer: Any, tmp_path: Path, wrong: Example
) -> None:
    """TRL #4639: the two sides of a pair had different prompts."""
    with pytest.raises(DataError) as error:
        encode_pairs(tokenizer, [wrong])
    assert error.value.field == "rejected"
    rows = examples(pair(2), wrong)
    data = build_dataset(rows, tokenizer, max_length=120, bad_rows="skip", cache=tmp_path, paired=True)
    assert (len(data), list(data.refused)) == (2, [1])
