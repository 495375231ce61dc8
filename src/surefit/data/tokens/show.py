"""Display of training examples: an example's tokens decoded to text, supervised ones separate from the others."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING

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
