"""A sample of data that a check has no time to read whole: a few rows from everywhere, and an estimate of the row count
from their size.

Up to `WHOLE_BYTES` a source is read whole. In a larger one, `PIECES` places are chosen, evenly spaced over the bytes of
all its files, and `ROWS` rows are read from each. Files of lines can be entered at any byte, Parquet at its row groups;
files that can only be read from the beginning (compressed files, CSV, Arrow) contribute their first rows.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from surefit.core.errors import DataError
from surefit.core.packaging import require_import
from surefit.core.units import MIB
from surefit.data.read.columnar import read_parquet, read_row_groups, require_no_bomb
from surefit.data.read.file_io import count_consumed_bytes, display_name, file_extensions, open_decompressed
from surefit.data.read.load import Rows, rows_sha256
from surefit.data.read.readers import (
    ENDINGS,
    HEAD,
    LINE_READERS,
    ROW_BYTES,
    RowWithPlace,
    count_characters,
    is_object,
    is_penman,
    read_csv,
    read_jsonl_rows,
    read_text,
    require_size,
)
from surefit.data.read.sources import list_source_files, resolve_source
from surefit.data.read.stream import COLUMNAR, RowRange, display_place, file_errors, read_range, require_same_columns

WHOLE_BYTES = 16 * MIB
"""Bytes of the largest source that is read whole: half a second."""
UNPACKED = 4
"""Factor by which compressed bytes count."""
DECODED_BYTES = 128 * MIB
"""Decoded bytes, in memory, of the largest Parquet and Arrow files that are read whole."""
SHOWN_BYTES = 32 * MIB
"""Bytes of the rows that are read from one columnar file: fewer rows if they are long."""
PIECES, ROWS = 64, 16
"""Places that are read, and rows per place."""
PIECE_BYTES = 128 * 1024
"""Bytes of text after which a piece has no more rows."""


@dataclass
class _SampledFiles:
    """The sampled rows of the files of one kind.

    Attributes:
        placed: the rows with their places.
        pieces: for each piece its rows, and the bytes that they have in the file.
        first: only beginnings were read, so the error of the estimate is unknown.
    """

    placed: list[RowWithPlace] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    first: bool = False

    def estimate(self, size: int) -> tuple[float, float]:
        """Return (rows in `size` bytes, twice the standard error): a ratio of sums over independent pieces."""
        rows, bytes_read = (sum(column) for column in zip(*self.pieces, strict=True))
        ratio, count = rows / bytes_read, len(self.pieces)
        variance = sum((n - ratio * piece_bytes) ** 2 for n, piece_bytes in self.pieces) / max(1, count - 1)
        return ratio * size, 2 * math.sqrt(variance * count) / bytes_read * size


def read_quick_sample(source: str, split: str, load: Callable[[], Rows]) -> Rows | None:
    """Read the rows for a check: all of them if that is quick, otherwise some, with an estimate of the row count.

    Args:
        source: a file, a directory, a pattern or a sample on this machine.
        split: split of a saved `DatasetDict`.
        load: reads all.

    Returns:
        None for a large JSON array or file of PENMAN: those are read whole or not at all.

    Raises:
        DataError: missing, or malformed where it was read; with the byte where the line is not known.
    """
    with file_errors(source):
        sizes = {file: os.path.getsize(file) for file in list_source_files(resolve_source(source), split)}
        large = sum(size * (UNPACKED if _is_packed(file) else 1) for file, size in sizes.items()) > WHOLE_BYTES
        decoded = 0
        for file, size in sizes.items():
            if file_extensions(file)[0] in COLUMNAR and not large and size:
                decoded += require_no_bomb(file, size)
        large = large or decoded > DECODED_BYTES
        if not large or not all(size and file_extensions(file)[0] in ENDINGS for file, size in sizes.items()):
            return load()
        hits = _hits(sizes)
        require_same_columns(list(hits))
        samples: dict[tuple[str, str], _SampledFiles] = defaultdict(_SampledFiles)
        for file, starts in hits.items():
            if not _sample_file(file, starts, samples[file_extensions(file)]):
                return None
    return _rows(source, sizes, samples)


def _is_packed(file: str) -> bool:
    ending, compression = file_extensions(file)
    return bool(compression) or ending in COLUMNAR


def _hits(sizes: dict[str, int]) -> dict[str, list[int]]:
    """Return file → byte positions to read at, evenly spaced over all files, the first file's beginning among them."""
    total, end, number = sum(sizes.values()), 0, 0
    hits: dict[str, list[int]] = {}
    for file, size in sizes.items():
        start, end = end, end + size
        while number < PIECES and (at := number * total // PIECES) < end:
            hits.setdefault(file, []).append(at - start)
            number += 1
    return hits


def _sample_file(file: str, starts: list[int], seen: _SampledFiles) -> bool:
    """Read some rows of a file; return False for a file that is read whole or not at all."""
    ending, compression = file_extensions(file)
    if ending == ".parquet":
        _sample_row_groups(file, len(starts), seen)
    elif ending == ".arrow":
        seen.placed += _within(read_range(RowRange(file)), len(starts) * ROWS, SHOWN_BYTES)
        seen.pieces.append((_arrow_rows(file), os.path.getsize(file)))
    elif ending == ".csv":
        _sample_beginning(file, len(starts), seen, read_csv)
    elif (reader := _lines_reader(file, ending)) is None:
        return False
    elif compression:
        _sample_beginning(file, len(starts), seen, reader)
    else:
        for start in starts:
            _sample_lines(file, start, seen, reader)
    return True


def _lines_reader(file: str, ending: str) -> Callable[..., Iterator[RowWithPlace]] | None:
    """Return the reader for a file of lines, or None: a .json file may hold JSON Lines, and a .txt file may not be
    lines.
    """
    if ending == ".json":
        with open_decompressed(file) as stream:
            return read_jsonl_rows if is_object(stream.readline(ROW_BYTES + 1)) else None
    if ending == ".txt":
        with open_decompressed(file) as stream:
            return None if is_penman(stream.peek(HEAD)[:HEAD]) else read_text
    return LINE_READERS.get(ending)


def _sample_lines(file: str, start: int, seen: _SampledFiles, read: Callable[..., Iterator[RowWithPlace]]) -> None:
    """Read rows from the first line that begins after byte `start`. The choice of that line is independent of its
    length.
    """
    place, rows, position = display_place(file), 0, start
    with open_decompressed(file, start) as stream:
        if start:
            partial_line = stream.readline(ROW_BYTES + 1)
            require_size(len(partial_line), f"{place} byte {start}")
            position += len(partial_line)
        first_byte = position
        for number in itertools.count(1):
            line = stream.readline(ROW_BYTES + 1)
            if not line or rows == ROWS or position - first_byte > PIECE_BYTES:
                break
            where = f"{place} byte {position}" if start else place
            try:
                line_rows = [*read(_SingleLineStream(line), where, number, len(line))]
            except DataError as error:
                error.line = None if start else error.line
                raise
            seen.placed += [RowWithPlace(placed_row.row, where, None if start else number) for placed_row in line_rows]
            rows, position = rows + len(line_rows), position + len(line)
    if position > first_byte:
        seen.pieces.append((rows, position - first_byte))


class _SingleLineStream:
    """A stream of one line."""

    def __init__(self, line: bytes) -> None:
        self._line = line

    def peek(self, size: int = 0) -> bytes:
        return self._line

    def readline(self, size: int) -> bytes:
        line, self._line = self._line, b""
        return line


def _sample_row_groups(file: str, count: int, seen: _SampledFiles) -> None:
    """Read the first rows of some row groups; the file's metadata has the number of rows."""
    groups, _ = read_row_groups(file)
    first = [0, *itertools.accumulate(rows for rows, _ in groups)]
    chosen = sorted({number * len(groups) // count for number in range(count)})
    for group in chosen:
        rows = read_parquet(file, group, group + 1, first[group] + 1)
        seen.placed += _within(rows, ROWS * -(-count // len(chosen)), SHOWN_BYTES // len(chosen))
    seen.pieces.append((first[-1], os.path.getsize(file)))


def _within(rows: Iterator[RowWithPlace], count: int, size: int) -> Iterator[RowWithPlace]:
    """Yield the first rows, at most `count` rows and about `size` characters; at least one row."""
    characters = 0
    for row in itertools.islice(rows, count):
        yield row
        characters += count_characters(row.row)
        if characters > size:
            break


def _arrow_rows(file: str) -> int:
    require_import("pyarrow", display_name(file))
    import pyarrow as pa

    with pa.memory_map(file) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        return sum(batch.num_rows for batch in batches)


def _sample_beginning(file: str, count: int, seen: _SampledFiles, read: Callable[..., Iterator[RowWithPlace]]) -> None:
    """Read the first rows of a file that can only be read from its beginning."""
    with open_decompressed(file) as stream:
        first_rows = [*itertools.islice(read(stream, display_place(file)), count * ROWS)]
        seen.placed += first_rows
        seen.pieces.append((len(first_rows), count_consumed_bytes(stream)))
        seen.first = True


def _rows(source: str, sizes: dict[str, int], seen: dict[tuple[str, str], _SampledFiles]) -> Rows:
    placed = [placed_row for kind in seen.values() for placed_row in kind.placed]
    if not placed:
        raise DataError(
            "no rows in the parts that were read",
            code="E4037",
            path=source,
            help="check that it was written completely",
        )
    total, error = 0.0, 0.0
    for kind, sample in seen.items():
        size = sum(size for file, size in sizes.items() if file_extensions(file) == kind)
        rows, row_error = sample.estimate(size)
        total, error = total + rows, error + row_error
    precision = (
        f"± {error / total:.1%}, from a sample of"
        if not any(sample.first for sample in seen.values())
        else "from the first"
    )
    estimate = f"about {round(total):,} rows ({precision} {len(placed):,})"
    digest = "part:" + rows_sha256(placed)
    return Rows(source, placed, [*map(Path, sizes)], digest, max(len(placed), round(total)), estimate)
