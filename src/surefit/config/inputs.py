"""The files and directories that a config names and a run reads: what no command may write over."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from surefit.config.schema import Config, path_texts
from surefit.core.rundir import RunDir

WRITTEN = ("output_dir", "data.tokenized")
"""Keys that name what a run writes."""


def input_files(config: Config, path: Path | None = None) -> dict[str, Path]:
    """Name → file or directory, for all that a config names and that is there.

    Keys are found by their type, `PathText`, so that a new one is not missed.

    Args:
        config: the config.
        path: its own file.
    """
    found = {"the config": path} if path is not None else {}
    for key, text in path_texts(config):
        if key not in WRITTEN:
            found |= row_files(key if key not in found else f"{key} ({text})", text)
    return found


def overwritten_inputs(
    config: Config, run: RunDir, path: Path | None = None, written: Sequence[Path] = ()
) -> dict[str, Path]:
    """Name → file or directory that a run would write over, or delete with --overwrite: what it reads is where one of
    its own artefacts belongs.

    Args:
        config: the run's.
        run: its directory.
        path: the config's own file, which may be the record of a run that is there.
        written: of the run's artefacts, what is written now; by default all.
    """
    found = input_files(config, None if path and _real(path) == _real(run.resolved) and run.events.exists() else path)
    places = [_real(place) for place in written or run.artefacts()]
    return {name: each for name, each in found.items() if any(_real(each).is_relative_to(place) for place in places)}


def row_files(name: str, text: str) -> dict[str, Path]:
    """Name → file or directory, for what a text names on this machine: a path, or the files that match a pattern."""
    paths = _paths(text)
    return {name if len(paths) == 1 else f"{name} ({each})": Path(each) for each in paths}


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
