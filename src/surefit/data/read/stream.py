"""Rows as a stream: a source is cut into ranges that can be read one by one, in any process, in bounded memory.

    for part in split_into_ranges("data/*.jsonl"):
        for row, path, line in read_range(part):
            ...

`load_rows` reads the same way and keeps the rows in memory.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from surefit import samples
from surefit.core.errors import DataError, os_help
from surefit.core.units import MIB
from surefit.data.read.columnar import read_arrow, read_parquet, read_row_groups
from surefit.data.read.file_io import display_name, file_extensions, is_url, open_decompressed
from surefit.data.read.readers import ENDINGS, FILE_READERS, HEAD, LINE_READERS, RowWithPlace, is_penman
from surefit.data.read.sources import KINDS, list_source_files, resolve_source

RANGE_BYTES = 64 * MIB
COLUMNAR = (".parquet", ".arrow")


@dataclass(frozen=True)
class RowRange:
    """A part of one file that is read by itself.

    Attributes:
        file: a local path or a URL; for a data set on the hub `owner/name:config@split`.
        start: its beginning: a byte of JSON Lines and plain text, a row group of Parquet, 0 for an undivided file.
        stop: its end in the same unit; None for the end of the file.
        first: 1-based number of its first line, or of its first row where the format has no lines.
    """

    file: str
    start: int = 0
    stop: int | None = None
    first: int = 1


def split_into_ranges(source: str, *, split: str = "train", range_bytes: int = RANGE_BYTES) -> list[RowRange]:
    """Cut a source into ranges, in order; the result depends only on its files, not on the process that reads them.

    JSON Lines and plain text on this machine are cut at the first line end after every `range_bytes`, Parquet between
    row groups. Compressed files, files behind a URL (except Parquet) and files of another format are one range each.

    Args:
        source: a file, a directory, a pattern, a URL, a surefit/… sample or a hub id.
        split: split of a hub data set or a saved `DatasetDict`, unless the name contains it.
        range_bytes: approximate bytes of one range.

    Raises:
        DataError: missing, empty, or of a kind that cannot be read. MachineError: it cannot be reached.
    """
    resolved = resolve_source(source)
    if resolved.kind == "hub":
        return [RowRange(source if "@" in source else f"{source}@{split}")]
    with file_errors(source):
        files = list_source_files(resolved, split)
        ranges = [part for file in files for part in _cut(file, range_bytes)]
        require_same_columns(files)
    return ranges


def read_range(one: RowRange) -> Iterator[RowWithPlace]:
    """Yield the rows of a range, in the memory of one row or one record batch (for a JSON array and PENMAN: of the
    file).

    Raises:
        DataError: malformed, with file, line and column. MachineError: it cannot be reached.
    """
    rows = _rows(one)
    with file_errors(one.file):
        first = next(rows, None)
        if first is not None:
            yield first
            yield from rows
        elif one.start == 0 and one.stop is None:
            raise DataError(
                "the file holds no rows",
                code="E4127",
                path=display_place(one.file),
                help="check that it was written completely",
            )


def stream_rows(source: str, *, split: str = "train") -> Iterator[RowWithPlace]:
    """Iterate over every row of a source in order.

    Args:
        source, split: as in `split_into_ranges`.

    Raises:
        DataError, MachineError: as `split_into_ranges` and `read_range`.
    """
    return itertools.chain.from_iterable(
        map(read_range, split_into_ranges(source, split=split, range_bytes=sys.maxsize))
    )


def _rows(one: RowRange) -> Iterator[RowWithPlace]:
    ending = file_extensions(one.file)[0]
    if ending == ".parquet":
        yield from read_parquet(one.file, one.start, one.stop, one.first)
    elif ending == ".arrow":
        yield from read_arrow(one.file)
    elif ending in LINE_READERS:
        with open_decompressed(one.file, one.start) as file:
            size = None if one.stop is None else one.stop - one.start
            yield from LINE_READERS[ending](file, display_place(one.file), one.first, size)
    elif ending in FILE_READERS:
        with open_decompressed(one.file) as file:
            yield from FILE_READERS[ending](file, display_place(one.file))
    else:
        from surefit.data.read.hub import hub_rows

        yield from hub_rows(one.file)


def display_place(file: str) -> str:
    """Return a file's name for messages and artifacts: for a sample its name, without the package's install path."""
    return samples.sample_name(file) or display_name(file)


def _cut(file: str, range_bytes: int) -> list[RowRange]:
    ending, compression = file_extensions(file)
    if ending not in ENDINGS:
        extension = f"the extension {ending!r}" if ending else "no extension"
        raise DataError(f"a data file with {extension} cannot be read", code="E4128", path=file, help=f"{KINDS} can")
    if ending in COLUMNAR and compression:
        raise DataError(
            "Parquet and Arrow files are compressed internally, and this one is compressed again",
            code="E4129",
            path=display_name(file),
            help="decompress the file",
        )
    if not is_url(file) and os.path.getsize(file) == 0:
        raise DataError("the file is empty", code="E4130", path=file, help="check that it was written completely")
    if ending == ".parquet":
        return _cut_groups(file, range_bytes)
    if ending in LINE_READERS and not compression and not is_url(file) and os.path.getsize(file) > range_bytes:
        with open(file, "rb") as stream:
            if ending == ".jsonl" or not is_penman(stream.read(HEAD)):
                stream.seek(0)
                return _cut_lines(file, stream, range_bytes)
    return [RowRange(file)]


def _cut_lines(file: str, stream: BinaryIO, range_bytes: int) -> list[RowRange]:
    """Cut a file into ranges in one pass, which also counts its lines."""
    ranges = []
    start, first, position, line = 0, 1, 0, 1
    while block := stream.read(MIB):
        counted = 0
        while (earliest := max(counted, start + range_bytes - 1 - position)) < len(block) and (
            cut := block.find(b"\n", earliest) + 1
        ):
            line += block.count(b"\n", counted, cut)
            ranges.append(RowRange(file, start, position + cut, first))
            start, first, counted = position + cut, line, cut
        line += block.count(b"\n", counted)
        position += len(block)
    return ranges if start == position else [*ranges, RowRange(file, start, position, first)]


def _cut_groups(file: str, range_bytes: int) -> list[RowRange]:
    ranges = []
    start, first, row, bytes_so_far = 0, 1, 1, 0
    groups, _ = read_row_groups(file)
    for number, (rows, size) in enumerate(groups):
        if bytes_so_far and bytes_so_far + size > range_bytes:
            ranges.append(RowRange(file, start, number, first))
            start, first, bytes_so_far = number, row, 0
        row, bytes_so_far = row + rows, bytes_so_far + size
    return [*ranges, RowRange(file, start, len(groups) if ranges else None, first)]


def require_same_columns(files: list[str]) -> None:
    """Raise if Parquet files of one source differ in columns: they are one table, so a missing or retyped one is a
    mistake.
    """
    tables = [file for file in files if file_extensions(file)[0] == ".parquet"]
    if len(tables) < 2:
        return
    first_columns = read_row_groups(tables[0])[1]
    for file in tables[1:]:
        columns = read_row_groups(file)[1]
        names = [name for name in first_columns | columns if _differ(first_columns.get(name), columns.get(name))]
        if names:
            column_type, first_type = (types.get(names[0], "missing") for types in (columns, first_columns))
            raise DataError(
                f"its columns differ from {display_name(tables[0])}: "
                f"{names[0]!r} is {column_type} here and {first_type} there",
                code="E4131",
                path=display_name(file),
                help="write the files with one schema, or name those that belong together",
            )


def _differ(a: str | None, b: str | None) -> bool:
    return a != b and "null" not in (a, b)


@contextmanager
def require_unchanged(files: Sequence[str]) -> Iterator[None]:
    """Raise if a local file changes while it is read: its rows would be recorded under the hash of another content.

    Raises:
        DataError: one has changed.
    """
    before = [_state(file) for file in files]
    yield
    for file, old_state in zip(files, before, strict=True):
        if _state(file) != old_state:
            help_text = "run the same command again once it is complete"
            raise DataError(
                "the file changed while it was being read", code="E4132", path=display_place(file), help=help_text
            )


def _state(file: str) -> tuple[int, int] | None:
    """Return (bytes, modification time); None for a file that is not on this machine."""
    try:
        stat = os.stat(file)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns


@contextmanager
def file_errors(path: str) -> Iterator[None]:
    """Translate the operating system's errors on a file into SureFit's."""
    try:
        yield
    except OSError as error:
        file = error.filename if isinstance(error.filename, str) else display_name(path)
        raise DataError(
            f"cannot be read: {error.strerror or error}", code="E4133", path=file, help=os_help(error)
        ) from None
