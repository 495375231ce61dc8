"""Checks of a sample of examples against the model's chat template and tokenizer, without transformers (`surefit
check`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from surefit.config.schema import SureFitConfig
from surefit.core.errors import DataError, SureFitError
from surefit.data.audit.sample import EXAMPLES, DetectorTally
from surefit.data.rows.layouts import SKIP_ROWS_HELP, Examples, bad_rows_error, refusal_reasons, with_place
from surefit.data.rows.other_templates import END, PROMPT, find_foreign_templates
from surefit.data.rows.pairs import answer_sides
from surefit.data.rows.reasoning import apply_reasoning_mode
from surefit.data.rows.rendered_turns import LOST, UNCLOSED, TemplateLossFinder, unclosed_thoughts
from surefit.data.rows.special_tokens import (
    BEGUN_TWICE,
    NO_BEGIN,
    RENDERED,
    RENDERED_TEXT,
    SPECIAL,
    SpecialTokens,
    build_special_tokens,
)
from surefit.data.tokens.light_template import LightTemplate, light_template
from surefit.data.tokens.turns import count_rendered_turns, truncate_conversation
from surefit.facts.audit import Observation
from surefit.facts.tokenizer import TokenizerFacts, begins_texts
from surefit.task import Example

SECONDS = 0.3
"""Seconds, for all sources of a run, after which no more rows are rendered if `LEAST` rows or `TURNS` turns were."""
LEAST = 50
"""Rows of a source that are rendered on a slow or busy machine as well."""
TURNS = 3_000
"""Rendered turns, each counted every time. A conversation of 200 turns has 20,000 and takes seconds alone: if a
conversation has more than a quarter of the remaining turns, only its beginning is rendered."""
FEWEST_TURNS = 60
"""Rendered turns of a conversation that are always within the budget: ten messages."""
STRIDE = 16
"""Distance between the rows of a round, and number of rounds: the rows checked when time is over are spread evenly."""
NAMES = (*LOST, UNCLOSED, SPECIAL, RENDERED, RENDERED_TEXT, NO_BEGIN, BEGUN_TWICE, PROMPT, END)
"""Names of the observations."""
SKIPPED = "skipped_row"
"""Observation: a row is left out (`data.bad_rows: skip`)."""


@dataclass(frozen=True)
class TemplateCheckResult:
    """The result of rendering a sample of examples.

    Attributes:
        observations: by name.
        refused: number of each example for which the template raises an error → the error, with the row's place.
    """

    observations: Mapping[str, Observation] = field(default_factory=dict)
    refused: Mapping[int, DataError] = field(default_factory=dict)


def check_template(
    examples: Examples,
    tokenizer: TokenizerFacts | None,
    config: SureFitConfig,
    seconds: float = SECONDS,
    answers: bool = True,
) -> TemplateCheckResult:
    """Render `LEAST` examples, spread evenly, and more until the time is over; compare them with the rendered text.

    Args:
        answers: False where the answers are only compared with generated text: they are not rendered.
    """
    if tokenizer is None or not examples:
        return TemplateCheckResult()
    template = light_template(tokenizer, config)
    comparison = TemplateLossFinder(template.segments) if template else None
    has_plain_text = any(example.text is not None and example.tokens is None for example in examples)
    tokens = special_tokens_from_facts(tokenizer, template, has_plain_text)
    matches: dict[int, list[tuple[str, str]]] = {}
    refused: dict[int, DataError] = {}
    start, turns_left = time.monotonic(), TURNS
    for number in _spread(len(examples)):
        if (len(matches) >= LEAST or turns_left <= 0) and time.monotonic() - start > seconds:
            break
        matches[number] = []
        for example in answer_sides(examples[number]):
            found = [*tokens.sights(example), *unclosed_thoughts(example), *find_foreign_templates(example, tokens.all)]
            if example.text is None and template and comparison and number not in refused:
                rendered = truncate_conversation(
                    example if answers else _with_dummy_answer(example), max(turns_left // 4, FEWEST_TURNS)
                )
                turns_left -= count_rendered_turns(rendered)
                try:
                    found += comparison.losses(rendered, template.segments(rendered))
                except DataError as error:
                    refused[number] = with_place(error, examples.where[number])
            matches[number] += first_of_each(found, matches[number])
    tally = DetectorTally()
    for number in sorted(matches):
        for name, description in matches[number]:
            tally.add(name, number, description)
    observations = {name: tally.observation(name, len(matches), examples.where.__getitem__) for name in NAMES}
    return TemplateCheckResult(observations, dict(sorted(refused.items())))


def first_of_each(found: Sequence[tuple[str, str]], counted: Sequence[tuple[str, str]] = ()) -> list[tuple[str, str]]:
    """Return the matches whose names the other answer of the same row has not shown: a row counts once."""
    names = {name for name, _ in counted}
    return [(name, description) for name, description in found if name not in names]


def special_tokens_from_facts(tokenizer: TokenizerFacts, template: LightTemplate | None, plain: bool) -> SpecialTokens:
    """Return the special tokens of a tokenizer that texts are searched for.

    Args:
        plain: some examples are plain text.
    """
    role_tokens = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.end_of_turn)
    return build_special_tokens(
        [*tokenizer.special, *(text for text in role_tokens if text)],
        bos=tokenizer.bos_token,
        eos=tokenizer.eos_token,
        end_of_turn=tokenizer.end_of_turn,
        padding=tokenizer.pad_token,
        asked=template.question() if template else None,
        templated=template is not None,
        adds=begins_texts(tokenizer) if plain else None,
    )


def build_template_error(
    looked: TemplateCheckResult, examples: Examples, source: str, way_out: str
) -> DataError | None:
    """Return one error for all examples that the chat template cannot render; None if it renders all."""
    problems = list(looked.refused.values())
    checked = next(iter(looked.observations.values())).of if looked.observations else len(examples)
    return bad_rows_error(problems, checked, source, way_out) if problems else None


def drop_unrenderable(examples: Examples, looked: TemplateCheckResult) -> Examples:
    """Return the examples that the template renders; the others are listed as skipped."""
    return examples.without(refusal_reasons(looked.refused))


def observe_skipped_rows(examples: Examples) -> dict[str, Observation]:
    """Return the rows skipped so far as an observation."""
    first = tuple(examples.skipped[:EXAMPLES])
    return {SKIPPED: Observation(len(examples.skipped), len(examples) + len(examples.skipped), first)}


class TimedTemplateCheck:
    """Template checks of several sources of a run within one time budget.

    Attributes:
        seen: config key of a source → the observations on its rows.
    """

    def __init__(self, tokenizer: TokenizerFacts | None, config: SureFitConfig, sources: int) -> None:
        self.seen: dict[str, Mapping[str, Observation]] = {}
        self._tokenizer, self._config = tokenizer, config
        self._sources, self._seconds = sources, SECONDS

    def at(self, examples: Examples, answers: bool = True) -> TemplateCheckResult:
        """Check the next source in its share of the remaining time."""
        start = time.monotonic()
        seconds = self._seconds / max(1, self._sources)
        result = check_template(examples, self._tokenizer, self._config, seconds, answers)
        self._seconds = max(0.0, self._seconds - (time.monotonic() - start))
        self._sources -= 1
        return result

    def problems(self, key: str, source: str, examples: Examples) -> list[SureFitError]:
        """Return the error for the rows of a source other than `data.train` that the chat template cannot render,
        unless they are to be skipped; the observations are kept in `seen`.

        Args:
            key: config key that names the source.
        """
        examples = apply_reasoning_mode(examples, self._config.data.thinking)
        result = self.at(examples, answers=not key.startswith("evaluate.extra_sets."))
        renderable = drop_unrenderable(examples, result)
        skips = self._config.data.bad_rows == "skip" and len(renderable) > 0
        self.seen[key] = {**result.observations, **(observe_skipped_rows(renderable) if skips else {})}
        problem = build_template_error(result, examples, source, SKIP_ROWS_HELP)
        if skips or problem is None:
            return []
        problem.about(key)
        return [problem]


def _with_dummy_answer(example: Example) -> Example:
    """Return the example with one supervised answer of one word."""
    turns = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in example.prompt]
    return replace(example, messages=(*turns, {"role": "assistant", "content": "surefit"}))


def _spread(count: int) -> Sequence[int]:
    return [number for first in range(STRIDE) for number in range(first, count, STRIDE)]
