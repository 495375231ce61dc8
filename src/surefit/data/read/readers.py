"""One reader per text format: a stream of bytes → rows with their places; malformed input raises with its line.

Rows of JSON Lines, CSV and plain text are identified by their line, rows of a JSON array by their number. The first
three hold one row at a time; a JSON array and blocks of PENMAN are read whole. columnar.py has Parquet and Arrow.
"""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from io import BufferedReader, StringIO
from typing import Any, NamedTuple, NoReturn, Protocol

from surefit.core.errors import DataError
from surefit.core.reading import deeper_than
from surefit.core.units import GIB, KIB, MIB, bytes_text, truncate_text
from surefit.data.read.file_io import file_extensions
from surefit.facts.hardware import ram_bytes
from surefit.metrics.strict_json import json_kind

MAX_DEPTH = 100
"""Nesting levels allowed in one row. Real rows have fewer than 20; Python's own limit varies and its error is
unclear."""

ROW_BYTES = 8 * MIB
"""Maximum bytes of one row. A novel has a tenth of it; the tokenizer needs four hundred times the memory of the
text."""
WHOLE_BYTES = 8 * GIB
"""Maximum bytes of a file that is not read line by line."""

HEAD = 64 * KIB
"""Bytes at the beginning of a file by which its kind is detected."""

_SIGNATURES = {
    b"\x1f\x8b": ("compressed with gzip", "give it the extension .gz: it is decompressed while it is read"),
    b"\x28\xb5\x2f\xfd": ("compressed with zstd", "give it the extension .zst: it is decompressed while it is read"),
    b"BZh": ("compressed with bzip2", "unpack it first: bunzip2 -k FILE"),
    b"\xfd7zXZ": ("compressed with xz", "unpack it first: unxz -k FILE"),
    b"PK\x03\x04": ("a ZIP archive or a spreadsheet", "unpack it, or export it as CSV"),
    b"PAR1": ("a Parquet file", "give it the extension .parquet"),
    b"\xff\xfe": ("UTF-16 text", "save it as UTF-8"),
    b"\xfe\xff": ("UTF-16 text", "save it as UTF-8"),
}


class RowWithPlace(NamedTuple):
    """A row and the place it was read from: `line` is None where `path` already contains "file row N"."""

    row: dict[str, Any]
    path: str
    line: int | None


class ByteLines(Protocol):
    """The byte stream methods that the line readers need."""

    def peek(self, size: int = ..., /) -> bytes:
        """Return the next bytes without consuming them."""

    def readline(self, size: int, /) -> bytes:
        """Return the next line, or its first `size` bytes."""


def read_jsonl_rows(file: ByteLines, name: str, first: int = 1, size: int | None = None) -> Iterator[RowWithPlace]:
    """Read JSON Lines: one object per line; a byte-order mark, CRLF and blank lines are allowed.

    Args:
        file: stream at the beginning of line `first`.
        name: name of the file, for messages.
        first: 1-based number of the first line.
        size: bytes to read; None reads to the end.
    """
    for number, text in _lines(file, name, first, size):
        if text:
            yield RowWithPlace(_line_row(text, name, number), name, number)


def _lines(file: ByteLines, name: str, first: int, size: int | None) -> Iterator[tuple[int, str]]:
    """Yield (number, text without the white space at its end) of each line."""
    _refuse_other_kinds(file, name)
    number = first
    while (size is None or size > 0) and (data := file.readline(ROW_BYTES + 1)):
        require_size(len(data), name, number)
        yield number, _utf8(data, name, number).rstrip()
        number += 1
        size = None if size is None else size - len(data)


def require_size(size: int, place: object, line: int | None = None) -> None:
    """Raise if a row, or a text in it, has more than `ROW_BYTES`."""
    if size > ROW_BYTES:
        raise DataError(
            f"a row of more than {bytes_text(ROW_BYTES)}",
            code="E4086",
            path=str(place),
            line=line,
            help="split the text into several rows, or remove the row: it is longer than any model's context",
        )


def _line_row(text: str, path: str, line: int) -> dict[str, Any]:
    try:
        row = _decode(text, path, line)
    except json.JSONDecodeError as error:
        array = text.lstrip().startswith("[") and line == 1
        raise DataError(
            f"{_problem(error)} (column {error.colno})",
            code="E4087",
            path=path,
            line=line,
            help=_ARRAY_HELP if array else "every line of a JSON Lines file must be one complete JSON object",
        ) from None
    if not isinstance(row, dict):
        raise DataError(
            f"a row must be a JSON object, not {json_kind(row)}",
            code="E4088",
            path=path,
            line=line,
            help=_ARRAY_HELP if isinstance(row, list) and line == 1 else None,
        )
    return row


