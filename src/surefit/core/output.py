"""What a command may write over, decided in one place for every command that writes a file or a directory.

- Never its own input: the config, the rows, a model or an adapter, whatever the flags, and by whatever name: a relative
  path, a link or a second name of the same file.
- Never into a directory whose files are its input: the new file would be read as one of them the next time.
- What is there already only with `--overwrite`, where the command has it, or where it is what the same command wrote
  earlier, which its content shows; an empty file may always be replaced.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

from surefit.core.errors import ConfigError, MachineError
from surefit.core.reading import read_json_file

Recognized = Callable[[Path], bool]
"""Whether a file or directory is what the same command wrote earlier."""
OPENING_BYTES = 1024 * 1024
"""Read of a file that is recognized by how it begins."""


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
        path: the file that is to be written, or the directory that is to be replaced.
        inputs: what the command reads, by the name that a message gives it: files and directories.
        overwrite: the user allows to replace what is there.
        earlier: recognizes an earlier output of the same command, which may be replaced.
        directory: a directory is to be written.
        as_rows: the file ends as rows do, so that a directory of rows would be read with it.
        option: how the user named the path.
        help: what to do where something else is there.

    Raises:
        ConfigError: it is an input, lies in one or holds one; or something else is there.
    """
    path = Path(path)
    for name, read in (inputs or {}).items():
        _require_other(path, name, read, overwrite, directory, as_rows, option)
    try:
        there = os.path.lexists(path)
        empty = there and (not any(path.iterdir()) if path.is_dir() else path.is_file() and path.stat().st_size == 0)
    except OSError as error:
        raise MachineError(
            f"cannot be looked at: {error.strerror}", code="E1602", path=path, field=option, help="name another place"
        ) from None
    if not there:
        return path
    if path.is_dir() != directory or not (directory or path.is_file() or path.is_symlink()):
        what = "is a directory" if path.is_dir() else "is a file" if path.is_file() else "is not a regular file"
        wanted = "a directory" if directory else "a file"
        raise ConfigError(what, code="E1603", path=path, field=option, help=f"name {wanted}, or a new name")
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
    """Raises:
    ConfigError: the output is this input, lies directly in it, or is a directory that holds it.
    """
    place, source = _real(path), _real(read)
    if _same(place, source):
        problem = f"this is {name}, which is read here: it would be overwritten"
    elif source.is_dir() and (as_rows or directory) and _same(place.parent, source):
        problem = f"it would be written into {read}, which is {name} and is read file by file"
    elif overwrite and source.is_dir() and place.exists() and source in place.parents:
        problem = f"this file is in {read}, which is {name}, and would be overwritten"
    elif directory and any(_same(place, folder) for folder in source.parents):
        problem = f"this directory holds {name} ({read}), which is read here: it would be deleted"
    else:
        return
    raise ConfigError(problem, code="E1605", path=path, field=option, help="name another place")


def _real(path: Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))


def _same(one: Path, other: Path) -> bool:
    """Whether two paths without links are one file: by name, or as hard links and where case does not matter."""
    try:
        return one == other or os.path.samefile(one, other)
    except OSError:  # one of them is not there
        return False


def json_with(*keys: str) -> Recognized:
    """A recognizer of JSON objects that have these keys."""

    def recognized(path: Path) -> bool:
        try:
            value = read_json_file(path)
        except (OSError, ValueError):
            return False
        return isinstance(value, dict) and all(key in value for key in keys)

    return recognized


def json_lines_with(*keys: str) -> Recognized:
    """A recognizer of JSON Lines whose first record has these keys."""

    def recognized(path: Path) -> bool:
        try:
            with open(path, "rb") as file:
                value = json.loads(file.readline(8 * OPENING_BYTES))
        except (OSError, ValueError, RecursionError):
            return False
        return isinstance(value, dict) and all(key in value for key in keys)

    return recognized


def text_with(*parts: str) -> Recognized:
    """A recognizer of texts that have these parts within their first MiB."""

    def recognized(path: Path) -> bool:
        try:
            with open(path, "rb") as file:
                opening = file.read(OPENING_BYTES).decode("utf-8", "replace")
        except OSError:
            return False
        return all(part in opening for part in parts)

    return recognized


def directory_with(*names: str) -> Recognized:
    """A recognizer of directories that hold files of these names."""
    return lambda path: all((path / name).is_file() for name in names)
