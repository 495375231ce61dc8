"""Rows in memory, for data that fits into it: read like `stream_rows` reads them, and kept.

Nothing here needs torch or transformers; `pyarrow` and `datasets` are loaded only for formats that need them.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol, overload

from surefit.core.errors import DataError
from surefit.core.rundir import file_sha256
from surefit.core.sampling import evenly_spaced_indices
from surefit.core.units import bytes_text
from surefit.data.read.columnar import ROW_COST, VALUE_COST, require_no_bomb, require_room
from surefit.data.read.file_io import file_extensions
from surefit.data.read.readers import TOO_MANY, RowWithPlace, available_row_bytes, count_characters
from surefit.data.read.sources import resolve_source
from surefit.data.read.stream import RowRange, file_errors, read_range, require_unchanged, split_into_ranges

FEWEST = 10
"""Rows that a sample has at least, however long they are."""


class Rows(Sequence[dict[str, Any]]):
    """Rows in memory that know the place they were read from.

    Attributes:
        source: as the user wrote it.
        files: the files they were read from; empty for the hub.
        sha256: hash of the files' bytes (for a single file: the output of `sha256sum`), or of the hub's rows.
        total: rows that the source has: more than are in memory where only some were read.
        estimated: the total in words, with its error, where it is not counted.
        conversions: what single rows were converted to (`data.rows.layouts.row_conversion`); samples of the rows share
            it.
    """

    def __init__(
        self,
        source: str,
        placed: Sequence[RowWithPlace],
        files: Sequence[Path],
        sha256: str,
        total: int | None = None,
        estimated: str = "",
        conversions: dict[Any, Any] | None = None,
    ) -> None:
        self.source = source
        self.files = tuple(files)
        self.sha256 = sha256
        self.total = len(placed) if total is None else total
        self.estimated = estimated
        self.conversions = {} if conversions is None else conversions
        self._placed = placed

    def __len__(self) -> int:
        return len(self._placed)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [placed.row for placed in self._placed[index]]
        return self._placed[index].row

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return (placed.row for placed in self._placed)

    def placed(self) -> Iterator[RowWithPlace]:
        """Iterate over the rows in order, with their places."""
        return iter(self._placed)

    def sample(self, limit: int, text: int | None = None) -> Rows:
        """Return up to `limit` rows, spread evenly, that still know their place.

        Args:
            text: approximate maximum of their characters together; `FEWEST` rows are included in any case.
        """
        chosen = evenly_spaced_indices(len(self), limit)
        if text is not None and (characters := sum(count_characters(self.row(n)) for n in chosen)) > text:
            limit = max(FEWEST, len(chosen) * text // characters)
            chosen = evenly_spaced_indices(len(self), limit)
        placed = [self._placed[n] for n in chosen]
        total = min(limit, self.total)
        return Rows(self.source, placed, self.files, self.sha256, total, self.estimated, self.conversions)

    def chosen(self, numbers: Iterable[int]) -> Rows:
        """Return the rows with these numbers, which still know their place."""
        placed = [self._placed[n] for n in numbers]
        return Rows(self.source, placed, self.files, self.sha256, conversions=self.conversions)

    def at(self, number: int) -> RowWithPlace:
        """Return one row with its place."""
        return self._placed[number]

    def row(self, number: int) -> dict[str, Any]:
        """Return one row."""
        return self._placed[number].row

    def place(self, index: int) -> tuple[str, int | None]:
        """Return (file, 1-based line), or ("file row N", None) where rows have no lines."""
        return self._placed[index].path, self._placed[index].line

    def where(self, index: int) -> str:
        """Return `file:line`, or `file row N`."""
        path, line = self.place(index)
        return path if line is None else f"{path}:{line}"

    @property
    def columns(self) -> list[str]:
        """Columns that any row has, in the order of their first appearance."""
        return list(dict.fromkeys(name for row in self for name in row))


class HasSha256(Protocol):
    """Rows that are identified by their hash."""

    sha256: str


def load_rows(source: str, *, split: str = "train") -> Rows:
    """Read every row into memory; `stream_rows` reads data that does not fit.

    Args:
        source: a file, a directory, a pattern, a URL, a surefit/… sample or a hub id.
        split: split of a hub data set or a saved `DatasetDict`, unless the name contains it.

    Raises:
        DataError: missing, empty, malformed (with file, line and column), or more than there is memory for.
        MachineError: it cannot be reached.
    """
    parts = split_into_ranges(source, split=split, range_bytes=sys.maxsize)
    names = [part.file for part in parts]
    with require_unchanged(names):
        placed = _kept(parts)
        if resolve_source(source).kind in ("hub", "url"):
            return Rows(source, placed, (), rows_sha256(placed))
        files = [Path(name) for name in names]
        with file_errors(source):
            return Rows(source, placed, files, files_sha256(files))


def _kept(parts: Sequence[RowRange]) -> list[RowWithPlace]:
    """Read the rows of these ranges into memory; raises if they do not fit."""
    for part in parts:
        needed = None
        if file_extensions(part.file) in ((".parquet", ""), (".arrow", "")) and os.path.isfile(part.file):
            needed = require_no_bomb(part.file, os.path.getsize(part.file))
        if file_extensions(part.file) == (".parquet", ""):
            require_room(part.file, needed)
    placed: list[RowWithPlace] = []
    used, limit = 0, available_row_bytes()
    for part in parts:
        for placed_row in read_range(part):
            placed.append(placed_row)
            used += ROW_COST + VALUE_COST * len(placed_row.row) + count_characters(placed_row.row)
            if used > limit:
                raise DataError(
                    f"its first {len(placed):,} rows take {bytes_text(used)} of memory, and no more is available",
                    code="E4048",
                    path=placed_row.path,
                    line=placed_row.line,
                    help=TOO_MANY,
                )
    return placed


def require_distinct_rows(rows: HasSha256, train: HasSha256 | None, source: str) -> None:
    """Raise if the evaluation rows are the training rows.

    Raises:
        DataError: the rows to be scored on are the training rows.
    """
    if train is not None and rows.sha256 == train.sha256:
        help_text = "name other rows, or a share such as 0.02 to set aside"
        raise DataError("the same rows as data.train", code="E4049", path=source, field="data.eval", help=help_text)


def files_sha256(files: Sequence[Path]) -> str:
    """Return the hash of a single file, as `sha256sum` prints it; for several the hash of their hashes."""
    digests = [file_sha256(file) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("\n".join(digests).encode()).hexdigest()


def rows_sha256(placed: Iterable[RowWithPlace]) -> str:
    """Return the hash of rows that are not in a local file."""
    digest = hashlib.sha256()
    for placed_row in placed:
        digest.update(json.dumps(placed_row.row, default=str).encode() + b"\n")
    return digest.hexdigest()
