"""One reader per file format: path → rows with their places; every malformed file is refused with its line.

Rows of JSON Lines and CSV are known by their line, those of a JSON array and of Parquet by their number.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from surefit.core.errors import DataError
from surefit.core.reading import deeper_than, library_errors, read_bytes
from surefit.core.units import GIB, MIB, bytes_text, shortened
from surefit.facts.hardware import ram_bytes
from surefit.metrics.strict_json import json_kind

MAX_DEPTH = 100
"""Brackets inside brackets in one row. Real rows have fewer than 20; Python's own limit varies and is no message."""

ROW_BYTES = 8 * MIB
"""Of one row. A novel has a tenth of it; the tokenizer takes four hundred times as much memory as the text."""
WHOLE_BYTES = 8 * GIB
"""Of a file that is not read line by line."""
BATCH_BYTES = 256 * MIB
"""Of the rows of a Parquet file that are unpacked at once, where they are of one size."""
ROW_COST, VALUE_COST = 250, 60
"""Bytes that Python takes for a row and for each value in it, beside the texts."""

_SIGNATURES = {
    b"\x1f\x8b": ("compressed with gzip", "unpack it first: gunzip -k FILE"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "unpack it first: zstd -d FILE"),
    b"BZh": ("compressed with bzip2", "unpack it first: bunzip2 -k FILE"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it first: unxz -k FILE"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "unpack it, or export it as CSV"),
    b"PAR1": ("a Parquet file", "give it the ending .parquet"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
}


class Placed(NamedTuple):
    """A row and where it was read: `line` is None where `path` already says "file row N"."""

    row: dict[str, Any]
    path: str
    line: int | None


def read_jsonl(path: Path) -> Iterator[Placed]:
    """JSON Lines: one object per line; a byte-order mark, CRLF and blank lines are fine."""
    _refuse_other_kinds(path)
    name = str(path)
    with open(path, "rb") as file:
        for number, data in enumerate(iter(lambda: file.readline(ROW_BYTES + 1), b""), start=1):
            _require_size(len(data), path, number)
            text = _utf8(data, path, number).rstrip()
            if text:
                yield Placed(_line_row(text, path, number), name, number)


def _require_size(size: int, place: object, line: int | None = None) -> None:
    if size > ROW_BYTES:
        raise DataError(
            f"a row of more than {bytes_text(ROW_BYTES)}",
            path=str(place),
            line=line,
            help="cut the text into several rows, or take the row out: it has more tokens than any model reads",
        )


def _line_row(text: str, path: Path, line: int) -> dict[str, Any]:
    try:
        row = _decode(text, path, line)
    except json.JSONDecodeError as error:
        array = text.lstrip().startswith("[") and line == 1
        raise DataError(
            f"{_problem(error)} (column {error.colno})",
            path=path,
            line=line,
            help=_ARRAY_HELP if array else "every line of a JSON Lines file is one whole JSON object",
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"a row must be a JSON object, not {json_kind(row)}",
            path=path,
            line=line,
            help=_ARRAY_HELP if isinstance(row, list) and line == 1 else None,
        )
    return row


_ARRAY_HELP = "a file that is one JSON array needs the ending .json"


def read_json(path: Path) -> Iterator[Placed]:
    """A JSON array of objects, a single object, or one object per line as many `.json` files have it."""
    _refuse_other_kinds(path)
    text = _utf8(_whole(path), path, None)
    start = len(text) - len(text.lstrip())
    try:
        if text[start : start + 1] == "{":
            _, end = _DECODER.raw_decode(text, start)
            if text[end:].strip():
                return read_jsonl(path)
        value = _decode(text, path, None)
    except json.JSONDecodeError as error:
        message = f"{_problem(error)} (column {error.colno})"
        raise DataError(message, path=path, line=error.lineno, help="a JSON file is an array of objects") from None
    except (RecursionError, ValueError) as error:
        raise _undecodable(error, path, None) from None
    return _numbered(value if isinstance(value, list) else [value], path)


def _numbered(rows: list[Any], path: Path) -> Iterator[Placed]:
    for number, row in enumerate(rows, start=1):
        place = f"{path} row {number}"
        _require_size(_characters(row), place)
        if not isinstance(row, dict):
            raise DataError(f"a row must be a JSON object, not {json_kind(row)}", path=place)
        yield Placed(row, place, None)


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write null")


_DECODER = json.JSONDecoder(parse_constant=_not_json)


def _decode(text: str, path: Path, line: int | None) -> Any:
    """The value of a JSON text.

    Raises:
        json.JSONDecodeError: not JSON; its position is relative to `text`.
        DataError: JSON in form, but with a value that no row can have.
    """
    try:
        value = _DECODER.decode(text)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError:
        raise
    except (RecursionError, ValueError) as error:
        raise _undecodable(error, path, line) from None
    # The array around the rows of a .json file is one level more.
    if text.count("[") + text.count("{") > MAX_DEPTH and deeper_than(value, MAX_DEPTH + isinstance(value, list)):
        raise DataError(f"nested more than {MAX_DEPTH} levels deep", path=path, line=line, help=_FLATTER)
    return value


def _undecodable(error: Exception, path: Path, line: int | None) -> DataError:
    if isinstance(error, RecursionError):
        return DataError(f"nested more than {MAX_DEPTH} levels deep", path=path, line=line, help=_FLATTER)
    if isinstance(error, UnicodeEncodeError):
        message = "half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        return DataError(message, path=path, line=line, help="remove it: the text was cut inside a character")
    if "digits" in str(error):
        return DataError("an integer with thousands of digits", path=path, line=line, help="write it as a text")
    return DataError(str(error), path=path, line=line)


_FLATTER = "store what is nested so deeply as JSON text"


def read_csv(path: Path) -> Iterator[Placed]:
    """Comma-separated values with a header line; every value is text. A quoted value may hold line breaks."""
    _refuse_other_kinds(path)
    _utf8(_whole(path), path, None)
    limit = csv.field_size_limit(ROW_BYTES)
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            yield from _csv_rows(csv.reader(file, strict=True), path)
    finally:
        csv.field_size_limit(limit)


def _csv_rows(reader: Any, path: Path) -> Iterator[Placed]:
    name, header, line = str(path), None, 1
    try:
        for cells in reader:
            if cells:
                if header is None:
                    header = _csv_header(cells, path, line)
                else:
                    _require_size(sum(map(len, cells)), path, line)
                    yield Placed(_csv_row(header, cells, path, line), name, line)
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            f"not valid CSV: {error}",
            path=path,
            line=line,
            help='a value with commas, quotes or line breaks stands in quotes, and a quote inside it is doubled: ""',
        ) from None


def _csv_header(cells: list[str], path: Path, line: int) -> list[str]:
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(cells) == 1 and separator in cells[0]:
            raise DataError(
                f"the values are separated by {word}, not commas", path=path, line=line, help="export it with commas"
            )
    repeated = [cell for cell, count in Counter(cells).items() if count > 1]
    if repeated:
        problem = f"the header names the column {repeated[0]!r} twice"
        raise DataError(problem, path=path, line=line, help="give every column a name of its own")
    return cells


def _csv_row(header: list[str], cells: list[str], path: Path, line: int) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(
            f"{len(cells)} values where the header names {len(header)} columns",
            path=path,
            line=line,
            help="put values that hold commas in quotes",
        )
    return dict(zip(header, cells, strict=True))


def read_parquet(path: Path) -> Iterator[Placed]:
    """Parquet, without the nulls that its structs are filled up with."""
    from pyarrow import parquet

    number = 0
    # A value that Python cannot hold (a date of the year 20,000, a text that is not UTF-8) is an error of any class.
    with (
        library_errors(path, DataError, "not a readable Parquet file", "was it downloaded completely?"),
        parquet.ParquetFile(path) as file,
    ):
        needed = _unpacked_bytes(file.metadata, path)
        at_once = max(1, min(1024, file.metadata.num_rows * BATCH_BYTES // max(1, needed)))
        for batch in file.iter_batches(batch_size=at_once):
            for row in batch.to_pylist():
                number += 1
                _require_size(_characters(row), f"{path} row {number}")
                yield Placed(without_filled_nulls(row), f"{path} row {number}", None)


def _unpacked_bytes(about: Any, path: Path) -> int:
    """What the rows of a Parquet file take in Python at least, known before one is unpacked; objects inside objects
    take more.

    A column that says one text twenty million times is a small file and a large list, so of texts the dictionary is
    read, and how often each of its entries is used. 20,000,000 rows of one column "hello", a file of 57 KB, are
    20,000,000 × (250 + 60 + 5) bytes: 5.9 GiB.

    Raises:
        DataError: they do not fit, or one text is longer than a row may be.
    """
    columns = [about.row_group(g).column(c) for g in range(about.num_row_groups) for c in range(about.num_columns)]
    needed: int = about.num_rows * ROW_COST + sum(column.num_values for column in columns) * VALUE_COST
    _require_room(needed, path, about.num_rows)
    for number, column in enumerate(columns):
        if column.physical_type == "BYTE_ARRAY":
            needed += _text_bytes(path, number // about.num_columns, column)
            _require_room(needed, path, about.num_rows)
    return needed


def _text_bytes(path: Path, group: int, column: Any) -> int:
    """The texts of one column in one group of rows, each as often as it is used."""
    import pyarrow as pa
    from pyarrow import compute, parquet

    name: str = column.path_in_schema
    count = 0
    try:
        with parquet.ParquetFile(path, read_dictionary=[name]) as file:
            waiting = [chunk for whole in file.read_row_group(group, columns=[name]).columns for chunk in whole.chunks]
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # a layout that cannot be read so, or a damaged page
        return int(column.total_uncompressed_size)
    while waiting:
        array = waiting.pop()
        if isinstance(array, pa.DictionaryArray):
            lengths = compute.binary_length(array.dictionary)
            _require_size(compute.max(lengths).as_py() or 0, f"{path}, column {name!r}")
            count += compute.sum(lengths.take(array.indices)).as_py() or 0
        elif isinstance(array, (pa.ListArray, pa.LargeListArray, pa.StructArray)):
            inner = array.flatten()
            waiting += inner if isinstance(inner, list) else [inner]
        else:
            count += array.nbytes
    return count


def _room() -> int:
    """Bytes that rows may take: half of the machine's memory or of the container's, and no more than is free."""
    limits = [(ram_bytes() or sys.maxsize) // 2]
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    return min(limits)


def _require_room(needed: int, path: Path, rows: int) -> None:
    if needed > (room := _room()):
        raise DataError(
            f"its {rows:,} rows take at least {bytes_text(needed)} of memory once they are unpacked, and there is room "
            f"for {bytes_text(room)}",
            path=path,
            help="take a part of them: a file of fewer rows; or use a machine with more memory",
        )


def _characters(value: Any) -> int:
    """Of all texts in a row; does not recurse."""
    count, waiting = 0, [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, (str, bytes)):
            count += len(item)
        elif isinstance(item, dict):
            waiting += item.values()
        elif isinstance(item, list):
            waiting += item
    return count


def _whole(path: Path) -> bytes:
    """A text file that is read at once; a FIFO or a device is none."""
    return read_bytes(path, WHOLE_BYTES)


def without_filled_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """A row of an Arrow table without the keys that Arrow invented.

    All structs of an Arrow column share one list of keys. So where two tools have different arguments, each tool comes
    back with the other's, set to null, and a model would learn to write them. Absent and null cannot be told apart any
    more; absent is what it nearly always was. Only what lies inside a column is cleaned: the columns themselves, and
    the items of lists, stay.
    """
    return {name: _pruned(value) for name, value in row.items()}


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _pruned(inner) for key, inner in value.items() if inner is not None}
    return [_pruned(item) for item in value] if isinstance(value, list) else value


_PENMAN_FIELD = re.compile(r"::(\S+)[ \t]*")


def read_penman(path: Path) -> Iterator[Placed]:
    """Blocks of PENMAN as the AMR bank has them: "# ::id …" and "# ::snt …", then a graph of several lines.

    Rows have `id` (where given), `sentence` and `graph`; a block without a graph is a sentence to be parsed. "#::snt"
    without a space, other fields and other comments are fine, and a blank line may be missing between two blocks.
    """
    _refuse_other_kinds(path)
    row: dict[str, Any] = {}
    begin, ended = 1, False
    for number, text in enumerate(_utf8(_whole(path), path, None).splitlines(), start=1):
        text = text.strip()
        fields = _penman_fields(text) if text.startswith("#") else {}
        if row and (fields.keys() & row.keys() or ("graph" in row and (fields or (ended and text[:1] == "(")))):
            yield _penman_row(row, path, begin)
            row = {}
        ended = not text and "graph" in row
        if fields or (text and text[0] != "#"):
            begin = begin if row else number
            row |= fields if fields else _penman_line(row, text, path, number)
    if row:
        yield _penman_row(row, path, begin)


def _penman_fields(comment: str) -> dict[str, str]:
    """The sentence is the rest of its line; an id ends at the next field."""
    marks = list(_PENMAN_FIELD.finditer(comment))
    found: dict[str, str] = {}
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        if mark[1] == "snt":
            return {**found, "sentence": comment[mark.end() :].strip()}
        if mark[1] == "id":
            found["id"] = comment[mark.end() : following.start() if following else None].strip()
    return found


def _penman_line(row: dict[str, Any], text: str, path: Path, line: int) -> dict[str, str]:
    if "graph" not in row and text[0] != "(":
        raise DataError(
            f"neither a comment nor the beginning of a graph: {shortened(text, 40)!r}",
            path=path,
            line=line,
            help='a text file is read as PENMAN: "# ::snt SENTENCE", the graph in parentheses, a blank line',
        )
    return {"graph": f"{row['graph']}\n{text}" if "graph" in row else text}


def _penman_row(row: dict[str, Any], path: Path, line: int) -> Placed:
    if not row.get("sentence"):
        raise DataError(
            "a graph without its sentence" if "graph" in row else "a block without a sentence",
            path=path,
            line=line,
            help='write "# ::snt SENTENCE" above the graph',
        )
    return Placed({name: row[name] for name in ("id", "sentence", "graph") if name in row}, str(path), line)


READERS: dict[str, Callable[[Path], Iterator[Placed]]] = {
    ".jsonl": read_jsonl,
    ".json": read_json,
    ".parquet": read_parquet,
    ".csv": read_csv,
    ".penman": read_penman,
    ".txt": read_penman,
}
"""File ending → reader."""
NAMED_ONLY = (".txt",)
"""Endings that are read where the file is named: in a directory such a file may be a licence or a note."""


def _problem(error: json.JSONDecodeError) -> str:
    return f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"


def _refuse_other_kinds(path: Path) -> None:
    """Compressed and binary files that carry the name of a text file."""
    with open(path, "rb") as file:
        head = file.read(1024)
    for signature, (what, help_text) in _SIGNATURES.items():
        if head.startswith(signature):
            raise DataError(f"this is {what}, not {path.suffix} text", path=path, help=help_text)
    if b"\0" in head:
        raise DataError(
            f"this is binary data, not {path.suffix} text", path=path, help="give the file the ending of what it is"
        )


def _utf8(data: bytes, path: Path, line: int | None) -> str:
    """Text without a byte-order mark; `line` is that of `data`, or None to count lines from its start."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        cut = error.end == len(data) and error.reason == "unexpected end of data"
        raise DataError(
            f"not UTF-8 text: the byte 0x{data[error.start]:02x} (column {column})",
            path=path,
            line=line or before.count(b"\n") + 1,
            help="the file ends inside a character: was it cut off?" if cut else "save the file as UTF-8",
        ) from None
