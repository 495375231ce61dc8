"""Truncation of long documents so that the prompt's template and the whole answer stay (`data.too_long`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from surefit.config.schema import SureFitConfig
from surefit.core.errors import DataError
from surefit.data.tokens.tokenize import count_token_lengths
from surefit.task import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\n[…]\n"
"""Text between the beginning and the end of a document without its middle."""
UNUSED = 0.002
"""The share of the limit that may stay empty: the search for the cut tokenizes four or five times."""
ROUNDS = 24
WORD = 40
"""The most characters that a cut moves back to the space before it."""


def shorten_document(example: Example, tokenizer: PreTrainedTokenizerBase, limit: int, too_long: str) -> Example:
    """Shorten an example's document so that all turns and the template fit into `limit` tokens.

    Args:
        too_long: "truncate" keeps the document's beginning, "truncate_middle" its beginning and its end, half each.

    Raises:
        DataError: it has no document, or is too long even without one.
    """
    document = example.document
    if document is None:
        raise DataError(
            "the row is too long, and its recipe does not say which part of the prompt may be cut",
            code="E4113",
            field="data.too_long",
            help="write too_long: drop, or raise data.max_length",
        )

    def with_kept(characters: int) -> Example:
        return _with_document(example, document, cut_document(document, characters, too_long))

    def tokens(characters: int) -> int:
        return max(total for total, _ in count_token_lengths(tokenizer, [with_kept(characters)])[0])

    low, high = 0, len(document)
    low_tokens, high_tokens = tokens(low), tokens(high)
    if high_tokens <= limit:
        return example
    if low_tokens > limit:
        raise DataError(
            f"{low_tokens:,} tokens even without the document, over the limit of {limit:,}",
            code="E4114",
            field="data.max_length",
            help="raise data.max_length, shorten the instruction or the answer, or lower evaluate.max_new_tokens",
        )
    for step in range(ROUNDS):
        if high - low <= 1 or limit - low_tokens <= UNUSED * limit:
            break
        share = 0.5 if step % 3 == 2 else (limit - low_tokens) / (high_tokens - low_tokens)
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        if (middle_tokens := tokens(middle)) <= limit:
            low, low_tokens = middle, middle_tokens
        else:
            high, high_tokens = middle, middle_tokens
    return with_kept(low)


def cut_document(document: str, characters: int, too_long: str) -> str:
    """Return about `characters` of a document: its beginning, or its beginning and end with a mark between them.

    >>> [cut_document("one two three four five six", 14, how) for how in ("truncate", "truncate_middle")]
    ['one two three', 'one two\\n[…]\\nsix']
    """
    if characters >= len(document):
        return document
    if too_long == "truncate":
        return _beginning(document, characters)
    half = characters // 2
    end = document[len(document) - half :]
    space = end[:WORD].find(" ")
    return _beginning(document, characters - half) + MARK + end[space + 1 :] if characters else ""


def _beginning(document: str, characters: int) -> str:
    if document[characters : characters + 1].isspace():
        return document[:characters].rstrip()
    space = document.rfind(" ", max(0, characters - WORD), characters)
    return document[: space if space > 0 else characters].rstrip()


def _with_document(example: Example, document: str, other: str) -> Example:
    messages = list(example.messages)
    place = max(n for n, turn in enumerate(messages) if document in str(turn.get("content")))
    before, _, after = messages[place]["content"].rpartition(document)
    messages[place] = {**messages[place], "content": before + other + after}
    return replace(example, messages=tuple(messages), document=other)


def prompt_limit(config: SureFitConfig) -> int | None:
    """Return the most tokens of a prompt when it is answered; None where prompts are never cut."""
    return config.data.max_length - config.evaluate.max_new_tokens if config.data.cuts else None


def build_prompt_cutter(config: SureFitConfig, tokenizer: PreTrainedTokenizerBase) -> Callable[[Example], Example]:
    """Return the function example → its prompt for generation: cut where training would cut it, leaving
    `evaluate.max_new_tokens` for the answer. Prompts without a document stay as they are.

    The function raises DataError where even a prompt without its document is too long.
    """
    limit = prompt_limit(config)

    def cut(example: Example) -> Example:
        prompt = Example(example.prompt, example.tools, document=example.document)
        if limit is None or prompt.document is None:
            return prompt
        return shorten_document(prompt, tokenizer, limit, config.data.too_long)

    return cut
