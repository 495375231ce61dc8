"""Effect on a model's facts of tokens that a config adds to the vocabulary."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from surefit.facts.model import ModelFacts
from surefit.facts.tokenizer import TokenizerFacts, known_tokens


def with_new_tokens(model: ModelFacts, tokens: Sequence[str], tokenizer: TokenizerFacts | None) -> ModelFacts:
    """Return the model with a row for each token that its tokenizer does not know; its spare rows are used first, where
    their number is known."""
    existing = known_tokens(tokenizer, tokens) if tokenizer else []
    count = len(tokens) - len(existing)
    last = tokenizer.largest_id if tokenizer and tokenizer.largest_id is not None else model.vocab_size - 1
    size = max(model.vocab_size, last + 1 + count)
    heads = {name: shape for name, shape in model.linear_modules.items() if shape[0] == model.vocab_size}
    added_parameters = (size - model.vocab_size) * model.hidden_size * (1 if model.tied_embeddings else 2)
    return replace(
        model,
        vocab_size=size,
        new_tokens=count,
        linear_modules=model.linear_modules | {name: (size, into) for name, (_, into) in heads.items()},
        parameters=None if model.parameters is None else model.parameters + added_parameters,
        expected_parameters=None if model.expected_parameters is None else model.expected_parameters + added_parameters,
    )


def row_shapes(model: ModelFacts) -> Iterator[tuple[int, int]]:
    """Yield the shapes of the embedding rows that are trained beside LoRA: the embedding's, and an untied head's.

    >>> from surefit.facts.model import model_facts
    >>> nano = with_new_tokens(model_facts("surefit/nano"), ["<call>", "</call>"], None)
    >>> list(row_shapes(nano))
    [(2, 160)]
    """
    if model.new_tokens:
        yield from ((model.new_tokens, model.hidden_size),) * (1 if model.tied_embeddings else 2)
