"""How many tokens the training rows have, before anything is tokenized for training: some rows, the largest among them.

The light tokenizer and the chat template of `check` are used, so nothing heavy is imported.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from surefit.core.errors import DataError, SureFitError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.read.readers import count_characters
from surefit.data.rows.eval_prompts import count_text_tokens
from surefit.data.rows.layouts import to_examples
from surefit.data.rows.reasoning import apply_reasoning_mode
from surefit.data.rows.rendered_turns import Segments
from surefit.data.rows.sample_checks import example_text, load_tokenizer_file, mean_token_examples
from surefit.data.rows.unread_fields import find_read_columns
from surefit.data.tokens.light_template import LightTemplate, light_template
from surefit.data.tokens.turns import Segment, count_rendered_turns
from surefit.facts.tokenizer import TokenizerFacts, begins_texts
from surefit.task import Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from surefit.config.schema import Config, DataSection
    from surefit.data.read.load import Rows
    from surefit.task import TaskRecipe

LARGEST, OTHERS = 16, 500
"""Rows that are tokenized: so many with the most and with the fewest characters, and others spread evenly, for the
mean."""
SIZED = 100_000
"""Rows whose characters are counted at most."""
TURNS, FEW_TURNS = 10_000, 20
"""Rendered turns of the conversations that are cut into token examples, each counted every time; and of a conversation
that is always cut."""


@dataclass(frozen=True)
class SampledLengths:
    """Tokens of a source's rows.

    Attributes:
        longest: of the rows that were tokenized, the largest and the smallest among them.
        shortest: of these; None where the chat template divides conversations, so that a part may be shorter.
        mean: of those spread evenly.
        too_long: the share of these that is longer than `data.max_length`.
        rows, total: how many were tokenized, of how many.
    """

    longest: int
    shortest: int | None
    mean: float
    too_long: float
    rows: int
    total: int


def sample_lengths(
    rows: Rows, recipe: TaskRecipe, config: Config, tokenizer: TokenizerFacts | None
) -> SampledLengths | None:
    """Tokenize some rows; None without a tokenizer, and where the rows cannot be converted, which `check` reports."""
    library = load_tokenizer_file(tokenizer.file) if tokenizer and tokenizer.file else None
    if library is None or tokenizer is None or not len(rows):
        return None
    ends, spread = _ends(rows, recipe, config.data.format), evenly_spaced_indices(len(rows), OTHERS)
    try:
        at_ends = _examples(rows.chosen(ends), recipe, config.data)
        others = _examples(rows.chosen(spread), recipe, config.data)
    except SureFitError:
        return None
    if not others:
        return None
    template = light_template(tokenizer, config)
    count = _Counter(library, tokenizer, template)
    found = [length for example in at_ends for length in count.lengths(example)]
    measured = [length for example in others for length in count.lengths(example)]
    found += measured
    shortest: int | None = min(found)
    if count.uncut and template and min(found) > config.data.max_length and mean_token_examples(others, template) > 1:
        shortest = None
    mean = sum(measured) / len(measured)
    too_long = sum(length > config.data.max_length for length in measured) / len(measured)
    return SampledLengths(max(found), shortest, mean, too_long, len({*spread, *ends}), rows.total)


def _ends(rows: Rows, recipe: TaskRecipe, fmt: str) -> list[int]:
    """The numbers of the rows with the most and with the fewest characters in the columns that are read, the largest
    first."""
    read = find_read_columns(rows, recipe, fmt)
    looked_at = evenly_spaced_indices(len(rows), SIZED)
    sizes = {n: count_characters([value for name, value in rows.row(n).items() if name in read]) for n in looked_at}
    largest, smallest = (pick(LARGEST, looked_at, key=sizes.__getitem__) for pick in (heapq.nlargest, heapq.nsmallest))
    return list(dict.fromkeys([*largest, *smallest]))


class _Counter:
    """Counts the tokens of examples as training makes them.

    Attributes:
        uncut: some conversation was counted as a whole.
    """

    def __init__(self, library: Tokenizer, facts: TokenizerFacts, template: LightTemplate | None) -> None:
        self._library, self._facts, self._template = library, facts, template
        self._begins = begins_texts(facts) is True
        self._left, self.uncut = TURNS, False
        newline, letter, both = (library.encode(text, add_special_tokens=False).ids for text in ("\n", "x", "\nx"))
        self._piecewise = newline + letter == both  # else a text's first token depends on being the first

    def lengths(self, example: Example) -> list[int]:
        """The tokens of each token example that an example makes."""
        if example.tokens:
            return [len(example.tokens[0])]
        if example.text is not None:  # training adds the token that ends a text, where it is not there
            ended = example.text.endswith(self._facts.eos_token or "\0")
            return [count_text_tokens(self._library, example.text) + self._begins + (not ended)]
        try:
            segments = self._segments(example)
        except DataError:  # reported where rows are looked at
            segments = None
        if segments is None:
            return [count_text_tokens(self._library, example_text(example, self._facts))]
        return [self._tokens(one) for one in segments]

    def _segments(self, example: Example) -> Segments | None:
        """The token examples of a conversation; of a long one, once `TURNS` are rendered, the whole text as one."""
        if self._template is None:
            return None
        if (turns := count_rendered_turns(example)) > max(self._left, FEW_TURNS):
            self.uncut = True
            return [[(self._template.whole(example), True)]]
        self._left -= turns
        return self._template.segments(example)

    def _tokens(self, segments: Sequence[Segment]) -> int:
        texts = [text for text, _ in segments]
        return sum(count_text_tokens(self._library, text) for text in (texts if self._piecewise else ["".join(texts)]))


def _examples(rows: Rows, recipe: TaskRecipe, section: DataSection) -> Sequence[Example]:
    return apply_reasoning_mode(to_examples(rows, recipe, section.format, "skip"), section.thinking)
