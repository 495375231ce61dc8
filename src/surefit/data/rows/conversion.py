"""Conversion of rows to examples, each row once: samples of the same rows share what was converted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from surefit.core.errors import DataError
from surefit.task import Example, Row, TaskRecipe

if TYPE_CHECKING:
    from surefit.data.read.readers import RowWithPlace

REMEMBERED_ROWS = 2_000
"""Rows converted at once up to which their examples are kept, so that a large source is never in memory twice."""


class RecordingRow(dict[str, Any]):
    """A row that records which of its columns are read; iterating over all of them does not count.

    It is a dict, so an example may hold it like any row.
    """

    def __init__(self, row: Row) -> None:
        super().__init__(row)
        self.columns_read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.columns_read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.columns_read.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.columns_read.add(name)
        return super().pop(name, *default)

    def __iter__(self) -> Iterator[str]:  # otherwise `{**row}` would copy the row without reading its columns
        return super().__iter__()

    def copy(self) -> dict[str, Any]:
        return {**self}

    def __or__(self, other: Any) -> Any:
        return {**self} | other

    def __ror__(self, other: Any) -> Any:
        return other | {**self}


class ConvertedRow(NamedTuple):
    """A row's example, or the error of converting it, and the columns that were read for it."""

    placed: RowWithPlace
    result: Example | DataError
    columns_read: frozenset[str]


class RowConversion:
    """Converts the rows of a source, and keeps the examples of the rows that are converted in small numbers.

    Attributes:
        recipe: the task, held so that no other recipe has its `id`.
    """

    def __init__(self, recipe: TaskRecipe, convert: Callable[[Row], Example]) -> None:
        self.recipe = recipe
        self._convert = convert
        self._rows: dict[int, ConvertedRow] = {}

    def example(self, placed: RowWithPlace, *, keep: bool) -> Example:
        """Return the example of a row.

        Args:
            keep: keep it for the next call.

        Raises:
            DataError: the row cannot be used.
        """
        converted = self._rows.get(id(placed))
        if converted is None and not keep:
            return self._convert(placed.row)
        converted = converted or self.converted(placed)
        if isinstance(converted.result, DataError):
            raise copy(converted.result)
        return converted.result

    def converted(self, placed: RowWithPlace) -> ConvertedRow:
        """Convert a row, and keep the result."""
        converted = self._rows.get(id(placed))
        if converted is None:
            row = RecordingRow(placed.row)
            try:
                result: Example | DataError = self._convert(row)
            except DataError as error:
                result = copy(error)  # without the traceback, which holds the rows
            converted = ConvertedRow(placed, result, frozenset(row.columns_read))
            self._rows[id(placed)] = converted  # it holds the row, so no other has this id
        return converted
