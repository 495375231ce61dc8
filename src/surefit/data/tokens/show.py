"""Display of training examples: an example's tokens decoded to text, supervised ones separate from the others."""

from __future__ import annotations

import re
from difflib import SequenceMatcher
from itertools import groupby
from typing import TYPE_CHECKING

from surefit.data.rows.pairs import pair_sides
from surefit.data.tokens.cache import Encoded
from surefit.data.tokens.tokenize import encode_turns
from surefit.task import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BROKEN = "\ufffd"
"""The decoder's output for bytes that are no whole character."""


def decode_segments(example: Example, tokenizer: PreTrainedTokenizerBase) -> list[list[tuple[str, bool]]]:
    """Return the token examples of an example, each decoded from its ids in runs: (text, whether it is supervised).

    The joined texts of a token example are the decoding of all its ids, special tokens included. A character whose
    bytes lie on both sides of a border belongs to the run that completes it.

    Raises:
        DataError, ModelError: as `encode_turns`.
    """
    return [_runs(encoded, tokenizer) for encoded in encode_turns(tokenizer, [example])[0]]


def decode_pair(
    example: Example, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[tuple[str, bool, bool]], list[tuple[str, bool, bool]]]:
    """Return the chosen and the rejected conversation of a pair, decoded from their ids in runs: (text, whether it is
    supervised, whether it differs from the other answer).

    Raises:
        DataError, ModelError: as `encode_turns`.
    """
    chosen, rejected = (decode_segments(side, tokenizer)[-1] for side in pair_sides(example))
    answers = ["".join(text for text, supervised in runs if supervised) for runs in (chosen, rejected)]
    marks = mark_differences(answers[0], answers[1])
    return _with_marks(chosen, marks[0]), _with_marks(rejected, marks[1])


def mark_differences(one: str, other: str) -> tuple[list[tuple[str, bool]], list[tuple[str, bool]]]:
    """Return both texts in parts, word by word: (text, whether the other text has something else there).

    >>> mark_differences("It is 4.", "It is five.")
    ([('It is ', False), ('4', True), ('.', False)], [('It is ', False), ('five', True), ('.', False)])
    """
    a, b = (re.findall(r"\s+|\w+|[^\w\s]", text) for text in (one, other))
    parts: tuple[list[tuple[str, bool]], list[tuple[str, bool]]] = ([], [])
    for kind, a_start, a_end, b_start, b_end in SequenceMatcher(None, a, b).get_opcodes():
        for marked, words in zip(parts, (a[a_start:a_end], b[b_start:b_end]), strict=True):
            if words:
                marked.append(("".join(words), kind != "equal"))
    return parts


def _with_marks(runs: list[tuple[str, bool]], marks: list[tuple[str, bool]]) -> list[tuple[str, bool, bool]]:
    """Return the runs, the supervised ones divided where the marks of their joined text change."""
    marked: list[tuple[str, bool, bool]] = []
    left = list(marks)
    for text, supervised in runs:
        while supervised and text:
            part, differs = left.pop(0)
            taken = part[: len(text)]
            if len(part) > len(taken):
                left.insert(0, (part[len(taken) :], differs))
            marked.append((taken, True, differs))
            text = text[len(taken) :]
        if text:
            marked.append((text, False, False))
    return marked


def _runs(encoded: Encoded, tokenizer: PreTrainedTokenizerBase) -> list[tuple[str, bool]]:
    ids, mask = encoded
    runs: list[tuple[str, bool]] = []
    decoded_length, end = 0, 0
    for supervised, group in groupby(mask):
        end += len(list(group))
        text = tokenizer.decode(ids[:end], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        text = text if end == len(ids) else text.rstrip(BROKEN)
        runs.append((text[decoded_length:], supervised))
        decoded_length = max(decoded_length, len(text))
    return [(text, supervised) for text, supervised in runs if text]
