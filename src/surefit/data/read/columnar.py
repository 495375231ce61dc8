"""Reading Parquet and Arrow: rows decoded a few at a time, whatever the declared size of a small file.

A column that repeats one text twenty million times is a small file and a large list. So texts stay dictionary-encoded
until the bytes of a few rows are known, and only those rows are decoded.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from surefit.core.errors import DataError
from surefit.core.limited import MEMORY, ExceedsLimit, TrialNotRun, run_limited
from surefit.core.packaging import require_import
from surefit.core.reading import library_errors
from surefit.core.units import GIB, MIB, bytes_text
from surefit.data.read.file_io import display_name, open_raw
from surefit.data.read.readers import RowWithPlace, count_characters, require_row_memory, require_size

BATCH_ROWS = 1024
BATCH_BYTES = 32 * MIB
"""Bytes of the rows that are decoded at once."""
ROW_COST, VALUE_COST = 250, 60
"""Bytes that Python needs for a row and for each value in it, beside the texts."""


def read_parquet(name: str, start: int = 0, stop: int | None = None, first: int = 1) -> Iterator[RowWithPlace]:
    """Read Parquet, without the nulls with which its structs are filled up.

    Args:
        name: a path or a URL.
        start, stop: row groups; None reads to the last.
        first: 1-based number of the first row.
    """
    place, number = display_name(name), first
    with _parquet(name, dictionaries=True) as (file, schema):
        groups = range(start, file.num_row_groups if stop is None else stop)
        documents = _json_columns(schema)
        for batch in file.iter_batches(batch_size=BATCH_ROWS, row_groups=list(groups)):
            for row in _rows(batch, place):
                yield _to_row_with_place(row, place, number, documents)
                number += 1


def read_arrow(name: str) -> Iterator[RowWithPlace]:
    """Read an Arrow file, or the Arrow stream that `Dataset.save_to_disk` writes; always the whole file."""
    require_import("pyarrow", display_name(name))
    import pyarrow as pa

    place, number = display_name(name), 1
    with library_errors(place, DataError, "not a readable Arrow file", _HELP), open_raw(name, seekable=True) as file:
        is_file = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        documents = _json_columns(reader.schema)
        for batch in batches:
            for offset in range(0, batch.num_rows, BATCH_ROWS):
                for row in _rows(batch.slice(offset, BATCH_ROWS), place):
                    yield _to_row_with_place(row, place, number, documents)
                    number += 1


_HELP = "check that the download is complete"


def _to_row_with_place(row: dict[str, Any], place: str, number: int, documents: dict[str, Any]) -> RowWithPlace:
    where = f"{place} row {number}"
    require_size(count_characters(row), where)
    row = without_filled_nulls(row)
    return RowWithPlace(
        row | {name: _parse_json_columns(row[name], kind) for name, kind in documents.items()}, where, None
    )


def _json_columns(schema: Any) -> dict[str, Any]:
    """Return the columns with values of Arrow's JSON type, as `datasets` writes its `Json`: Arrow returns them as
    text."""
    return {field.name: field.type for field in schema if "arrow.json" in str(field.type)}


def _parse_json_columns(value: Any, kind: Any) -> Any:
    from pyarrow import types

    if value is None:
        return None
    if "arrow.json" not in str(kind):
        return value
    if types.is_struct(kind):
        return {key: _parse_json_columns(inner, kind.field(key).type) for key, inner in value.items()}
    if types.is_list(kind) or types.is_large_list(kind):
        return [_parse_json_columns(item, kind.value_type) for item in value]
    return json.loads(value)


@contextmanager
def _parquet(name: str, *, dictionaries: bool = False) -> Iterator[tuple[Any, Any]]:
    """Open a Parquet file and yield (file, schema); with `dictionaries`, texts stay encoded. Pages are read on
    demand."""
    require_import("pyarrow.parquet", display_name(name))
    from pyarrow import parquet

    # A value that Python cannot hold (a date of the year 20,000, a text that is not UTF-8) is an error of any class.
    with (
        library_errors(display_name(name), DataError, "not a readable Parquet file", _HELP),
        open_raw(name, seekable=True) as file,
    ):
        plain = parquet.ParquetFile(file, buffer_size=MIB, pre_buffer=False)
        metadata, schema = plain.metadata, plain.schema_arrow
        texts = _leaves(metadata) if dictionaries and metadata.num_row_groups else []
        yield (
            parquet.ParquetFile(file, metadata=metadata, read_dictionary=texts, buffer_size=MIB, pre_buffer=False),
            schema,
        )


def _leaves(about: Any) -> list[str]:
    """Return the text columns, each by its path inside lists and structs."""
    group = about.row_group(0)
    columns = [group.column(number) for number in range(about.num_columns)]
    return [column.path_in_schema for column in columns if column.physical_type == "BYTE_ARRAY"]


def _rows(batch: Any, place: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of a record batch, decoded in parts that fit into `BATCH_BYTES`."""
    if (needed := _batch_bytes(batch, place)) <= BATCH_BYTES:
        yield from batch.to_pylist()
    elif batch.num_rows > 1:
        half = batch.num_rows // 2
        yield from _rows(batch.slice(0, half), place)
        yield from _rows(batch.slice(half), place)
    else:
        problem = f"one row needs {bytes_text(needed)} of memory once decoded"
        raise DataError(problem, code="E4006", path=place, help="split it into several rows, or remove it")


