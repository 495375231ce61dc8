"""Readers of other people's files: bounded in size, and every failure becomes a message with the file's name.

A file can be a pipe that never ends, a gigabyte, or JSON that exceeds the limit of Python's parser; and a library that
reads one may raise anything. All readers use these functions.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any

from surefit.core.env import first_line
from surefit.core.errors import SureFitError
from surefit.core.units import MIB, printable, truncate_text

JSON_BYTES = 256 * MIB
"""Largest JSON file in bytes: a tokenizer.json has up to 35 MB."""
JSON_DEPTH = 100
"""Largest nesting depth of brackets."""


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading.

    Raises:
        OSError: it cannot be read, or is a pipe or a device; the reason is in `strerror`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # opening a pipe without a writer would block
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return open(descriptor, "rb")
    os.close(descriptor)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "not a regular file", str(path))


def read_bytes(path: Path, limit: int = JSON_BYTES) -> bytes:
    """Read a regular file's content.

    Raises:
        OSError: see `open_file`; or it is larger than `limit` bytes.
    """
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"{size:,} bytes; the limit is {limit:,}", str(path))
        return file.read(limit)


def parse_json(text: str | bytes, *, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON; every failure is a `ValueError`: not UTF-8, nested too deeply, thousands of digits."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError(f"nested more than {JSON_DEPTH} levels deep") from None
    if text.count("[") + text.count("{") > JSON_DEPTH and deeper_than(value, JSON_DEPTH):
        raise ValueError(f"nested more than {JSON_DEPTH} levels deep")
    return value


def read_json_file(path: Path, limit: int = JSON_BYTES) -> Any:
    """Read the value in a JSON file.

    Raises:
        OSError: see `read_bytes`. ValueError: see `parse_json`.
    """
    return parse_json(read_bytes(path, limit))


def deeper_than(value: Any, limit: int) -> bool:
    """Return whether a JSON value is nested more than `limit` levels deep; does not recurse."""
    level = [value]
    for _ in range(limit):
        if not level:
            return False
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner.extend(item.values())
            elif isinstance(item, list):
                inner.extend(item)
        level = [item for item in inner if isinstance(item, (dict, list))]
    return any(isinstance(item, (dict, list)) for item in level)


@contextmanager
def library_errors(path: str | Path, kind: type[SureFitError], problem: str, help: str) -> Iterator[None]:
    """Turn any exception of a library that reads a user's file into `kind`, with the file and the library's message.

    Exceptions that are not about the file pass: our own errors, an interruption, out of memory.
    """
    try:
        yield
    except (SureFitError, MemoryError):
        raise
    except BaseException as error:
        # A panic of a Rust library is no Exception; torch's OutOfMemoryError is a RuntimeError.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        if type(error).__name__ == "OutOfMemoryError":
            raise
        raise kind(f"{problem}: {reason_of(error)}", path=path, help=help) from error


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error as one short line without secrets."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = first_line(error) if isinstance(error, Exception) else str(error).partition("\n")[0]
    message = text if isinstance(error, (ValueError, OSError, RuntimeError)) else f"{type(error).__name__}: {text}"
    return truncate_text(printable(message), 300)
