"""Documents that are too long are cut so that the prompt's template and the whole answer stay (`data.too_long`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from surefit.config.schema import Config
from surefit.core.errors import DataError
from surefit.data.tokens.tokenize import count_token_lengths
from surefit.task import Example

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\n[…]\n"
"""Between the beginning and the end of a document without its middle."""
UNUSED = 0.002
"""The share of the limit that may stay empty: the cut is looked for by tokenising, four or five times."""
ROUNDS = 24
WORD = 40
"""A cut goes back to the space before it, at most so many characters."""


def shorten_document(example: Example, tokenizer: PreTrainedTokenizerBase, limit: int, too_long: str) -> Example:
    """The example with as much of its document as fits into `limit` tokens, all turns and the template counted.

    Args:
        too_long: "truncate" keeps the document's beginning, "truncate_middle" its beginning and its end, half each.

    Raises:
        DataError: it has no document, or is too long even without one.
    """
    document = example.document
    if document is None:
        raise DataError(
            "the row is too long, and its recipe names no part of the prompt that may be cut",
            code="E4113",
            field="data.too_long",
            help="write too_long: drop, or raise data.max_length",
        )

    def with_kept(characters: int) -> Example:
        return _with_document(example, document, cut_document(document, characters, too_long))

    def tokens(characters: int) -> int:
        return max(total for total, _ in count_token_lengths(tokenizer, [with_kept(characters)])[0])

    low, high = 0, len(document)
    at_low, at_high = tokens(low), tokens(high)
    if at_high <= limit:
        return example
    if at_low > limit:
        raise DataError(
            f"{at_low:,} tokens without a word of the document, over the limit of {limit:,}",
            code="E4114",
            field="data.max_length",
            help="raise data.max_length, shorten the instruction or the answer, or lower evaluate.max_new_tokens",
        )
    for step in range(ROUNDS):
        if high - low <= 1 or limit - at_low <= UNUSED * limit:
            break
        share = 0.5 if step % 3 == 2 else (limit - at_low) / (at_high - at_low)
        middle = min(high - 1, max(low + 1, low + int(share * (high - low))))
        if (found := tokens(middle)) <= limit:
            low, at_low = middle, found
        else:
            high, at_high = middle, found
    return with_kept(low)


def cut_document(document: str, characters: int, too_long: str) -> str:
    """About so many characters of a document: its beginning, or its beginning and end with a mark between them.

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


def prompt_limit(config: Config) -> int | None:
    """The tokens that a prompt may have when it is answered; None where prompts are never cut."""
    return config.data.max_length - config.evaluate.max_new_tokens if config.data.cuts else None


def build_prompt_cutter(config: Config, tokenizer: PreTrainedTokenizerBase) -> Callable[[Example], Example]:
    """Example → its prompt as the model is to be asked it: cut where training would cut it, with room for an answer of
    `evaluate.max_new_tokens`. Prompts without a document stay as they are.

    The function raises DataError where even a prompt without a word of its document is too long.
    """
    limit = prompt_limit(config)

    def cut(example: Example) -> Example:
        asked = Example(example.prompt, example.tools, document=example.document)
        if limit is None or asked.document is None:
            return asked
        return shorten_document(asked, tokenizer, limit, config.data.too_long)

    return cut
