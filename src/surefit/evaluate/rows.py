"""The rows of a set and their answers: parsed, scored, written as one line each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from surefit.core.errors import DataError, errors_at
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.sampling import evenly_spaced
from surefit.data.rows.layouts import Examples
from surefit.task import Example, Prediction, Scores, TaskRecipe

if TYPE_CHECKING:
    from surefit.generate.engine import Generation


@dataclass(frozen=True)
class EvalRows:
    """The rows of a set that are scored: their numbers in the set, examples and places; and the number of rows without
    a gold answer, which are not scored.

    Attributes:
        others: for each row another one's example, behind whose prompt the row's answer is read as well; empty where no
            likelihoods are read.
    """

    indices: list[int]
    examples: list[Example]
    where: list[str]
    unanswered: int = 0
    others: tuple[Example | None, ...] = ()

    def __len__(self) -> int:
        return len(self.indices)

    @classmethod
    def select(cls, examples: Examples, indices: Sequence[int], unanswered: int = 0) -> EvalRows:
        """Return the rows with these numbers."""
        columns = [examples.examples[i] for i in indices], [examples.where[i] for i in indices]
        return cls(list(indices), *columns, unanswered)

    def subset(self, places: Sequence[int]) -> EvalRows:
        """Return the rows at these positions, with their numbers in the set."""
        indices, examples, where = ([column[i] for i in places] for column in (self.indices, self.examples, self.where))
        others = tuple(self.others[i] for i in places) if self.others else ()
        return EvalRows(indices, examples, where, self.unanswered, others)  # type: ignore[arg-type]


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
    return EvalRows.select(examples, evenly_spaced(answered, limit), len(examples) - len(answered))


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


RowPrediction = Prediction | Sequence[Prediction]
"""The prediction for a row, or all of its samples."""


def prediction_from_text(recipe: TaskRecipe, text: str, truncated: bool) -> Prediction:
    """Build the prediction for a text, parsed by the recipe.

    A truncated text is not parsed: half a list of calls is no answer, even if it could be repaired.
    """
    return Prediction(text, truncated, None if truncated else recipe.parse(text))


def predictions_from_answers(
    recipe: TaskRecipe, rows: EvalRows, answers: Sequence[GeneratedAnswer]
) -> list[RowPrediction]:
    """Build each row's prediction; for ranked labels the text is the most probable label."""
    predictions: list[RowPrediction] = []
    for example, where, answer in zip(rows.examples, rows.where, answers, strict=True):
        with errors_at(where):
            if answer.ranked is not None:
                predictions.append(Prediction(next(iter(answer.ranked)), parsed=answer.ranked))
                continue
            part = recipe.of(example)
            samples = [prediction_from_text(part, output.text, output.truncated) for output in answer.generations]
            predictions.append(samples if len(samples) > 1 else samples[0])
    return predictions


def predict_baseline(recipe: TaskRecipe, rows: EvalRows, name: str) -> list[Prediction]:
    """Return a baseline's prediction for each row, parsed by the recipe if the baseline has not parsed it."""
    predictions = []
    for example, where in zip(rows.examples, rows.where, strict=True):
        with errors_at(where):
            answer = recipe.baselines[name](example)
            predictions.append(
                answer if answer.parsed is not None else replace(answer, parsed=recipe.parse(answer.text))
            )
    return predictions


def row_samples(answer: RowPrediction) -> Sequence[Prediction]:
    """Return all predictions for a row."""
    return [answer] if isinstance(answer, Prediction) else answer


def score_row(recipe: TaskRecipe, example: Example, answer: RowPrediction) -> Scores:
    """Score a row by its one prediction, or by all of its samples."""
    if isinstance(answer, Prediction):
        return recipe.score(example, answer)
    assert recipe.score_samples is not None  # `require_evaluation_settings` and `score_files` have checked
    return recipe.score_samples(example, answer)


def score_rows(
    recipe: TaskRecipe, rows: EvalRows, answers: Sequence[RowPrediction], on_progress: OnProgress = ignore_progress
) -> list[Scores]:
    """Score every row: in bulk if the recipe can and no row has samples, otherwise one after the other.

    Args:
        on_progress: called with the number of rows done.

    Raises:
        DataError: a row cannot be scored.
    """
    pairs = [
        (example, answer)
        for example, answer in zip(rows.examples, answers, strict=True)
        if isinstance(answer, Prediction)
    ]
    if recipe.score_many is not None and 0 < len(pairs) == len(rows):
        return list(recipe.score_many(pairs))
    scores = []
    for done, (example, where, answer) in enumerate(zip(rows.examples, rows.where, answers, strict=True)):
        on_progress(done, len(rows), "")
        with errors_at(where):
            scores.append(score_row(recipe, example, answer))
    return scores


def require_scorable(rows: EvalRows, recipe: TaskRecipe, samples: int) -> None:
    """Raise if a row cannot be scored, such as one without a gold answer, before anything is generated.

    Raises:
        DataError: a row cannot be scored.
    """
    empty = Prediction(text="")
    for example, where in zip(rows.examples, rows.where, strict=True):
        with errors_at(where):
            score_row(recipe, example, [empty] * samples if samples > 1 else empty)


def build_prediction_line(
    rows: EvalRows, place: int, answer: RowPrediction, scores: Scores | None, **shown: str | None
) -> dict[str, Any]:
    """Build a row's line of the predictions file.

    Args:
        place: position of the row in `rows`.
        scores: None for a row that is not scored.
        shown: further columns, which come before the gold answer.
    """
    line: dict[str, Any] = {"index": rows.indices[place], "where": rows.where[place], **shown}
    line["gold"] = rows.examples[place].completion
    if (rejected := rows.examples[place].rejected_text) is not None:
        line["rejected"] = rejected
    samples = [{"text": p.text, "truncated": p.truncated, "parsed": p.parsed} for p in row_samples(answer)]
    line |= samples[0]
    if not isinstance(answer, Prediction):
        line["samples"] = samples
    return line if scores is None else line | {"scores": scores}
