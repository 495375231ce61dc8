"""Text of an answer while it is generated: the parts together are the answer, and none of them is taken back."""

from __future__ import annotations

import pytest
import torch

from surefit.generate.engine import DecodingConfig, generate
from surefit.generate.streaming import TextStream

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("stop", [(), ("e",), ("th", "qu"), ("\n",)])
def test_the_parts_are_the_answer(make_tiny, tiny_tokenizer, seed, stop):
    model = make_tiny(seed=seed, tie_word_embeddings=False)
    parts: list[str] = []
    decoding = DecodingConfig(24, 1, stop=stop)
    (streamed,) = generate(model, tiny_tokenizer, [[5, 6, 7 + seed]], decoding, on_text=parts.append)
    assert [streamed] == generate(model, tiny_tokenizer, [[5, 6, 7 + seed]], decoding)
    assert "".join(parts) == streamed.text
    assert all(parts)


def stream(tokenizer, texts, stop=()):
    """Pass the beginnings of an answer on, one call per beginning, as generation does, and return the parts."""
    parts: list[str] = []
    criteria = TextStream(tokenizer, parts.append, 0, (), stop)
    for text in texts:
        ids = tokenizer(text, add_special_tokens=False).input_ids
        criteria(torch.tensor([ids]), None)
    return parts


def test_half_a_character_waits_for_its_other_bytes(tiny_tokenizer):
    ids = tiny_tokenizer("é", add_special_tokens=False).input_ids
    assert len(ids) > 1, "the tokenizer divides it"
    parts: list[str] = []
    criteria = TextStream(tiny_tokenizer, parts.append, 0, ())
    criteria(torch.tensor([ids[:1]]), None)
    assert parts == []
    criteria(torch.tensor([ids]), None)
    assert parts == ["é"]


def test_the_beginning_of_a_stop_text_waits(tiny_tokenizer):
    assert stream(tiny_tokenizer, ["ab", "abc\n", "abc\nd"], ("\n\n",)) == ["ab", "c", "\nd"]
    assert stream(tiny_tokenizer, ["ab", "abx", "abxy", "abxyz"], ("xy",)) == ["ab"]
