"""A look at data that a check has no time to read: a few rows from everywhere, and from their size how many there are.

Up to `WHOLE_BYTES` a source is read whole. Of more, `PIECES` places are chosen, evenly spaced over the bytes of all its
files, and `ROWS` rows are read from each. Lines are entered at any byte, Parquet at its row groups; what can only be
read from its beginning (compressed files, CSV, Arrow) shows its first rows.
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
from surefit.core.units import MIB
from surefit.data.read.columnar import read_parquet, read_row_groups, require_no_bomb
from surefit.data.read.file_io import count_consumed_bytes, file_extensions, open_decompressed
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
"""Of a source that is read whole: half a second."""
UNPACKED = 4
"""A byte that is compressed counts so many times."""
DECODED_BYTES = 128 * MIB
"""Of the rows of Parquet and Arrow files that are read whole, in memory."""
SHOWN_BYTES = 32 * MIB
"""Of the rows that are looked at in one file of columns: long rows are fewer."""
PIECES, ROWS = 64, 16
"""Places that are looked at, and rows that are read from each."""
PIECE_BYTES = 128 * 1024
"""Of text, after which a piece has no more rows."""


@dataclass
class _SampledFiles:
    """What was read of the files of one kind.

    Attributes:
        pieces: of each the rows, and the bytes that they take there.
        first: only beginnings were read, which say nothing about how far off they are.
    """

    placed: list[RowWithPlace] = field(default_factory=list)
    pieces: list[tuple[int, int]] = field(default_factory=list)
    first: bool = False

    def estimate(self, size: int) -> tuple[float, float]:
        """(rows in `size` bytes, twice the standard error): the ratio of the sums, pieces being independent."""
        rows, taken = (sum(column) for column in zip(*self.pieces, strict=True))
        ratio, count = rows / taken, len(self.pieces)
        spread = sum((n - ratio * of) ** 2 for n, of in self.pieces) / max(1, count - 1)
        return ratio * size, 2 * math.sqrt(spread * count) / taken * size


def read_quick_sample(source: str, split: str, load: Callable[[], Rows]) -> Rows | None:
    """Rows for a check: all of them where they are soon read, else some, with an estimate of how many there are.

    Args:
        source: a file, a directory, a pattern or a sample on this machine.
        split: of a saved `DatasetDict`.
        load: reads all.

    Returns:
        None for a large JSON array or file of PENMAN: those are read whole or not at all.

    Raises:
        DataError: missing, or malformed where it was looked at; with the byte where the line is not known.
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
        seen: dict[tuple[str, str], _SampledFiles] = defaultdict(_SampledFiles)
        for file, starts in hits.items():
            if not _sample_file(file, starts, seen[file_extensions(file)]):
                return None
    return _rows(source, sizes, seen)


def _is_packed(file: str) -> bool:
    ending, packed = file_extensions(file)
    return bool(packed) or ending in COLUMNAR


