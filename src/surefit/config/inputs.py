"""Files and directories that a config names and a run reads: no command may overwrite them."""

from __future__ import annotations

import glob
import os
from collections.abc import Sequence
from pathlib import Path

from surefit.config.schema import SureFitConfig, path_texts
from surefit.core.rundir import RunDir

WRITTEN = ("output_dir", "data.tokenized")
"""Keys that name the run's outputs."""


def input_files(config: SureFitConfig, path: Path | None = None) -> dict[str, Path]:
    """Return name → file or directory, for all existing inputs that a config names.

    Keys are found by their type, `PathText`, so that a new key is not missed.

    Args:
        config: the config.
        path: the config's own file.
    """
    inputs = {"the config": path} if path is not None else {}
    for key, text in path_texts(config):
        if key not in WRITTEN:
            inputs |= row_files(key if key not in inputs else f"{key} ({text})", text)
    return inputs


def overwritten_inputs(
    config: SureFitConfig, run: RunDir, path: Path | None = None, written: Sequence[Path] = ()
) -> dict[str, Path]:
    """Return name → input file or directory that a run would overwrite, or delete with --overwrite: inputs that lie at
    or inside one of the run's own artifacts.

    Args:
        config: the run's config.
        run: the run's directory.
        path: the config's own file, which may be the record of an existing run.
        written: the artifacts that are written now; by default all of the run's.
    """
    inputs = input_files(config, None if path and _real(path) == _real(run.resolved) and run.events.exists() else path)
    artifacts = [_real(artifact) for artifact in written or run.artefacts()]
    return {
        name: file
        for name, file in inputs.items()
        if any(_real(file).is_relative_to(artifact) for artifact in artifacts)
    }


def row_files(name: str, text: str) -> dict[str, Path]:
    """Return name → file or directory on this machine for a text: a path, or the files that match a glob pattern."""
    paths = _paths(text)
    return {name if len(paths) == 1 else f"{name} ({path})": Path(path) for path in paths}


def _paths(text: str) -> list[str]:
    """Return the path if it exists, otherwise the paths that match the pattern."""
    try:
        path = os.path.expanduser(text)
        if os.path.exists(path):
            return [path]
        return sorted(glob.glob(path, recursive=True)) if glob.has_magic(path) else []
    except (OSError, ValueError):
        return []


def _real(path: Path) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))
