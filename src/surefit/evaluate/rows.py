"""The rows of a set and their answers: parsed, scored, written as one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from surefit.core.errors import DataError, errors_at
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.rows.layouts import Examples
from surefit.generate.engine import Generation
from surefit.task import Example, Prediction, Scores, TaskRecipe


@dataclass(frozen=True)
class EvalRows:
    """The rows of a set that are scored: their numbers in the set, examples and places; and the number of rows without
    a gold answer, which are not scored."""

    indices: list[int]
    examples: list[Example]
    where: list[str]
    unanswered: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, places: Sequence[int]) -> EvalRows:
        """Return the rows at these positions, with their numbers in the set."""
        indices, examples, where = ([column[i] for i in places] for column in (self.indices, self.examples, self.where))
        return EvalRows(indices, examples, where, self.unanswered)  # type: ignore[arg-type]


def select_eval_rows(name: str, examples: Examples, limit: int | None) -> EvalRows:
    """Return all rows with a gold answer, or `limit` of them evenly spaced over the whole set.

    Raises:
        DataError: there are no such rows.
    """
    answered = [i for i, example in enumerate(examples.examples) if example.has_answer]
    if not answered:
        why = "no rows to score" if len(examples) == 0 else "no row with a gold answer"
        raise DataError(
            f"the set {name!r} has {why}",
            code="E7019",
            field="data.eval" if name == "eval" else f"evaluate.extra_sets.{name}",
            help="hold out more rows, or name a file with such rows",
        )
    indices = [answered[i] for i in evenly_spaced_indices(len(answered), limit)]
    examples_and_places = [examples.examples[i] for i in indices], [examples.where[i] for i in indices]
    return EvalRows(indices, *examples_and_places, len(examples) - len(answered))


@dataclass(frozen=True)
class GeneratedAnswer:
    """A model's answer to one row.

    Attributes:
        generations: one, or all samples; empty if labels were ranked.
        ranked: label → log-probability, most probable first.
    """

    generations: tuple[Generation, ...] = ()
    ranked: dict[str, float] | None = None

    @property
    def tokens(self) -> int:
        """Number of generated tokens; a ranked label counts as one."""
        return sum(generation.tokens for generation in self.generations) if self.ranked is None else 1


def prediction_from_text(recipe: TaskRecipe, answer: Generation) -> Prediction:
    """Build the prediction for a generated text, parsed by the recipe.

    A truncated text is not parsed: half a list of calls is no answer, even if it could be repaired.
    """
    return Prediction(answer.text, answer.truncated, None if answer.truncated else recipe.parse(answer.text))


def predictions_from_answer(recipe: TaskRecipe, example: Example, answer: GeneratedAnswer) -> list[Prediction]:
    """Build one prediction per generation; for ranked labels a single one with the most probable label as text."""
    if answer.ranked is not None:
        return [Prediction(next(iter(answer.ranked)), parsed=answer.ranked)]
    return [prediction_from_text(recipe.of(example), generation) for generation in answer.generations]


def score_row(recipe: TaskRecipe, example: Example, found: Sequence[Prediction], samples: int) -> Scores:
    """Score a row by its one prediction, or by all of its samples."""
    if samples > 1:
        assert recipe.score_samples is not None  # `require_evaluation_settings` has checked
        return recipe.score_samples(example, found)
    return recipe.score(example, found[0])


def score_rows(
    recipe: TaskRecipe, examples: Sequence[Example], found: Sequence[Sequence[Prediction]], samples: int
) -> Sequence[Scores | None]:
    """Return the scores of all rows, if the recipe scores rows in bulk; None for rows that must be scored one by
    one."""
    if recipe.score_many is None or samples > 1:
        return [None] * len(examples)
    return recipe.score_many(
        [(example, row_predictions[0]) for example, row_predictions in zip(examples, found, strict=True)]
    )


def require_scorable(rows: EvalRows, recipe: TaskRecipe, samples: int) -> None:
    """Raise if a row cannot be scored, such as one without a gold answer, before anything is generated.

    Raises:
        DataError: a row cannot be scored.
    """
    for example, where in zip(rows.examples, rows.where, strict=True):
        with errors_at(where):
            score_row(recipe, example, [Prediction(text="")] * samples, samples)


def build_prediction_line(
    recipe: TaskRecipe | None,
    index: int,
    where: str,
    example: Example,
    found: Sequence[Prediction],
    samples: int,
    scores: Scores | None = None,
) -> dict[str, Any]:
    """Build a row's line of the predictions file, without its prompt; it has scores if a recipe is given, computed
    unless `scores` already holds them."""
    first = found[0]
    line: dict[str, Any] = {"index": index, "where": where, "gold": example.completion, "text": first.text}
    line |= {"truncated": first.truncated, "parsed": first.parsed}
    if samples > 1:
        line["samples"] = [{"text": p.text, "truncated": p.truncated, "parsed": p.parsed} for p in found]
    if recipe is not None:
        with errors_at(where):
            line["scores"] = scores if scores is not None else score_row(recipe, example, found, samples)
    return line