def _hits(sizes: dict[str, int]) -> dict[str, list[int]]:
    """File → bytes to look at, of places evenly spaced over all files, the first one's beginning among them."""
    total, end, number = sum(sizes.values()), 0, 0
    found: dict[str, list[int]] = {}
    for file, size in sizes.items():
        start, end = end, end + size
        while number < PIECES and (at := number * total // PIECES) < end:
            found.setdefault(file, []).append(at - start)
            number += 1
    return found


def _sample_file(file: str, starts: list[int], seen: _SampledFiles) -> bool:
    """Read some rows of a file; False for one that is read whole or not at all."""
    ending, packed = file_extensions(file)
    if ending == ".parquet":
        _sample_row_groups(file, len(starts), seen)
    elif ending == ".arrow":
        seen.placed += _within(read_range(RowRange(file)), len(starts) * ROWS, SHOWN_BYTES)
        seen.pieces.append((_arrow_rows(file), os.path.getsize(file)))
    elif ending == ".csv":
        _sample_beginning(file, len(starts), seen, read_csv)
    elif (read := _lines_reader(file, ending)) is None:
        return False
    elif packed:
        _sample_beginning(file, len(starts), seen, read)
    else:
        for start in starts:
            _sample_lines(file, start, seen, read)
    return True


def _lines_reader(file: str, ending: str) -> Callable[..., Iterator[RowWithPlace]] | None:
    """What reads a file of lines; a .json file may be one of JSON Lines, and a .txt file may be none."""
    if ending == ".json":
        with open_decompressed(file) as stream:
            return read_jsonl_rows if is_object(stream.readline(ROW_BYTES + 1)) else None
    if ending == ".txt":
        with open_decompressed(file) as stream:
            return None if is_penman(stream.peek(HEAD)[:HEAD]) else read_text
    return LINE_READERS.get(ending)


def _sample_lines(file: str, start: int, seen: _SampledFiles, read: Callable[..., Iterator[RowWithPlace]]) -> None:
    """Rows from the first line that begins after byte `start`. Which line that is does not depend on its length."""
    place, rows, at = display_place(file), 0, start
    with open_decompressed(file, start) as stream:
        if start:
            skipped = stream.readline(ROW_BYTES + 1)
            require_size(len(skipped), f"{place} byte {start}")
            at += len(skipped)
        begin = at
        for number in itertools.count(1):
            line = stream.readline(ROW_BYTES + 1)
            if not line or rows == ROWS or at - begin > PIECE_BYTES:
                break
            where = f"{place} byte {at}" if start else place
            try:
                found = [*read(_SingleLineStream(line), where, number, len(line))]
            except DataError as error:
                error.line = None if start else error.line
                raise
            seen.placed += [RowWithPlace(one.row, where, None if start else number) for one in found]
            rows, at = rows + len(found), at + len(line)
    if at > begin:
        seen.pieces.append((rows, at - begin))


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
    """The first rows of some row groups; how many rows there are, the file says."""
    groups, _ = read_row_groups(file)
    first = [0, *itertools.accumulate(rows for rows, _ in groups)]
    chosen = sorted({number * len(groups) // count for number in range(count)})
    for group in chosen:
        rows = read_parquet(file, group, group + 1, first[group] + 1)
        seen.placed += _within(rows, ROWS * -(-count // len(chosen)), SHOWN_BYTES // len(chosen))
    seen.pieces.append((first[-1], os.path.getsize(file)))


def _within(rows: Iterator[RowWithPlace], count: int, size: int) -> Iterator[RowWithPlace]:
    """The first rows, up to so many and so many characters; at least one."""
    taken = 0
    for row in itertools.islice(rows, count):
        yield row
        taken += count_characters(row.row)
        if taken > size:
            break


def _arrow_rows(file: str) -> int:
    import pyarrow as pa

    with pa.memory_map(file) as mapped:
        is_file = mapped.read(6) == b"ARROW1"
        mapped.seek(0)
        reader = pa.ipc.open_file(mapped) if is_file else pa.ipc.open_stream(mapped)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        return sum(batch.num_rows for batch in batches)


def _sample_beginning(file: str, count: int, seen: _SampledFiles, read: Callable[..., Iterator[RowWithPlace]]) -> None:
    """The first rows of a file that cannot be entered in the middle."""
    with open_decompressed(file) as stream:
        found = [*itertools.islice(read(stream, display_place(file)), count * ROWS)]
        seen.placed += found
        seen.pieces.append((len(found), count_consumed_bytes(stream)))
        seen.first = True


def _rows(source: str, sizes: dict[str, int], seen: dict[tuple[str, str], _SampledFiles]) -> Rows:
    placed = [one for kind in seen.values() for one in kind.placed]
    if not placed:
        raise DataError(
            "no rows at the places that were read", code="E4037", path=source, help="was it written completely?"
        )
    total, error = 0.0, 0.0
    for kind, found in seen.items():
        size = sum(size for file, size in sizes.items() if file_extensions(file) == kind)
        rows, off = found.estimate(size)
        total, error = total + rows, error + off
    known = (
        f"± {error / total:.1%}, from a sample of" if not any(one.first for one in seen.values()) else "from the first"
    )
    said = f"about {round(total):,} rows ({known} {len(placed):,})"
    digest = "part:" + rows_sha256(placed)
    return Rows(source, placed, [*map(Path, sizes)], digest, max(len(placed), round(total)), said)
