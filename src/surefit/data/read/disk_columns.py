"""Columns on disk with an entry for each row: the values that an audit compares between rows, for any number of rows.

Memory holds the entries of `ROWS_AT_ONCE` rows, and for more than `BUCKETS` times as many rows the entries of one row
in `BUCKETS`.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from surefit.core.errors import MachineError
from surefit.core.rundir import is_full
from surefit.core.units import KIB, MIB
from surefit.data.audit.near_duplicates import BANDS, Hashes
from surefit.data.read.readers import RowWithPlace

ROWS_AT_ONCE = 100_000
"""Entries of one column that are sorted at a time."""
BUCKETS = 128
"""Files that one column is divided among at most: all are open during that time."""
BLOCK = 65_536
"""Entries that are read at a time."""


class Column:
    """Values of one type; appended in order, read in blocks."""

    def __init__(self, path: Path, dtype: npt.DTypeLike) -> None:
        self.dtype = np.dtype(dtype)
        self._file = open(path, "w+b", buffering=MIB)  # noqa: SIM115  # closed with its spool
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def append(self, values: npt.ArrayLike) -> None:
        """Add values at the end."""
        array = np.ascontiguousarray(values, self.dtype)
        self._file.write(array.tobytes())
        self._count += len(array)

    def read(self, start: int, stop: int) -> npt.NDArray[Any]:
        """Return entries `start` to `stop`."""
        self._file.flush()
        size = self.dtype.itemsize
        return np.frombuffer(os.pread(self._file.fileno(), (stop - start) * size, start * size), self.dtype)

    def blocks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """Yield (number of its first entry, block), in order."""
        for start in range(0, len(self), BLOCK):
            yield start, self.read(start, min(start + BLOCK, len(self)))

    def parts(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield (numbers, values) of all entries, equal values together in one part; for values that are hashes."""
        count = min(BUCKETS, -(-len(self) // ROWS_AT_ONCE))
        if count <= 1:
            yield from ((np.arange(len(self)), self.read(0, len(self))) for _ in range(count))
            return
        with Buckets(self._file.name, count, self.dtype) as buckets:
            for start, block in self.blocks():
                buckets.add(_halves(block) % np.uint64(count), np.arange(start, start + len(block)), block)
            yield from buckets

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _halves(values: npt.NDArray[Any]) -> Hashes:
    """Return the first eight bytes of each hash."""
    width = values.dtype.itemsize // 8
    return np.ascontiguousarray(values).view(np.uint64).reshape(-1, width)[:, 0]


class Buckets:
    """Pairs of a number and a value, divided among files; each file is read back whole, in the order of its pairs."""

    def __init__(self, path: str | Path, count: int, dtype: npt.DTypeLike) -> None:
        self._dtype = np.dtype([("number", np.int64), ("value", dtype)])
        self._files = [open(f"{path}.{n}", "w+b", buffering=64 * KIB) for n in range(count)]  # noqa: SIM115

    def __enter__(self) -> Buckets:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            with suppress(OSError):
                os.unlink(file.name)
                file.close()

    def add(self, bucket: npt.NDArray[Any], numbers: npt.NDArray[np.int64], values: npt.NDArray[Any]) -> None:
        """Add pairs, each to the bucket with its number."""
        order = np.argsort(bucket, kind="stable")
        pairs = np.empty(len(order), self._dtype)
        pairs["number"], pairs["value"] = numbers[order], values[order]
        ends = np.searchsorted(bucket[order], np.arange(len(self._files) + 1, dtype=bucket.dtype))
        for n in np.flatnonzero(np.diff(ends)).tolist():
            self._files[n].write(pairs[ends[n] : ends[n + 1]].tobytes())

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[Any]]]:
        """Yield (numbers, values) of each bucket."""
        for file in self._files:
            file.seek(0)
            pairs = np.frombuffer(file.read(), self._dtype)
            yield np.ascontiguousarray(pairs["number"]), np.ascontiguousarray(pairs["value"])