_ARRAY_HELP = "a file that is one JSON array needs the extension .json"


def read_json_rows(file: BufferedReader, name: str) -> Iterator[RowWithPlace]:
    """Read a JSON array of objects, a single object, or one object per line, as in many `.json` files."""
    _refuse_other_kinds(file, name)
    start = file.readline(ROW_BYTES + 1)
    if is_object(start):
        return read_jsonl_rows(_ReplayedStream(start, file), name)
    text = _utf8(start + _read_rest(file, name), name, None)
    try:
        value = _decode(text, name, None)
    except json.JSONDecodeError as error:
        message = f"{_problem(error)} (column {error.colno})"
        raise DataError(
            message, code="E4089", path=name, line=error.lineno, help="a JSON file must be an array of objects"
        ) from None
    return _numbered(value if isinstance(value, list) else [value], name)


class _ReplayedStream:
    """A stream whose first line is returned again."""

    def __init__(self, start: bytes, file: ByteLines) -> None:
        self._start, self._file = start, file

    def peek(self, size: int = 0) -> bytes:
        return self._start[:HEAD]

    def readline(self, size: int) -> bytes:
        data, self._start = self._start, b""
        return data or self._file.readline(size)


def is_object(line: bytes) -> bool:
    """Return whether a line is a row of JSON Lines."""
    try:
        return line.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" and isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _numbered(rows: list[Any], path: str) -> Iterator[RowWithPlace]:
    for number, row in enumerate(rows, start=1):
        place = f"{path} row {number}"
        require_size(count_characters(row), place)
        if not isinstance(row, dict):
            raise DataError(f"a row must be a JSON object, not {json_kind(row)}", code="E4090", path=place)
        yield RowWithPlace(row, place, None)


def _not_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON; write null")


class _RepeatedKey(ValueError):
    """An object with a duplicate key: Python would keep the last value, Arrow raises."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        raise _RepeatedKey(next(key for n, (key, _) in enumerate(pairs) if key in dict(pairs[:n])))
    return value


_DECODER = json.JSONDecoder(parse_constant=_not_json, object_pairs_hook=_unique)


def _decode(text: str, path: str, line: int | None) -> Any:
    """Return the value of a JSON text.

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
        raise DataError(f"nested more than {MAX_DEPTH} levels deep", code="E4091", path=path, line=line, help=_FLATTER)
    return value


def _undecodable(error: Exception, path: str, line: int | None) -> DataError:
    if isinstance(error, RecursionError):
        return DataError(f"nested more than {MAX_DEPTH} levels deep", code="E4092", path=path, line=line, help=_FLATTER)
    if isinstance(error, UnicodeEncodeError):
        message = "half of a surrogate pair (\\ud800 to \\udfff), which is not a character"
        return DataError(
            message, code="E4093", path=path, line=line, help="remove it: the text was cut inside a character"
        )
    if isinstance(error, _RepeatedKey):
        return DataError(
            f"the key {truncate_text(repr(str(error)))} occurs twice in one object",
            code="E4140", path=path, line=line, help="keep one of the two",
        )  # fmt: skip
    if "digits" in str(error):
        return DataError(
            "an integer with thousands of digits", code="E4094", path=path, line=line, help="write it as a string"
        )
    return DataError(str(error), code="E4095", path=path, line=line)


_FLATTER = "store the deeply nested part as a string of JSON"


def read_csv(file: BufferedReader, name: str) -> Iterator[RowWithPlace]:
    """Read comma-separated values with a header line; every value is text. A quoted value may hold line breaks."""
    _refuse_other_kinds(file, name)
    reader = csv.reader(_csv_lines(file, name), strict=True)
    header, line = None, 1
    while (cells := _csv_cells(reader, name, line)) is not None:
        if cells and header is None:
            header = _csv_header(cells, name, line)
        elif cells and header is not None:
            require_size(sum(map(len, cells)), name, line)
            yield RowWithPlace(_csv_row(header, cells, name, line), name, line)
        line = reader.line_num + 1


