"""An answer with its reasoning, as models of every family write it: what is scored stands behind the thought."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from tests.unit.data.test_turns import PUBLISHED, ask, say, tokenizer_with

from surefit.core.errors import DataError
from surefit.data.tokens.tokenize import encode_turns, tokenize_label_prompt, tokenize_prompt
from surefit.facts.thinking import split_reasoning, strip_reasoning
from surefit.task import Example

sys.path.append(str(Path(__file__).parents[3] / "benchmarks"))
from chat_templates import said

HARMONY = "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4"


@pytest.mark.parametrize(
    "written",
    [
        HARMONY,
        HARMONY.replace("final<", "final <|constrain|>json<"),
        "<|channel|>final<|message|>4",
        "<|channel>thought\n2 and 2<channel|>4",
        "<|START_THINKING|>2 and 2<|END_THINKING|><|START_RESPONSE|>4<|END_RESPONSE|>",
        "[THINK]2 and 2[/THINK]4",
        "<seed:think>2 and 2</seed:think>4",
        "<think>\n2 and 2\n</think>\n\n4",
        "2 and 2\n</think>\n\n4",
    ],
)
def test_every_form_of_a_thought(written):
    for plain in ((), ("<think>", "</think>", "<seed:think>", "</seed:think>")):
        text = said(written, plain)
        assert strip_reasoning(text) == "4"
        assert ("2 and 2" in text) == ("2 and 2" in written)
    assert strip_reasoning(written) == "4"  # as a server or another tool writes it, its special tokens kept
    assert split_reasoning(text) is None or "<|" not in text


def test_a_thought_that_never_ends_is_no_answer():
    for written in ("<|channel|>analysis<|message|>2 and", "<|channel>thought\n2 and", "<think>2 and", "[THINK]2 and"):
        assert strip_reasoning(said(written)) == strip_reasoning(written) == ""


def test_channels_without_their_special_tokens():
    assert strip_reasoning("analysis2 and 2assistantfinal4") == "4"
    assert strip_reasoning("analysis of the assistant") == "analysis of the assistant"


def test_what_has_no_thought_is_left_as_it_is():
    for text in ("4", "", " 4 <b>x</b>\n", "a [THINK] b", "analysis"):
        assert said(text, ("[THINK]", "<b>", "</b>")) == text
        assert strip_reasoning(text) == text


@pytest.mark.parametrize("name", PUBLISHED)
def test_labels_are_ranked_where_they_are_trained(name):
    tokenizer = tokenizer_with(PUBLISHED[name])
    row = Example((ask(1), {**say(1), "content": "B"}))
    try:
        (((ids, mask),),) = encode_turns(tokenizer, [row])
    except DataError:
        with pytest.raises(DataError, match="generation prompt for turn"):
            tokenize_label_prompt(row, tokenizer)
        return
    given = tokenize_label_prompt(row, tokenizer)
    assert ids[: len(given)] == given
    assert tokenizer.decode(ids[len(given) :]).lstrip().startswith("B")
    assert len(given) >= mask.index(True) == len(tokenize_prompt(row, tokenizer))


def test_a_label_stands_behind_the_empty_thought():
    tokenizer = tokenizer_with(PUBLISHED["qwen3"])
    row = Example((ask(1),))
    assert tokenizer.decode(tokenize_label_prompt(row, tokenizer)).endswith("assistant\n<think>\n\n</think>\n\n")
    assert tokenizer.decode(tokenize_prompt(row, tokenizer)).endswith("assistant\n")
    with pytest.raises(DataError, match="plain text has no prompt"):
        tokenize_label_prompt(Example(text="x"), tokenizer)