class Ordered:
    """Pairs of a row's number and a value, added in any order and read in the order of the rows, a stretch at a time.

    Attributes:
        stretch: rows that are read at a time.
    """

    def __init__(self, path: Path, rows: int) -> None:
        self.stretch = max(ROWS_AT_ONCE, -(-rows // BUCKETS))
        self._buckets = Buckets(path, max(1, -(-rows // self.stretch)), np.int64)

    def add(self, numbers: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        """Add pairs."""
        self._buckets.add(numbers // self.stretch, numbers, values)

    def __iter__(self) -> Iterator[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Yield (numbers, values) of each stretch, by number, and then in insertion order; can be iterated once."""
        with self._buckets as buckets:
            for numbers, values in buckets:
                order = np.argsort(numbers, kind="stable")
                yield numbers[order], values[order]


class Table:
    """Rows of numbers, zeros at first, in a file; read and written by lists of their places, like a numpy array."""

    def __init__(self, path: Path, width: int) -> None:
        self._file = open(path, "w+b", buffering=0)  # noqa: SIM115  # closed with its spool
        self._width = width

    def __getitem__(self, places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        size, file = 8 * self._width, self._file.fileno()
        data = b"".join(os.pread(file, size, place * size).ljust(size, b"\0") for place in places.tolist())
        return np.frombuffer(data, np.int64).reshape(-1, self._width).copy()

    def __setitem__(self, places: npt.NDArray[np.int64], values: npt.NDArray[np.int64]) -> None:
        for place, value in zip(places.tolist(), values, strict=True):
            os.pwrite(self._file.fileno(), value.tobytes(), place * 8 * self._width)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Texts:
    """Texts, appended in order and read by their number."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w+b", buffering=MIB)  # noqa: SIM115  # closed with its spool
        self._ends = Column(path.with_suffix(".ends"), np.int64)
        self._size = 0

    def append(self, texts: Sequence[str]) -> None:
        """Add texts at the end."""
        encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        self._file.write(b"".join(encoded))
        ends = np.cumsum([len(data) for data in encoded], dtype=np.int64) + self._size
        self._ends.append(ends)
        self._size = int(ends[-1]) if len(ends) else self._size

    def __call__(self, index: int) -> str:
        ends = self._ends.read(max(0, index - 1), index + 1).tolist()
        start = ends[0] if index else 0
        self._file.flush()
        return os.pread(self._file.fileno(), ends[-1] - start, start).decode("utf-8", "surrogatepass")

    def close(self) -> None:
        """Close the files."""
        self._file.close()
        self._ends.close()


class Spool:
    """The columns of one data set, in a separate directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._columns: dict[str, Column] = {}
        self._texts: dict[str, Texts] = {}
        self._files: dict[str, int] = {}
        self._tables: list[Table] = []
        self._numbers = itertools.count()

    def column(self, name: str, dtype: npt.DTypeLike) -> Column:
        """Return the column of this name, created at first use."""
        if name not in self._columns:
            self._columns[name] = Column(self._directory / f"{name}.bin", dtype)
        return self._columns[name]

    def texts(self, name: str) -> Texts:
        """Return the texts of this name, created at first use."""
        if name not in self._texts:
            self._texts[name] = Texts(self._directory / f"{name}.txt")
        return self._texts[name]

    def ordered(self, rows: int) -> Ordered:
        """Return an empty collection for pairs of a row's number and a value, for `rows` rows."""
        return Ordered(self._directory / f"ordered{next(self._numbers)}", rows)

    def table(self, width: int) -> Table:
        """Return a new table with `width` numbers per row."""
        self._tables.append(Table(self._directory / f"table{len(self._tables)}", width))
        return self._tables[-1]

    def place(self, found: RowWithPlace) -> None:
        """Record where the next row was read."""
        file, _, row = (found.path, "", "") if found.line is not None else found.path.rpartition(" row ")
        number = self._files.setdefault(file or found.path, len(self._files))
        line = found.line if found.line is not None else -int(row) if row.isdigit() else 0
        self.column("place", np.int64).append([number, line])

    def where(self, index: int) -> str:
        """Return `file:line`, or `file row N`, of a row."""
        number, line = self.column("place", np.int64).read(2 * index, 2 * index + 2).tolist()
        file = list(self._files)[number]
        return f"{file}:{line}" if line > 0 else f"{file} row {-line}" if line else file

    def close(self) -> None:
        """Close all files."""
        stores: list[Column | Texts | Table] = [*self._columns.values(), *self._texts.values(), *self._tables]
        for store in stores:
            with suppress(OSError):  # data that a full disk rejected is no longer needed
                store.close()


@contextmanager
def open_spool() -> Iterator[Spool]:
    """Open a spool and delete it afterwards; TMPDIR decides where.

    Raises:
        MachineError: the disk is full.
    """
    with tempfile.TemporaryDirectory(prefix="surefit-audit-") as directory:
        spool = Spool(Path(directory))
        try:
            yield spool
        except OSError as error:
            if not is_full(error):
                raise
            help_text = "free some space, or point TMPDIR at another disk"
            raise MachineError(
                "no disk space for the temporary files that compare rows", code="E4126", path=directory, help=help_text
            ) from error
        finally:
            spool.close()


class SpooledKeys:
    """The bands of many texts (`near_duplicates.BandKeys`), a column for each band."""

    def __init__(self, spool: Spool, name: str) -> None:
        self._spool = spool
        self._bands = [spool.column(f"{name}{band}", np.uint64) for band in range(BANDS)]

    def __len__(self) -> int:
        return len(self._bands[0])

    def append(self, keys: Hashes) -> None:
        """Add the bands of texts: uint64 [texts, BANDS]."""
        for band, column in enumerate(self._bands):
            column.append(keys[:, band])

    def parts(self, band: int) -> Iterator[tuple[npt.NDArray[np.int64], Hashes]]:
        """Yield `Column.parts` of one band."""
        return self._bands[band].parts()

    def blocks(self, band: int) -> Iterator[tuple[int, Hashes]]:
        """Yield `Column.blocks` of one band."""
        return self._bands[band].blocks()

    def row(self, index: int) -> Hashes:
        """Return the bands of one text."""
        return np.concatenate([column.read(index, index + 1) for column in self._bands])

    def ordered(self) -> Ordered:
        """Return an empty collection of pairs on disk."""
        return self._spool.ordered(len(self))

    def table(self, rows: int, width: int) -> Table:
        """Return a table of numbers on disk."""
        return self._spool.table(width)