def _csv_lines(file: BufferedReader, name: str) -> Iterator[str]:
    for number, data in enumerate(iter(lambda: file.readline(ROW_BYTES + 1), b""), start=1):
        require_size(len(data), name, number)
        text = _utf8(data, name, number)
        # A carriage return by itself ends a line too.
        yield from StringIO(text, newline="") if "\r" in text[:-2] else (text,)


def _csv_cells(reader: Any, name: str, line: int) -> list[str] | None:
    """Return the next row's cells; None at the end. csv's size limit is global, so it is set only for this call."""
    limit = csv.field_size_limit(ROW_BYTES)
    try:
        return next(reader, None)
    except csv.Error as error:
        raise DataError(
            f"not valid CSV: {error}",
            code="E4096",
            path=name,
            line=line,
            help='put a value with commas, quotes or line breaks in quotes, and double a quote inside it: ""',
        ) from None
    finally:
        csv.field_size_limit(limit)


def _csv_header(cells: list[str], path: str, line: int) -> list[str]:
    for separator, word in ((";", "semicolons"), ("\t", "tabs")):
        if len(cells) == 1 and separator in cells[0]:
            raise DataError(
                f"the values are separated by {word}, not commas",
                code="E4097",
                path=path,
                line=line,
                help="export it with commas",
            )
    repeated = [cell for cell, count in Counter(cells).items() if count > 1]
    if repeated:
        problem = f"the header names the column {repeated[0]!r} twice"
        raise DataError(problem, code="E4098", path=path, line=line, help="give every column its own name")
    return cells


def _csv_row(header: list[str], cells: list[str], path: str, line: int) -> dict[str, Any]:
    if len(cells) != len(header):
        raise DataError(
            f"{len(cells)} values where the header names {len(header)} columns",
            code="E4099",
            path=path,
            line=line,
            help="put values that hold commas in quotes",
        )
    return dict(zip(header, cells, strict=True))


def count_characters(value: Any) -> int:
    """Return the number of characters of all texts in a row; does not recurse."""
    count, stack = 0, [value]
    while stack:
        item = stack.pop()
        if isinstance(item, (str, bytes)):
            count += len(item)
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, list):
            stack += item
    return count


