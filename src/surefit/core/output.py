"""Rules on what a command may overwrite, in one place for every command that writes a file or a directory.

- Never its own input: the config, the rows, a model or an adapter, whatever the flags, and under any name: a relative
  path, a link or a second name of the same file.
- Never into a directory whose files are its input: the new file would be read as one of them the next time.
- An existing output only with `--overwrite`, if the command has it, or if the same command wrote it earlier, which its
  content shows; an empty file may always be replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from surefit.core.errors import ConfigError, MachineError
from surefit.core.reading import read_json_file

Recognized = Callable[[Path], bool]
"""Function that returns whether the same command wrote a file or directory earlier."""
OPENING_BYTES = 1024 * 1024
"""Bytes that are read to recognize a file by its beginning."""


def output_file(
    path: Path,
    inputs: Mapping[str, Path] | None = None,
    overwrite: bool = False,
    *,
    earlier: Recognized | None = None,
    directory: bool = False,
    as_rows: bool = False,
    option: str = "--output",
    help: str | None = None,
) -> Path:
    """Return `path` if it may be written.

    Args:
        path: the file to write, or the directory to replace.
        inputs: the files and directories that the command reads, by the name for messages.
        overwrite: the user allows replacing an existing output.
        earlier: recognizes an earlier output of the same command, which may be replaced.
        directory: the output is a directory.
        as_rows: the file has a suffix of row files, so that a directory of rows would be read with it.
        option: the command-line option of the path.
        help: advice if something else exists at the path.

    Raises:
        ConfigError: it is an input, lies in one or contains one; or something else exists at the path.
    """
    path = Path(path)
    for name, input_path in (inputs or {}).items():
        _require_other(path, name, input_path, overwrite, directory, as_rows, option)
    try:
        exists = os.path.lexists(path)
        empty = exists and (not any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size == 0)
    except OSError as error:
        raise MachineError(
            f"cannot be inspected: {error.strerror}", code="E1602", path=path, field=option, help="choose another path"
        ) from None
    if not exists:
        return path
    if path.is_dir() != directory or not (directory or path.is_file() or path.is_symlink()):
        problem = "is a directory" if path.is_dir() else "is a file" if path.is_file() else "is not a regular file"
        expected = "a directory" if directory else "a file"
        raise ConfigError(problem, code="E1603", path=path, field=option, help=f"name {expected}, or a new name")
    if not (overwrite or empty or (earlier is not None and earlier(path))):
        raise ConfigError(
            f"there is a {'directory' if directory else 'file'} of that name",
            code="E1604",
            path=path,
            field=option,
            help=help or "choose another name, or delete it first",
        )
    return path


def _require_other(
    path: Path, name: str, read: Path, overwrite: bool, directory: bool, as_rows: bool, option: str
) -> None:
    """Raise if the output would overwrite this input or be read as part of it.

    Raises:
        ConfigError: the output is this input, lies directly in it, or is a directory that contains it.
    """
    target, source = _real(path), _real(read)
    if _same(target, source):
        problem = f"this is {name}, an input of this command: it would be overwritten"
    elif source.is_dir() and (as_rows or directory) and _same(target.parent, source):
        problem = f"it would be written into {read}, which is {name}, an input of this command"
    elif overwrite and source.is_dir() and target.exists() and source in target.parents:
        problem = f"this file is in {read}, which is {name}, and would be overwritten"
    elif directory and any(_same(target, folder) for folder in source.parents):
        problem = f"this directory holds {name} ({read}), an input of this command: it would be deleted"
    else:
        return
    raise ConfigError(problem, code="E1605", path=path, field=option, help="choose another path")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))


def _same(one: Path, other: Path) -> bool:
    """Return whether two paths without links are the same file: by name, as hard links, or where case does not
    matter.
    """
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:  # one of them does not exist
        return False


def json_with(*keys: str) -> Recognized:
    """Return a recognizer of JSON objects that have these keys."""

    def recognized(path: Path) -> bool:
        try:
            value = read_json_file(path)
        except (OSError, ValueError):
            return False
        return isinstance(value, dict) and all(key in value for key in keys)

    return recognized


def json_lines_with(*keys: str) -> Recognized:
    """Return a recognizer of JSON Lines whose first record has these keys."""

    def recognized(path: Path) -> bool:
        try:
            with open(path, "rb") as file:
                value = json.loads(file.readline(8 * OPENING_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(value, dict) and all(key in value for key in keys)

    return recognized


def text_with(*parts: str) -> Recognized:
    """Return a recognizer of texts that contain these parts within their first MiB."""

    def recognized(path: Path) -> bool:
        try:
            with open(path, "rb") as file:
                opening = file.read(OPENING_BYTES).decode("utf-8", "replace")
        except OSError:
            return False
        return all(part in opening for part in parts)

    return recognized


def directory_with(*names: str) -> Recognized:
    """Return a recognizer of directories that contain files of these names."""
    return lambda path: all((path / name).is_file() for name in names)