def _batch_bytes(batch: Any, place: str) -> int:
    """Return a lower bound of the bytes that a record batch needs in Python.

    1,000 rows of one column with the text "hello" are 1,000 × (250 + 60 + 5) bytes.

    Raises:
        DataError: a text in it is longer than a row may be.
    """
    import pyarrow as pa
    from pyarrow import compute

    count: int = batch.num_rows * ROW_COST
    pending = [*zip(batch.schema.names, batch.columns, strict=True)]
    while pending:
        name, array = pending.pop()
        if isinstance(array, pa.ExtensionArray):
            array = array.storage
        if isinstance(array, pa.MapArray):  # `flatten` does not accept one, and its parts ignore a slice
            first, end = array.offsets[0].as_py(), array.offsets[-1].as_py()
            pending += [(name, part.slice(first, end - first)) for part in (array.keys, array.items)]
            continue
        if isinstance(array, (pa.ListArray, pa.LargeListArray, pa.FixedSizeListArray, pa.StructArray)):
            inner = array.flatten()
            pending += [(name, child) for child in inner] if isinstance(inner, list) else [(name, inner)]
            continue
        count += len(array) * VALUE_COST
        texts = array.dictionary if isinstance(array, pa.DictionaryArray) else array
        if _is_text(texts.type):
            lengths = compute.binary_length(texts)
            lengths = lengths.take(array.indices) if texts is not array else lengths
            require_size(compute.max(lengths).as_py() or 0, f"{place}, column {name!r}")
            count += compute.sum(lengths).as_py() or 0
        else:
            count += array.nbytes
    return count


def _is_text(kind: Any) -> bool:
    from pyarrow import types

    return bool(
        types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    )


BOMB_BYTES, BOMB_FACTOR = GIB, 1_000
"""A file whose rows need more than this many bytes and this factor of its own size repeats one value: no data set
does."""


def require_no_bomb(name: str, size: int) -> int:
    """Return the bytes that a small columnar file needs in Python, without decoding its texts.

    Args:
        name: a Parquet or an Arrow file on this machine.
        size: its bytes.

    Returns:
        The bytes of its rows; 0 for an Arrow file whose bytes are known only once it is read.

    Raises:
        DataError: they are out of all proportion to the file's.
    """
    require_import("pyarrow", display_name(name))
    limit = max(BOMB_BYTES, BOMB_FACTOR * size)
    place, needed = display_name(name), 0
    if name.lower().endswith(".arrow"):
        needed = _measure_arrow_bytes(name, size, limit)
    else:
        with _parquet(name, dictionaries=True) as (file, _):
            metadata = file.metadata
            needed = sum(metadata.row_group(number).total_byte_size for number in range(metadata.num_row_groups))
            if needed <= limit:
                needed = _bytes_of(file.iter_batches(batch_size=BATCH_ROWS), place, limit)
    if needed > limit:
        problem = f"its {size:,} bytes are rows of more than {bytes_text(limit)}"
        raise DataError(problem, code="E4654", path=place, help=_BOMB)
    return needed


