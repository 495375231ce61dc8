"""A sample of examples: what it is made of, and a lower bound of its lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.helpers.tokens import tokenize_example

from surefit import nano
from surefit.data.rows import sample_checks
from surefit.data.rows.sample_checks import example_facts
from surefit.facts.tokenizer import TokenizerFacts, tokenizer_facts
from surefit.task import Example

from .conftest import as_examples, chat

TOOL = {"type": "function", "function": {"name": "add", "description": "adds two numbers", "parameters": {}}}


@pytest.fixture(scope="module")
def facts() -> TokenizerFacts:
    return tokenizer_facts(nano.PATH)


def test_what_the_examples_are(facts: TokenizerFacts) -> None:
    found = example_facts(as_examples(chat("a", "b"), chat("c", "d", tools=(TOOL,)), Example(text="plain")), facts, 512)
    assert (found.examples, found.conversations, found.with_tools) == (3, 2, 1)
    assert (found.measured, found.too_long, found.first_too_long) == (3, 0, None)


def test_lengths_are_a_lower_bound_of_those_in_training(facts: TokenizerFacts) -> None:
    from transformers import AutoTokenizer

    examples = [chat("what is the weather " * n, "sunny " * n, tools=(TOOL,) if n % 2 else None) for n in range(1, 40)]
    real = [len(tokenize_example(example, AutoTokenizer.from_pretrained(nano.PATH)).input_ids) for example in examples]
    for limit in (32, 64, 128):
        found = example_facts(as_examples(*examples), facts, limit)
        over = sum(length > limit for length in real)
        assert found.measured == len(examples)
        assert over - 4 <= found.too_long <= over
        assert limit < found.longest <= max(real)
        assert found.first_too_long.startswith("rows.jsonl:")


def test_without_a_tokenizer_only_what_is_certain_is_said(facts: TokenizerFacts) -> None:
    long, short = as_examples(chat("x" * 500, "y")), as_examples(chat("x", "y"))
    for missing in (None, replace(facts, file=None)):
        assert example_facts(long, missing, 100).measured == 0
        assert example_facts(short, missing, 100).measured == 1


def test_a_damaged_tokenizer_finds_nothing_too_long(tmp_path: Path, facts: TokenizerFacts) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "BPE", "vocab": {}}}', encoding="utf-8")
    damaged = replace(facts, file=tmp_path / "tokenizer.json")
    assert example_facts(as_examples(chat("x" * 500, "y")), damaged, 100).too_long == 0


def test_the_work_is_bounded(facts: TokenizerFacts, monkeypatch: pytest.MonkeyPatch) -> None:
    handed: list[str] = []

    def lengths(file: Path, texts: list[str]) -> list[int]:
        handed.extend(texts)
        return [len(text) for text in texts]

    monkeypatch.setattr(sample_checks, "_lengths", lengths)
    found = example_facts(as_examples(*(chat("x" * 100_000, "y") for _ in range(500))), facts, 2_000)
    assert sum(map(len, handed)) <= sample_checks.BUDGET
    assert found.measured == len(handed) == found.too_long > 20


@pytest.mark.parametrize("content", ["\ud800" * 200, "", "\x00" * 200])
def test_odd_texts_raise_nothing(content: str, facts: TokenizerFacts) -> None:
    odd: Any = Example(({"role": "user", "content": content}, {"role": "assistant", "content": "y"}))
    assert example_facts(as_examples(odd), facts, 64).examples == 1
