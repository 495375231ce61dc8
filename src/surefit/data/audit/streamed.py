"""A source's rows streamed from their files in each pass of an audit, never all in memory."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from surefit.core.sampling import evenly_spaced, stream_evenly_spaced
from surefit.data.audit.sample import SAMPLE
from surefit.data.read.load import Rows, files_sha256, rows_sha256
from surefit.data.read.readers import RowWithPlace
from surefit.data.read.sources import resolve_source
from surefit.data.read.stream import file_errors, read_range, split_into_ranges


class StreamedRows:
    """The rows of a source, counted.

    Attributes:
        source: as the user wrote it.
        files: the local files that hold the rows.
        sha256: as `Rows.sha256`.
        columns: every column that any row has, in the order of their first appearance.
    """

    def __init__(self, source: str, split: str = "train", limit: int | None = None) -> None:
        """Read all rows once.

        Args:
            source: a file, a directory, a pattern, a URL, a surefit/… sample or a hub id.
            split: split of a hub data set or a saved `DatasetDict`.
            limit: number of rows to use, spread evenly; None uses all.

        Raises:
            DataError, MachineError: as `split_into_ranges` and `read_range`.
        """
        self.source = source
        self._parts = split_into_ranges(source, split=split, range_bytes=sys.maxsize)
        remote = resolve_source(source).kind in ("hub", "url")
        self.files = () if remote else tuple(Path(part.file) for part in self._parts)
        total = sum(1 for _ in self._every()) if limit is not None else 0
        self._chosen = (total, limit) if limit is not None and limit < total else None
        self._count = 0
        self._few: list[RowWithPlace] = []
        columns: dict[str, None] = {}
        rows = self._counted(columns)
        with file_errors(source):
            if remote:
                self.sha256 = rows_sha256(rows)
            else:
                deque(rows, maxlen=0)
                self.sha256 = files_sha256(self.files)
        self.columns = list(columns)

    def _counted(self, columns: dict[str, None]) -> Iterator[RowWithPlace]:
        """Yield the rows, count them on the way, and collect their columns and a few sample rows."""
        stride = 1
        for placed_row in self.placed():
            columns |= dict.fromkeys(placed_row.row)
            if self._count % stride == 0:
                self._few.append(placed_row)
                if len(self._few) > 2 * SAMPLE:
                    self._few, stride = self._few[::2], 2 * stride
            self._count += 1
            yield placed_row

    def __len__(self) -> int:
        return self._count

    def placed(self) -> Iterator[RowWithPlace]:
        """Iterate over the rows in order, with their places."""
        return self._every() if self._chosen is None else stream_evenly_spaced(self._every(), *self._chosen)

    def _every(self) -> Iterator[RowWithPlace]:
        return itertools.chain.from_iterable(map(read_range, self._parts))

    def sample(self, limit: int) -> Rows:
        """Return up to `limit` rows, spread evenly; a few are kept in memory, for more the files are read again."""
        if limit <= SAMPLE or self._count <= len(self._few):
            chosen = evenly_spaced(self._few, limit)
        else:
            chosen = list(stream_evenly_spaced(self.placed(), self._count, limit))
        return Rows(self.source, chosen, self.files, self.sha256)
