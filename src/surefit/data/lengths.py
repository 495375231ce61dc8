"""How many tokens the training rows have, before anything is tokenized for training: some rows, the largest among them.

The light tokenizer and the chat template of `check` are used, so nothing heavy is imported.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefit.core.errors import SureFitError
from surefit.core.sampling import evenly
from surefit.data.formats import to_examples
from surefit.data.sampled import load_tokenizer, token_examples
from surefit.data.scored import rendered, tokens_of
from surefit.data.thinking import with_thinking
from surefit.facts.chat_template import with_defaults
from surefit.facts.named_templates import DEFAULT, TOOL_USE
from surefit.facts.tokenizer import TokenizerFacts
from surefit.task import Example

if TYPE_CHECKING:
    from surefit.config.schema import Config, DataSection
    from surefit.data.load import Rows
    from surefit.task import TaskRecipe

LARGEST, OTHERS = 16, 500
"""Rows that are tokenized: so many with the most and with the fewest characters, and others spread evenly, for the
mean."""
SIZED = 100_000
"""Rows whose characters are counted at most: half a second."""


@dataclass(frozen=True)
class SampledLengths:
    """Tokens of a source's rows.

    Attributes:
        longest: of the rows that were tokenized, the largest and the smallest among them.
        shortest: of these; None where the chat template divides conversations, so that a part may be shorter.
        mean: of those spread evenly.
        rows, total: how many were tokenized, of how many.
    """

    longest: int
    shortest: int | None
    mean: float
    rows: int
    total: int


def sampled_lengths(
    rows: Rows, recipe: TaskRecipe, config: Config, tokenizer: TokenizerFacts | None
) -> SampledLengths | None:
    """Tokenize some rows; None without a tokenizer, and where the rows cannot be converted, which `check` reports."""
    library = load_tokenizer(tokenizer.file) if tokenizer and tokenizer.file else None
    if library is None or tokenizer is None or not len(rows):
        return None
    looked_at = evenly(len(rows), SIZED)
    sizes = {n: _characters(rows.row(n)) for n in looked_at}
    spread = evenly(len(rows), OTHERS)
    largest, smallest = (pick(LARGEST, looked_at, key=sizes.__getitem__) for pick in (heapq.nlargest, heapq.nsmallest))
    ends = sorted({*largest, *smallest})
    try:
        at_ends = _examples(rows.chosen(ends), recipe, config.data)
        others = _examples(rows.chosen(spread), recipe, config.data)
    except SureFitError:
        return None
    if not others:
        return None
    switches = config.model.chat_template_kwargs

    def length(example: Example) -> int:
        if example.tokens:
            return len(example.tokens[0])
        named = tokenizer.template_for(example.tools)
        template = named and with_defaults(named, switches)
        end = example.text is not None  # a text has a token that ends it; a template writes its own
        return tokens_of(library, rendered(example, tokenizer, template=template, asks=False)) + end

    measured = [length(one) for one in others]
    found = [*measured, *(length(one) for one in at_ends)]
    shortest: int | None = min(found)
    named = {DEFAULT: tokenizer.chat_template, TOOL_USE: tokenizer.tool_template}
    if (
        min(found) > config.data.max_length
        and token_examples(others, {key: text or "" for key, text in named.items()}) > 1
    ):
        shortest = None
    return SampledLengths(max(found), shortest, sum(measured) / len(measured), len({*spread, *ends}), rows.total)


def _examples(rows: Rows, recipe: TaskRecipe, section: DataSection) -> Sequence[Example]:
    return with_thinking(to_examples(rows, recipe, section.format, "skip"), section.thinking)


def _characters(row: dict[str, object]) -> int:
    return sum(len(value) if isinstance(value, str) else len(str(value)) for value in row.values())
