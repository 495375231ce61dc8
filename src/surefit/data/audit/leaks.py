"""Evaluation rows whose prompt is also in the training rows, found in the time that `surefit check` has."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from surefit.core.errors import SureFitError
from surefit.core.sampling import evenly_spaced_indices
from surefit.data.audit.sample import DetectorTally
from surefit.data.rows.layouts import row_conversion
from surefit.facts.audit import Observation
from surefit.facts.dataset import GENERAL
from surefit.task import Example, Row, TaskRecipe

if TYPE_CHECKING:
    from surefit.data.read.load import Rows
    from surefit.data.read.readers import RowWithPlace

LEAK = "leak_exact"
"""Observation: the prompt of an evaluation row is also the prompt of a training row."""
SCORED_ROWS = 1_000
"""Rows of the evaluation sets that are converted, spread evenly over each set."""
TRAINING_ROWS = 2_000
"""Training rows that are converted: rows whose prompt has the same first text as an evaluation row's prompt; where
there are more, the first ones."""


def find_leaks(train: Rows, scored: Mapping[str, Rows], recipe: TaskRecipe, fmt: str) -> Observation | None:
    """Compare the prompts of evaluation rows with the prompts of the training rows, as AUD001 does with all of them.

    Rows are converted only where the first text of their prompt is the same. Sources that were not read whole are left
    out.

    Returns:
        None where nothing was compared.
    """
    sets = {key: rows for key, rows in scored.items() if rows.total == len(rows)}
    if train.total > len(train) or not sets or recipe.parts:
        return None
    scored_prompts: dict[str, list[tuple[str, str]]] = defaultdict(list)
    starts: set[str | None] = set()
    compared = dict.fromkeys(sets, 0)
    for key, rows in sets.items():
        convert, start = _reader(rows, recipe, fmt)
        for number in evenly_spaced_indices(len(rows), max(1, SCORED_ROWS // len(sets))):
            if example := convert(rows.at(number)):
                scored_prompts[prompt_text(example)].append((key, rows.where(number)))
                starts.add(start(rows[number]))
                compared[key] += 1
    if len(scored_prompts) == 1 and sum(compared.values()) > 1:  # rows that all have one prompt differ in their answers
        return None
    training_rows = dict(_find_prompts(train, scored_prompts, starts, recipe, fmt))
    leaked = [(key, where, row) for prompt, row in training_rows.items() for key, where in scored_prompts[prompt]]
    tally = DetectorTally()
    for number, (_, _, row) in enumerate(leaked):
        tally.add(LEAK, number, f"the prompt of {train.where(row)}")
    detail = "; ".join(
        f"{key}: {sum(set_key == key for set_key, _, _ in leaked):,} the same, of {count:,}"
        for key, count in compared.items()
    )
    return tally.observation(LEAK, sum(compared.values()), lambda number: leaked[number][1], detail)


def _find_prompts(
    train: Rows, wanted: Mapping[str, Any], starts: set[str | None], recipe: TaskRecipe, fmt: str
) -> Iterator[tuple[str, int]]:
    """Yield the wanted prompts that training rows have, each with the number of the first such row."""
    convert, start = _reader(train, recipe, fmt)
    missing_prompts, rows_left = set(wanted), TRAINING_ROWS
    everything = None in starts
    for number, placed in enumerate(train.placed()):
        if not everything and (first := start(placed.row)) is not None and first not in starts:
            continue
        if not rows_left or not missing_prompts:
            return
        rows_left -= 1
        example = convert(placed)
        if example and (prompt := prompt_text(example)) in missing_prompts:
            missing_prompts.remove(prompt)
            yield prompt, number


def prompt_text(example: Example) -> str:
    """Return the whole model input of an example as one JSON text."""
    prompt: list[Any] = [example.text] if example.text is not None else [example.prompt, example.tools]
    return json.dumps(prompt, sort_keys=True, ensure_ascii=False, default=str)


def _reader(
    rows: Rows, recipe: TaskRecipe, fmt: str
) -> tuple[Callable[[RowWithPlace], Example | None], Callable[[Row], str | None]]:
    """Return (row → example, or None for a row that cannot be converted; row → first text of its prompt, or None)."""
    names = rows.columns
    try:
        conversion = row_conversion(rows, recipe, fmt)
    except SureFitError:
        return lambda row: None, lambda row: None
    general_columns = (columns for columns, _ in GENERAL if all(name in names for name in columns))
    column = next(iter(recipe.columns_in(names) or next(general_columns, ())), "")

    def example(placed: RowWithPlace) -> Example | None:
        try:
            return conversion.example(placed, keep=True)
        except SureFitError:
            return None

    return example, lambda row: _first_text(row, column)


def _first_text(row: Row, column: str) -> str | None:
    """Return the first text of a prompt after the system message, stripped; None where the layout holds it in another
    way."""
    value = row.get(column)
    if isinstance(value, list):
        value = _first_said(value)
    elif column == "instruction":
        if row.get("history"):
            return None
        parts = (value, row.get("input", row.get("context")))
        value = "\n\n".join(part for part in parts if isinstance(part, str) and part.strip())
    return value.strip() if isinstance(value, str) else None


def _first_said(turns: list[Any]) -> Any:
    for turn in turns:
        if not isinstance(turn, dict):
            return None
        if turn.get("role", turn.get("from")) not in ("system", "developer"):
            return turn.get("content", turn.get("value"))
    return None
