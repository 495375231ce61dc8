"""Estimated token lengths of the training rows before they are tokenized for training: a sample, with the longest rows.

The light tokenizer and the chat template of `check` are used, so nothing heavy is imported.
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from surefit.core.errors import DataError, SureFitError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.read.readers import count_characters
from surefit.data.rows.eval_prompts import USUAL_BYTES, count_text_tokens
from surefit.data.rows.layouts import to_examples
from surefit.data.rows.reasoning import apply_reasoning_mode
from surefit.data.rows.rendered_turns import Segments
from surefit.data.rows.sample_checks import example_text, load_tokenizer_file, mean_token_examples
from surefit.data.rows.unread_fields import find_read_columns
from surefit.data.tokens.light_template import LightTemplate, light_template
from surefit.data.tokens.prompt_share import worth_sharing
from surefit.data.tokens.turns import Segment, answers_of, count_rendered_turns
from surefit.facts.tokenizer import TokenizerFacts, begins_texts
from surefit.task import Example

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from surefit.config.schema import DataSection, SureFitConfig
    from surefit.data.read.load import Rows
    from surefit.task import TaskRecipe

LARGEST, OTHERS = 16, 500
"""Rows that are tokenized: `LARGEST` with the most and as many with the fewest characters, and others spread evenly,
for the mean."""
SIZED = 100_000
"""Maximum number of rows whose characters are counted."""
TURNS, FEW_TURNS = 10_000, 20
"""Rendered turns of the conversations that are cut into token examples, each counted every time; and of a conversation
that is always cut."""
PER_TURN, PER_EXAMPLE = 8, 64
"""Tokens that a chat template adds at most: around a turn; and once, such as a system prompt of its own."""


@dataclass(frozen=True)
class SampledLengths:
    """Tokens of a source's rows.

    Attributes:
        longest: tokens of the longest tokenized row; the rows with the most characters are among them.
        shortest: tokens of the shortest one; None if the chat template divides conversations, so that a part may be
            shorter.
        mean: mean tokens of the rows spread evenly.
        too_long: share of the rows spread evenly that is longer than `data.max_length`.
        rows, total: number of tokenized rows, and of all rows.
        shared: of pairs, the share of the tokens spread evenly that the second of two prompts makes up, where sharing
            prompts leaves it out.
    """

    longest: int
    shortest: int | None
    mean: float
    too_long: float
    rows: int
    total: int
    shared: float = 0.0


def sample_lengths(
    rows: Rows, recipe: TaskRecipe, config: SureFitConfig, tokenizer: TokenizerFacts | None
) -> SampledLengths | None:
    """Tokenize some rows; None without a tokenizer, and if the rows cannot be converted, which `check` reports."""
    library = load_tokenizer_file(tokenizer.file) if tokenizer and tokenizer.file else None
    if library is None or tokenizer is None or not len(rows):
        return None
    extremes, spread = _ends(rows, recipe, config.data.format), evenly_spaced_indices(len(rows), OTHERS)
    try:
        extreme_examples = _examples(rows.chosen(extremes), recipe, config.data)
        other_examples = _examples(rows.chosen(spread), recipe, config.data)
    except SureFitError:
        return None
    if not other_examples:
        return None
    template = light_template(tokenizer, config)
    count = _Counter(library, tokenizer, template)
    all_lengths = [length for example in extreme_examples for length in count.lengths(example)]
    measured = [length for example in other_examples for length in count.lengths(example)]
    all_lengths += measured
    shortest: int | None = min(all_lengths)
    if (
        count.uncut
        and template
        and min(all_lengths) > config.data.max_length
        and mean_token_examples(other_examples, template) > 1
    ):
        shortest = None
    mean = sum(measured) / len(measured)
    too_long = sum(length > config.data.max_length for length in measured) / len(measured)
    shared = sum(count.prompt(example) for example in other_examples) / sum(measured)
    return SampledLengths(max(all_lengths), shortest, mean, too_long, len({*spread, *extremes}), rows.total, shared)


def bound_lengths(rows: Rows, recipe: TaskRecipe, config: SureFitConfig) -> SampledLengths | None:
    """Bound the tokens of the same rows by their text, for a model whose tokenizer is not on this machine; None where
    they cannot be converted.

    `longest` is an upper bound, since no tokenizer makes more tokens of a text than it has bytes; `mean` assumes the
    usual number of bytes per token.
    """
    if not len(rows):
        return None
    extremes, spread = _ends(rows, recipe, config.data.format), evenly_spaced_indices(len(rows), OTHERS)
    try:
        extreme_examples = _examples(rows.chosen(extremes), recipe, config.data)
        other_examples = _examples(rows.chosen(spread), recipe, config.data)
    except SureFitError:
        return None
    if not other_examples:
        return None
    longest = max(_bound(example)[0] for example in (*extreme_examples, *other_examples))
    means = [_bound(example)[1] for example in other_examples]
    mean = sum(means) / len(means)
    return SampledLengths(longest, None, mean, 0.0, len({*spread, *extremes}), rows.total)


def _bound(example: Example) -> tuple[int, float]:
    """Return the most tokens that an example can have, and those that it probably has."""
    if example.tokens:
        return len(example.tokens[0]), len(example.tokens[0])
    tools = len(json.dumps(example.tools, ensure_ascii=False).encode()) if example.tools else 0
    size = len(example_text(example, None).encode()) + tools
    added = PER_TURN * len(example.messages) + PER_EXAMPLE if example.text is None else 2
    return size + added, size / USUAL_BYTES + added / 2


def _ends(rows: Rows, recipe: TaskRecipe, fmt: str) -> list[int]:
    """Return the numbers of the rows with the most and with the fewest characters in the columns that are read, the
    largest first."""
    read_columns = find_read_columns(rows, recipe, fmt)
    sampled = evenly_spaced_indices(len(rows), SIZED)
    sizes = {
        n: count_characters([value for name, value in rows.row(n).items() if name in read_columns]) for n in sampled
    }
    largest, smallest = (pick(LARGEST, sampled, key=sizes.__getitem__) for pick in (heapq.nlargest, heapq.nsmallest))
    return list(dict.fromkeys([*largest, *smallest]))


class _Counter:
    """Counts the tokens of examples as training tokenizes them.

    Attributes:
        uncut: some conversation was counted as a whole.
    """

    def __init__(self, library: Tokenizer, facts: TokenizerFacts, template: LightTemplate | None) -> None:
        self._library, self._facts, self._template = library, facts, template
        self._begins = begins_texts(facts) is True
        self._left, self.uncut = TURNS, False
        newline, letter, pair = (library.encode(text, add_special_tokens=False).ids for text in ("\n", "x", "\nx"))
        self._piecewise = newline + letter == pair  # otherwise a text's first token depends on being the first

    def lengths(self, example: Example) -> list[int]:
        """Return the tokens of each token example of an example: of a pair those of both answers."""
        if example.rejected is not None:
            try:
                return [length for answer in answers_of(example) for length in self.lengths(answer)]
            except DataError:  # reported where rows are checked
                return self.lengths(replace(example, rejected=None))
        if example.tokens:
            return [len(example.tokens[0])]
        if example.text is not None:  # training adds a missing end-of-text token
            has_end = example.text.endswith(self._facts.eos_token or "\0")
            return [count_text_tokens(self._library, example.text) + self._begins + (not has_end)]
        try:
            segments = self._segments(example)
        except DataError:  # reported where rows are checked
            segments = None
        if segments is None:
            return [count_text_tokens(self._library, example_text(example, self._facts))]
        return [self._tokens(part) for part in segments]

    def prompt(self, example: Example) -> int:
        """Return the tokens of a pair's prompt that sharing leaves out; 0 of another example."""
        if example.rejected is None:
            return 0
        try:
            answers = answers_of(example)
            segments = self._segments(answers[0])
            total = sum(self.lengths(answers[0])) + sum(self.lengths(answers[1]))
        except DataError:  # reported where rows are checked
            return 0
        context = list(takewhile(lambda segment: not segment[1], segments[-1])) if segments else []
        return worth_sharing(self._tokens(context), total) if context else 0

    def _segments(self, example: Example) -> Segments | None:
        """Return the token examples of a conversation; once `TURNS` are rendered, a long one is returned as one
        text."""
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
