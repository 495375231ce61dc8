"""One example as it is trained on, for tests of templates that never rewrite."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from surefit.data.tokens.cache import MASKED
from surefit.data.tokens.tokenize import encode
from surefit.task import Example


@dataclass(frozen=True)
class Tokenized:
    """One example: the ids of all of it, and as labels the same where the loss falls, `MASKED` elsewhere."""

    input_ids: list[int]
    labels: list[int]


def tokenize_example(example: Example, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    ids, supervised = encode(tokenizer, [example])[0]
    return Tokenized(ids, [i if learnt else MASKED for i, learnt in zip(ids, supervised, strict=True)])
