"""The sample of a source's rows that checks and plans convert to examples."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefit.config.schema import DataSection
    from surefit.data.read.load import Rows
    from surefit.data.rows.layouts import Examples
    from surefit.task import TaskRecipe

SAMPLED_ROWS, SAMPLED_TEXT = 500, 6_000_000
"""Limits of the rows, and of their characters, that are converted: enough to find a systematic error in a small part of
a check's two seconds.
"""


def sample_rows(rows: Rows, share: float = 1.0, text: int = SAMPLED_TEXT) -> Rows:
    """Return the sample of the rows, evenly spaced; `share` is the part of the sample that this source has."""
    return rows.sample(max(1, round(SAMPLED_ROWS * share)), text)


def sample_examples(rows: Rows, recipe: TaskRecipe, section: DataSection) -> Examples:
    """Convert a sample of the rows to examples.

    Raises:
        DataError: a row cannot be converted, and `data.bad_rows` does not skip it.
    """
    from surefit.data.rows.layouts import to_examples

    return to_examples(sample_rows(rows), recipe, section.format, section.bad_rows)
