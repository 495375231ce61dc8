"""What a model's tokenizer does, from its files: special tokens, vocabulary, what its chat template marks."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TokenizerFacts:
    """What a model's tokenizer does, from its files: special tokens, vocabulary, what its chat template marks."""
