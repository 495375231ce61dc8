"""A source's rows as an audit goes through them: from their files each time, never all in memory."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

from surefit.core.sampling import evenly_spaced_indices
from surefit.data.audit.sample import SAMPLE
from surefit.data.read.load import Rows, files_sha256, rows_sha256
from surefit.data.read.readers import RowWithPlace
from surefit.data.read.sources import resolve_source
from surefit.data.read.stream import file_errors, read_range, split_into_ranges


class StreamedRows:
    """The rows of a source, counted.

    Attributes:
        source: as the user wrote it.
        files: the files of this machine that they are read from.
        sha256: as that of `Rows`.
        columns: every column that any row has, in the order of their first appearance.
    """

    def __init__(self, source: str, split: str = "train", limit: int | None = None) -> None:
        """Read all rows once.

        Args:
            source: a file, a directory, a pattern, a URL, a surefit/… sample or a hub id.
            split: of a hub data set or a saved `DatasetDict`.
            limit: of all rows take so many, spread evenly.

        Raises:
            DataError, MachineError: as `split_into_ranges` and `read_range`.
        """
        self.source = source
        self._parts = split_into_ranges(source, split=split, range_bytes=sys.maxsize)
        remote = resolve_source(source).kind in ("hub", "url")
        self.files = () if remote else tuple(Path(one.file) for one in self._parts)
        every = sum(1 for _ in self._every()) if limit is not None else 0
        self._chosen = (limit, every) if limit is not None and limit < every else None
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
        """The rows, which are counted on the way; their columns, and some of them, are noted."""
        stride = 1
        for found in self.placed():
            columns |= dict.fromkeys(found.row)
            if self._count % stride == 0:
                self._few.append(found)
                if len(self._few) > 2 * SAMPLE:
                    self._few, stride = self._few[::2], 2 * stride
            self._count += 1
            yield found

    def __len__(self) -> int:
        return self._count

    def placed(self) -> Iterator[RowWithPlace]:
        """The rows in order, with their places."""
        return self._every() if self._chosen is None else _spread(self._every(), *self._chosen)

    def _every(self) -> Iterator[RowWithPlace]:
        return itertools.chain.from_iterable(map(read_range, self._parts))

    def sample(self, limit: int) -> Rows:
        """Up to `limit` rows, spread evenly; a few are at hand, for more the files are read again."""
        if limit <= SAMPLE or self._count <= len(self._few):
            chosen = [self._few[place] for place in evenly_spaced_indices(len(self._few), limit)]
        else:
            wanted = set(evenly_spaced_indices(self._count, limit))
            chosen = [found for number, found in enumerate(self.placed()) if number in wanted]
        return Rows(self.source, chosen, self.files, self.sha256)


def _spread(rows: Iterator[RowWithPlace], limit: int, count: int) -> Iterator[RowWithPlace]:
    """`limit` of `count` rows, as `evenly_spaced_indices` chooses them."""
    taken = 0
    for number, found in enumerate(rows):
        if number == taken * count // limit:
            yield found
            taken += 1
            if taken == limit:
                return
