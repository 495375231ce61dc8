"""The files and directories that a config names and a run reads: what no command may write over."""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import AfterValidator, BaseModel

from surefit.config.schema import Config, PathText
from surefit.core.rundir import RunDir

WRITTEN = ("output_dir", "data.prepared")
"""Keys that name what a run writes."""
_PATH_MARK = get_args(PathText)[1]


def input_files(config: Config, path: Path | None = None) -> dict[str, Path]:
    """Name → file or directory, for all that a config names and that is there.

    Keys are found by their type, `PathText`, so that a new one is not missed.

    Args:
        config: the config.
        path: its own file.
    """
    found = {"the config": path} if path is not None else {}
    for key, text in _named(config):
        if key not in WRITTEN:
            found |= row_files(key if key not in found else f"{key} ({text})", text)
    return found


def overwritten_inputs(config: Config, run: RunDir, path: Path | None = None) -> dict[str, Path]:
    """Name → file or directory that a run would write over, or delete with --overwrite: what it reads is where one of
    its own artefacts belongs.

    Args:
        config: the run's.
        run: its directory.
        path: the config's own file, which may be the record of a run that is there.
    """
    found = input_files(config, None if path and _real(path) == _real(run.resolved) and run.events.exists() else path)
    places = [_real(place) for place in run.artefacts()]
    return {name: each for name, each in found.items() if any(_real(each).is_relative_to(place) for place in places)}


def row_files(name: str, text: str) -> dict[str, Path]:
    """Name → file or directory, for what a text names on this machine: a path, or the files that match a pattern."""
    paths = _paths(text)
    return {name if len(paths) == 1 else f"{name} ({each})": Path(each) for each in paths}


def _named(section: BaseModel, above: str = "") -> Iterator[tuple[str, str]]:
    """(dotted key, text) of every text whose type is `PathText`, in mappings too."""
    for name, field in type(section).model_fields.items():
        key, value = f"{above}{name}", getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _named(value, f"{key}.")
        elif isinstance(value, str) and (_is_path(field.annotation) or _PATH_MARK in field.metadata):
            yield key, value
        elif isinstance(value, dict):
            types = get_args(field.annotation)
            for place, kind in enumerate(types):
                if _is_path(kind):
                    yield from ((key, pair[place]) for pair in value.items() if isinstance(pair[place], str))


def _is_path(annotation: Any) -> bool:
    if isinstance(annotation, AfterValidator):
        return annotation is _PATH_MARK
    return any(_is_path(part) for part in get_args(annotation))


def _paths(text: str) -> list[str]:
    """What is there of that name, or matches the pattern."""
    try:
        path = os.path.expanduser(text)
        if os.path.exists(path):
            return [path]
        return sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    except (OSError, ValueError):
        return []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))
