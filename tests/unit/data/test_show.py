"""What the user is shown is what is trained."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.helpers.tokens import tokenize_example

from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.show import decode_pair, decode_segments, mark_differences
from surefit.task import Example

from .conftest import chat
from .test_tokenize import LONG_CHAT, QWEN3_TEMPLATE


def test_a_conversation_in_two_colours(tokenizer):
    assert decode_segments(chat("2+2?", "4", "sure?", "你好"), tokenizer) == [[
        ("<|user|>2+2?<|end|><|assistant|>", False),
        ("4<|end|>", True),
        ("<|user|>sure?<|end|><|assistant|>", False),
        ("你好<|end|>", True),
    ]]  # fmt: skip


def test_both_answers_of_a_pair_with_what_differs(tokenizer):
    example = replace(chat("2+2?", "It is 4."), rejected=chat("2+2?", "It is five.").messages)
    chosen, rejected = decode_pair(example, tokenizer)
    prompt = ("<|user|>2+2?<|end|><|assistant|>", False, False)
    assert chosen == [prompt, ("It is ", True, False), ("4", True, True), (".<|end|>", True, False)]
    assert rejected == [prompt, ("It is ", True, False), ("five", True, True), (".<|end|>", True, False)]


def test_equal_texts_have_no_marks():
    assert mark_differences("a b", "a b") == ([("a b", False)], [("a b", False)])
    assert mark_differences("a", "") == ([("a", True)], [])


def test_every_example_of_a_conversation_is_shown(make_tokenizer):
    tokenizer = make_tokenizer(QWEN3_TEMPLATE)
    first, second = decode_segments(chat("a", "b", "c", "d"), tokenizer)
    assert first[-1] == ("<think>\n\n</think>\n\nb<|end|>\n", True)
    assert second == [
        ("<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n", False),
        ("<think>\n\n</think>\n\nd<|end|>\n", True),
    ]


@pytest.mark.parametrize("example", [LONG_CHAT, Example(text="plain 你好 text"), Example(text="你")])
def test_the_runs_are_the_whole_example(tokenizer, example):
    (runs,) = decode_segments(example, tokenizer)
    tokenized = tokenize_example(example, tokenizer)
    assert "".join(text for text, _ in runs) == tokenizer.decode(tokenized.input_ids)
    learnt = tokenizer.decode([label for label in tokenized.labels if label != MASKED])
    assert "".join(text for text, supervised in runs if supervised).endswith(learnt.lstrip("\ufffd"))


def test_a_character_of_several_tokens_belongs_to_the_run_that_completes_it(tokenizer):
    """The first token of a text is never learnt; here it is a third of a character."""
    ids = tokenize_example(Example(text="界x"), tokenizer).input_ids
    assert tokenizer.decode(ids[:1]) == "\ufffd", "the fixture splits it"
    assert decode_segments(Example(text="界x"), tokenizer) == [[("界x<|text_end|>", True)]]