def available_row_bytes() -> int:
    """Return the bytes available for rows: half of the memory of the machine or container, and at most the free
    memory."""
    limits = [(ram_bytes() or sys.maxsize) // 2]
    with suppress(OSError), open("/proc/meminfo", encoding="ascii") as file:
        limits += [int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:")]
    return min(limits)


TOO_MANY = "tokenize them with surefit prepare, which streams them, or use fewer rows or more memory"


def require_row_memory(needed: int, place: str, rows: int) -> None:
    """Raise if the rows need more memory than there is."""
    if needed > (limit := available_row_bytes()):
        raise DataError(
            f"its {rows:,} rows take at least {bytes_text(needed)} of memory once decoded, and only "
            f"{bytes_text(limit)} are available",
            code="E4100",
            path=place,
            help=TOO_MANY,
        )


def _read_rest(file: BufferedReader, name: str) -> bytes:
    """Read the rest of a file at once: its bytes, its text and its rows are in memory together."""
    limit = min(WHOLE_BYTES, available_row_bytes() // 3)
    data = file.read(limit + 1)
    if len(data) > limit:
        raise DataError(
            f"more than {bytes_text(limit)}, and a JSON array or PENMAN file is read whole: not enough memory",
            code="E4101",
            path=name,
            help="write it as JSON Lines, which are read one by one: jq -c '.[]' FILE.json > FILE.jsonl",
        )
    return data


_PENMAN_MARK = re.compile(rb"^[ \t]*#[ \t]*::\w", re.MULTILINE)
_NO_COMMENT = re.compile(rb"^[ \t]*[^#\s]", re.MULTILINE)


def is_penman(head: bytes) -> bool:
    """Return whether a text file holds PENMAN blocks: a field such as "# ::snt" near its beginning, or only
    comments."""
    head = head.removeprefix(b"\xef\xbb\xbf")
    return bool(_PENMAN_MARK.search(head)) or not _NO_COMMENT.search(head)


def read_text(file: BufferedReader, name: str, first: int = 1, size: int | None = None) -> Iterator[RowWithPlace]:
    """Read plain text, one document per line as `datasets` does, skipping blank lines; or blocks of PENMAN.

    Args:
        file, name, first, size: as in `read_jsonl_rows`.
    """
    if first == 1 and size is None and is_penman(file.peek(HEAD)[:HEAD]):
        yield from read_penman(file, name)
        return
    for number, text in _lines(file, name, first, size):
        if text:
            yield RowWithPlace({"text": text}, name, number)


_PENMAN_FIELD = re.compile(r"::(\S+)[ \t]*")


def read_penman(file: BufferedReader, path: str) -> Iterator[RowWithPlace]:
    """Read blocks of PENMAN in the AMR bank's layout: "# ::id …" and "# ::snt …", then a graph of several lines.

    Rows have `id` (if present), `sentence` and `graph`; a block without a graph is a sentence to be parsed. "#::snt"
    without a space, other fields and other comments are allowed, and a blank line may be missing between two blocks.
    """
    _refuse_other_kinds(file, path)
    row: dict[str, Any] = {}
    begin, ended = 1, False
    for number, text in enumerate(_utf8(_read_rest(file, path), path, None).splitlines(), start=1):
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
    """Return the fields of a comment: the sentence is the rest of its line, an id ends at the next field."""
    marks = list(_PENMAN_FIELD.finditer(comment))
    fields: dict[str, str] = {}
    for mark, following in zip(marks, [*marks[1:], None], strict=False):
        if mark[1] == "snt":
            return {**fields, "sentence": comment[mark.end() :].strip()}
        if mark[1] == "id":
            fields["id"] = comment[mark.end() : following.start() if following else None].strip()
    return fields


def _penman_line(row: dict[str, Any], text: str, path: str, line: int) -> dict[str, str]:
    if "graph" not in row and text[0] != "(":
        raise DataError(
            f"neither a comment nor the beginning of a graph: {truncate_text(text, 40)!r}",
            code="E4102",
            path=path,
            line=line,
            help='a text file is read as PENMAN: "# ::snt SENTENCE", the graph in parentheses, a blank line',
        )
    return {"graph": f"{row['graph']}\n{text}" if "graph" in row else text}


def _penman_row(row: dict[str, Any], path: str, line: int) -> RowWithPlace:
    if not row.get("sentence"):
        raise DataError(
            "a graph without its sentence" if "graph" in row else "a block without a sentence",
            code="E4103",
            path=path,
            line=line,
            help='write "# ::snt SENTENCE" above the graph',
        )
    return RowWithPlace({name: row[name] for name in ("id", "sentence", "graph") if name in row}, str(path), line)


LINE_READERS: dict[str, Callable[[BufferedReader, str, int, int | None], Iterator[RowWithPlace]]] = {
    ".jsonl": read_jsonl_rows,
    ".txt": read_text,
}
"""File ending → reader of formats that may be read from any line."""
FILE_READERS: dict[str, Callable[[BufferedReader, str], Iterator[RowWithPlace]]] = {
    ".json": read_json_rows,
    ".csv": read_csv,
    ".penman": read_penman,
}
"""File ending → reader of formats that are read from their beginning."""
ENDINGS = (".jsonl", ".json", ".parquet", ".csv", ".penman", ".txt", ".arrow")
"""Endings of the files that can be read."""
NAMED_ONLY = (".txt",)
"""Endings that are read only where the file is named: in a directory such a file may be a license or a note."""


def _problem(error: json.JSONDecodeError) -> str:
    return f"not valid JSON: {error.msg[:1].lower()}{error.msg[1:]}"


def _refuse_other_kinds(file: ByteLines, name: str) -> None:
    """Raise for compressed and binary files with the name of a text file."""
    head, ending = file.peek(1024)[:1024], file_extensions(name)[0]
    for signature, (kind, help_text) in _SIGNATURES.items():
        if head.startswith(signature):
            raise DataError(f"this is {kind}, not {ending} text", code="E4104", path=name, help=help_text)
    if b"\0" in head:
        raise DataError(
            f"this is binary data, not {ending} text",
            code="E4105",
            path=name,
            help="give the file the extension of its real format",
        )


def _utf8(data: bytes, path: str, line: int | None) -> str:
    """Decode text without its byte-order mark; `line` is the line of `data`, or None to count lines from its start."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        before = data[: error.start]
        column = len(before[before.rfind(b"\n") + 1 :].decode("utf-8")) + 1
        cut = error.end == len(data) and error.reason == "unexpected end of data"
        raise DataError(
            f"not UTF-8 text: the byte 0x{data[error.start]:02x} (column {column})",
            code="E4106",
            path=path,
            line=line or before.count(b"\n") + 1,
            help="the file ends inside a character: check that it is complete" if cut else "save the file as UTF-8",
        ) from None
