"""Facts about a data set, from an even sample of its rows: enough for rules that must run in two seconds."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from surefit.core.sampling import evenly_spaced_indices
from surefit.core.units import truncate_text

SAMPLE = 500
TARGETS = ("answers", "answer", "completion", "output", "response", "target", "label", "summary", "graph", "solution")
"""Columns that hold the answers, in the order they are looked for."""
GENERAL = (
    (("messages",), "messages"),
    (("conversations",), "conversations"),
    (("contents",), "contents"),
    (("prompt", "completion"), "completion"),
    (("instruction", "output"), "output"),
    (("text",), None),
    (("input_ids",), None),
)
"""The columns of each general layout (`data.rows.layouts.LAYOUTS`, in its order), and the one with the answers; other
columns of such rows are not trained on."""
ANSWERING = ("assistant", "gpt", "chatgpt", "model", "function_call")
"""The roles and speakers of an assistant's turns, in all layouts."""
SMALL_EVALUATION = 10
"""Held-out rows below which a score says next to nothing."""
HELD_OUT_SHARES = (0.1, 0.2)
"""Shares of the rows that are proposed to be held out."""


def enough_share(rows: int) -> float | None:
    """Return the smallest of `HELD_OUT_SHARES` that holds out enough of these rows; None where none does.

    >>> enough_share(2_000), enough_share(60), enough_share(30)
    (0.1, 0.2, None)
    """
    return next((share for share in HELD_OUT_SHARES if round(share * rows) >= SMALL_EVALUATION), None)


@dataclass(frozen=True)
class ColumnFacts:
    """One column in the sample: rows that have it, and how many of them are null, or blank (only white space)."""

    present: int
    null: int
    blank: int


@dataclass(frozen=True)
class DatasetFacts:
    """Counts, columns and target of a data set.

    Attributes:
        source: the data set as the user wrote it.
        rows: number of all rows.
        epoch_rows: rows of one epoch: these, and those that `data.mix` adds; None where not all are counted.
        divided: rows that a share `data.eval` is held out of; None likewise.
        sample: rows that were examined.
        columns: column → its counts in the sample, most frequent first.
        target: the column that holds the answers; in a conversation ("messages") the last assistant turn is meant. None
            where no such column is known.
        target_null: sampled rows whose target is null or missing.
        target_blank: sampled rows whose target is empty.
        target_distinct: different targets in the sample, null included.
        target_example: the most frequent target, shortened.
        target_lengths: characters of each sampled target that is text or JSON, runs of white space counted as one.
        first_bad: where the first row with a null or blank target is, as file:line where that is known.
        duplicates: sampled rows that repeat an earlier sampled row.
    """

    source: str
    rows: int
    epoch_rows: int | None
    divided: int | None
    sample: int
    columns: dict[str, ColumnFacts]
    target: str | None
    target_null: int
    target_blank: int
    target_distinct: int
    target_example: str
    first_bad: str | None
    duplicates: int
    target_lengths: tuple[int, ...] = ()


def dataset_facts(
    source: str,
    rows: Sequence[Mapping[str, Any]],
    where: Callable[[int], str] | None = None,
    limit: int = SAMPLE,
    expected: Sequence[str] | None = (),
) -> DatasetFacts:
    """Summarize up to `limit` rows, spread evenly.

    Args:
        source: the data set's name.
        rows: any sequence; only the sampled rows are read.
        where: row number → "file:line".
        limit: number of rows to sample.
        expected: the recipe's columns: the target is looked for among them first. None where each row has the columns
            of one task of several: then no column is every row's target, and each task raises on its own empty answers.
    """
    count = len(rows)
    numbers = evenly_spaced_indices(count, limit)
    sample = [rows[n] for n in numbers]
    target = target_column(sample, expected) if expected is not None else None
    answers = [target_value(row, target) for row in sample] if target else []
    texts = Counter(_text(answer) for answer in answers)
    bad_rows = [n for n, answer in zip(numbers, answers, strict=False) if is_null(answer) or is_blank(answer)]
    return DatasetFacts(
        source=source,
        rows=count,
        epoch_rows=count,
        divided=count,
        sample=len(sample),
        columns=_columns(sample),
        target=target,
        target_null=sum(is_null(answer) for answer in answers),
        target_blank=sum(is_blank(answer) for answer in answers),
        target_distinct=len(texts),
        target_example=truncate_text(texts.most_common(1)[0][0]) if texts else "",
        first_bad=(where(bad_rows[0]) if where else f"row {bad_rows[0] + 1}") if bad_rows else None,
        duplicates=len(sample) - len({_text(row) for row in sample}),
        target_lengths=tuple(len(" ".join(_text(answer).split())) for answer in answers if not is_null(answer)),
    )


def _columns(sample: Sequence[Mapping[str, Any]]) -> dict[str, ColumnFacts]:
    present: Counter[str] = Counter()
    null: Counter[str] = Counter()
    blank: Counter[str] = Counter()
    for row in sample:
        for name, value in row.items():
            present[name] += 1
            null[name] += is_null(value)
            blank[name] += is_blank(value)
    return {name: ColumnFacts(n, null[name], blank[name]) for name, n in present.most_common()}


def target_column(sample: Sequence[Mapping[str, Any]], expected: Sequence[str]) -> str | None:
    """Return the column that holds the answers: the layout's, or one of a recipe's own columns (`expected`); None where
    no such column is known."""
    present = {name for row in sample for name in row}
    for columns, target in () if expected else GENERAL:
        if present.issuperset(columns):
            return target
    candidates = [name for name in TARGETS if name in expected] or list(TARGETS)
    return next((name for name in candidates if name in present), None)


def target_value(row: Mapping[str, Any], target: str) -> Any:
    """Return a row's answer: the target column, or the content or calls of the conversation's last assistant turn."""
    value = row.get(target)
    if target not in ("messages", "conversations", "contents") or not isinstance(value, list):
        return value
    for turn in reversed(value):
        if isinstance(turn, Mapping) and turn.get("role", turn.get("from")) in ANSWERING:
            contents = (turn.get(name) for name in ("content", "tool_calls", "function_call", "value", "parts"))
            return next((content for content in contents if content), "")
    return None


def is_null(value: Any) -> bool:
    """Return whether there is no value. The text "None" is one: a label, or damage that AUD028 names."""
    return value is None


def is_blank(value: Any) -> bool:
    """Return whether a text is empty or only white space. An empty list is an answer: "no tool fits"."""
    return isinstance(value, str) and not value.strip()


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, ensure_ascii=False, default=str)
