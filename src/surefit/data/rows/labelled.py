"""Labelled answers: rows of one answer each and a label that says whether it is a good one, as kto reads them.

Everything here raises `DataError` with the field that is wrong; the caller adds the file and line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.data.rows.messages import is_trained_on
from surefit.task import Message, Row

PREFERENCE_COLUMNS = ("label", "kto_tag")
"""Columns in which KTO's data sets tell whether an answer is a good one: TRL's and ms-swift's, LLaMA-Factory's."""
THUMBS = ("thumbs", "thumbs_up", "thumb", "feedback", "liked", "vote")
"""Columns in which a product's logs tell it."""
LABEL_COLUMNS = (*PREFERENCE_COLUMNS, *THUMBS)
"""All of them, in the order in which they are tried."""
_PREFERRED = frozenset(["true", "chosen", "desirable"])
_NOT_PREFERRED = frozenset(["false", "rejected", "undesirable", "dispreferred"])
"""Values of a `label` that have KTO's meaning: TRL defines a bool, which a CSV file writes as text; the words have no
other meaning. A number, or a word such as bad or wrong, is as often a class."""
_GOOD = _PREFERRED | {"1", "1.0", "good", "correct", "accepted"}
_BAD = _NOT_PREFERRED | {"0", "0.0", "bad", "incorrect", "wrong"}
"""Further values that count in `kto_tag`, a column that only KTO's data sets have."""
_UP = _GOOD | {"up", "thumbs_up", "thumbs up", "thumbsup", "+1", "like", "liked", "upvote", "positive", "👍"}
_DOWN = _BAD | {"down", "thumbs_down", "thumbs down", "thumbsdown", "-1", "-1.0", "dislike", "disliked", "downvote"}
_DOWN |= {"negative", "👎"}
"""Further values that count in the columns of `THUMBS`."""


def preference_from_label(name: str, value: Any) -> bool | None:
    """Return whether a value of a `LABEL_COLUMNS` column calls an answer a good one; None where it is neither.

    >>> preference_from_label("label", False), preference_from_label("label", 0), preference_from_label("kto_tag", 0)
    (False, None, False)
    >>> preference_from_label("thumbs", "up"), preference_from_label("thumbs", "sideways")
    (True, None)
    """
    word = str(value).strip().lower()
    good, bad = {"label": (_PREFERRED, _NOT_PREFERRED), "kto_tag": (_GOOD, _BAD)}.get(name, (_UP, _DOWN))
    return word in good if word in good or word in bad else None


def label_column(columns: Sequence[str]) -> str | None:
    """Return the column with the label, or None."""
    return next((name for name in LABEL_COLUMNS if name in columns), None)


def find_verdicts(columns: Sequence[str], sample: Iterable[Row]) -> list[bool | None] | None:
    """Return the labels of some rows where they say which answers are good: most are verdicts, and not all of them
    good ones, which are rows for sft. None for other rows, such as those whose label is a class."""
    column = label_column(columns)
    verdicts = [] if column is None else [preference_from_label(column, row.get(column)) for row in sample]
    return verdicts if False in verdicts and verdicts.count(None) <= len(verdicts) / 2 else None


def read_label(row: Row, column: str) -> bool:
    """Return whether a row's answer is a desirable one.

    Raises:
        DataError: the label is missing, or no boolean.
    """
    value = row.get(column)
    if value is None:
        raise DataError(
            "missing: without a label, nothing says whether the answer is a good one",
            code="E4500",
            field=column,
            help="write true for a good answer and false for a bad one",
        )
    desirable = preference_from_label(column, value)
    if desirable is None:
        number = isinstance(value, int | float)
        how = f"write true or false: jq -c '.{column} = (.{column} == 1)' turns 1 and 0 into them" if number else ""
        raise DataError(
            f"{value!r:.60} is no boolean",
            code="E4501",
            field=column,
            help=how or "write true for a good answer and false for a bad one",
        )
    return desirable


def labelled_conversation(converted: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a converted row of one answer as a labelled one: of its turns only the last is supervised.

    Raises:
        DataError: the last answer has weight 0.
    """
    turns: list[Message] = list(converted["messages"])
    if not is_trained_on(turns[-1]):
        raise DataError(
            "the last answer has weight 0, and kto judges the last answer",
            code="E4502",
            field=field,
            help="end the conversation with the answer that the label belongs to",
        )
    prompt = [{**turn, "weight": 0} if turn["role"] == "assistant" else turn for turn in turns[:-1]]
    return {**converted, "messages": [*prompt, turns[-1]]}