_BOMB = "one value is repeated millions of times: write the rows again, or remove the file"


def _measure_arrow_bytes(name: str, size: int, limit: int) -> int:
    """Measure the bytes of an Arrow file's rows in a separate process; 0 where they cannot be measured.

    Arrow decodes a whole batch at once, so a file of at most `MEMORY / BOMB_FACTOR` that needs more than `MEMORY` is
    out of proportion. For a larger file that proves nothing.
    """
    try:
        needed: int = run_limited(f"{__name__}:arrow_bytes", name, limit, memory=MEMORY + size)
    except TrialNotRun:
        return 0
    except ExceedsLimit as error:
        small = BOMB_FACTOR * size <= MEMORY
        if not (error.ended or small):
            return 0
        problem = (
            f"reading its {size:,} bytes crashes the process: {error}"
            if error.ended
            else f"reading its {size:,} bytes {error}"
        )
        help_text = _HELP if error.ended else _BOMB
        raise DataError(problem, code="E4653", path=display_name(name), help=help_text) from None
    return needed


def arrow_bytes(name: str, limit: int) -> int:
    """Return the bytes that the rows of an Arrow file need in Python, or somewhat more than `limit`; 0 where it cannot
    be read, or a batch of it needs more memory than this process may use."""
    import pyarrow as pa

    try:
        with pa.memory_map(name) as file:
            is_file = file.read(6) == b"ARROW1"
            file.seek(0)
            reader = pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)
            batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
            return _bytes_of(batches, name, limit)
    except MemoryError:
        return limit + 1 if limit <= MEMORY else 0
    except Exception:  # reading the file reports the error
        return 0


def _bytes_of(batches: Iterable[Any], place: str, limit: int) -> int:
    needed = 0
    for batch in batches:
        needed += _batch_bytes(batch, place)
        if needed > limit:
            break
    return needed


def require_room(name: str, needed: int | None = None) -> None:
    """Raise if the rows of a Parquet file do not fit into memory together; none is decoded.

    Args:
        needed: their bytes, from `require_no_bomb`; None measures them here.

    Raises:
        DataError: they do not, or the file cannot be read.
    """
    place = display_name(name)
    with _parquet(name, dictionaries=True) as (file, _):
        metadata = file.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        values = sum(group.column(number).num_values for group in groups for number in range(metadata.num_columns))
        require_row_memory(metadata.num_rows * ROW_COST + values * VALUE_COST, place, metadata.num_rows)
        if needed is None:
            needed = sum(_batch_bytes(batch, place) for batch in file.iter_batches(batch_size=BATCH_ROWS))
        require_row_memory(needed, place, metadata.num_rows)


def read_row_groups(name: str) -> tuple[list[tuple[int, int]], dict[str, str]]:
    """Return (rows and bytes of each row group of a Parquet file, column → kind of its values)."""
    with _parquet(name) as (file, schema):
        groups = [file.metadata.row_group(number) for number in range(file.num_row_groups)]
        return [(group.num_rows, group.total_byte_size) for group in groups], _kinds(schema)


def _kinds(schema: Any) -> dict[str, str]:
    """Return column → text, number, list, object or Arrow's type name; "null" where no value is known."""
    from pyarrow import types

    def kind(of: Any) -> str:
        if types.is_dictionary(of):
            return kind(of.value_type)
        if _is_text(of):
            return "text"
        if types.is_integer(of) or types.is_floating(of):
            return "number"
        if types.is_list(of) or types.is_large_list(of):
            return "list"
        return "object" if types.is_struct(of) or types.is_map(of) else str(of)

    return {field.name: kind(field.type) for field in schema}


def without_filled_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of an Arrow table without the keys that Arrow added.

    All structs of an Arrow column share one list of keys. So where two tools have different arguments, each tool comes
    back with the other's, set to null, and a model would learn to write them. Absent and null look the same and
    nearly always the key was absent. Only values inside a column are cleaned: the columns themselves, and the
    items of lists, stay.
    """
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value
