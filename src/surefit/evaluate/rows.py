"""The rows of a set, and what becomes of their answers: parsed, scored, written as one line each."""

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
    """The rows of a set that are scored: their numbers in the set, examples and places; and how many of the set have no
    answer to compare with, and are not."""

    indices: list[int]
    examples: list[Example]
    where: list[str]
    unanswered: int = 0

    def __len__(self) -> int:
        return len(self.indices)

    def subset(self, places: Sequence[int]) -> EvalRows:
        """Those at these places, with the numbers they have in the set."""
        indices, examples, where = ([values[i] for i in places] for values in (self.indices, self.examples, self.where))
        return EvalRows(indices, examples, where, self.unanswered)  # type: ignore[arg-type]


def select_eval_rows(name: str, examples: Examples, limit: int | None) -> EvalRows:
    """All rows with an answer to compare with, or `limit` of them taken evenly from the whole set.

    Raises:
        DataError: there are none.
    """
    answered = [i for i, example in enumerate(examples.examples) if example.has_answer]
    if not answered:
        why = "no rows to score" if len(examples) == 0 else "no row with an answer to compare with"
        raise DataError(
            f"the set {name!r} has {why}",
            code="E7019",
            field="data.eval" if name == "eval" else f"evaluate.extra_sets.{name}",
            help="hold out more rows, or name a file that has some",
        )
    indices = [answered[i] for i in evenly_spaced_indices(len(answered), limit)]
    chosen = [examples.examples[i] for i in indices], [examples.where[i] for i in indices]
    return EvalRows(indices, *chosen, len(examples) - len(answered))


@dataclass(frozen=True)
class GeneratedAnswer:
    """What was said to one row.

    Attributes:
        generations: one, or as many as were drawn; empty where labels were ranked.
        ranked: label → log-probability, most probable first.
    """

    generations: tuple[Generation, ...] = ()
    ranked: dict[str, float] | None = None

    @property
    def tokens(self) -> int:
        """Generated tokens; a label counts as one."""
        return sum(one.tokens for one in self.generations) if self.ranked is None else 1


def prediction_from_text(recipe: TaskRecipe, answer: Generation) -> Prediction:
    """What the recipe makes of a generated text.

    A truncated one is not parsed: half a list of calls is no answer, even where a repair would make it one.
    """
    return Prediction(answer.text, answer.truncated, None if answer.truncated else recipe.parse(answer.text))


def predictions_from_answer(recipe: TaskRecipe, example: Example, answer: GeneratedAnswer) -> list[Prediction]:
    """One per generation; of ranked labels one, whose text is the most probable label."""
    if answer.ranked is not None:
        return [Prediction(next(iter(answer.ranked)), parsed=answer.ranked)]
    return [prediction_from_text(recipe.of(example), one) for one in answer.generations]


def score_row(recipe: TaskRecipe, example: Example, found: Sequence[Prediction], samples: int) -> Scores:
    """The scores of a row: of its one prediction, or of all that were drawn."""
    if samples > 1:
        assert recipe.score_samples is not None  # `require_settings` has looked
        return recipe.score_samples(example, found)
    return recipe.score(example, found[0])


def score_rows(
    recipe: TaskRecipe, examples: Sequence[Example], found: Sequence[Sequence[Prediction]], samples: int
) -> Sequence[Scores | None]:
    """The scores of all rows, where the recipe has a way to judge many; None for those to be judged one by one."""
    if recipe.score_many is None or samples > 1:
        return [None] * len(examples)
    return recipe.score_many([(example, own[0]) for example, own in zip(examples, found, strict=True)])


def require_scorable(rows: EvalRows, recipe: TaskRecipe, samples: int) -> None:
    """Find a row without a gold answer now, not after an hour of generating.

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
    """A row's line of the predictions file, without its prompt; without a recipe it is not judged, and where its scores
    are known already, not again."""
    first = found[0]
    line: dict[str, Any] = {"index": index, "where": where, "gold": example.completion, "text": first.text}
    line |= {"truncated": first.truncated, "parsed": first.parsed}
    if samples > 1:
        line["samples"] = [{"text": p.text, "truncated": p.truncated, "parsed": p.parsed} for p in found]
    if recipe is not None:
        with errors_at(where):
            line["scores"] = scores if scores is not None else score_row(recipe, example, found, samples)
    return line
