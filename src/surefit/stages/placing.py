"""Checks that a run's output directories contain none of its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surefit.config.inputs import input_files, overwritten_inputs
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError
from surefit.core.output import output_file
from surefit.core.rundir import RunDir
from surefit.stages.run_context import CheckedRun


def require_inputs_apart(run: CheckedRun, *written: Path) -> None:
    """Raise if a stage would overwrite an input of the config, or delete one with --overwrite.

    Args:
        run: the run.
        written: the artifacts that the stage writes; by default all of the run's.

    Raises:
        ConfigError: it would.
    """
    overwritten: Mapping[str, Path] = overwritten_inputs(run.resolved.config, run.run, run.loaded.path, written)
    for name, path in overwritten.items():
        raise ConfigError(
            f"{name} ({path}) would be overwritten by the run's own files",
            code="E8600",
            path=run.run.path,
            field="output_dir",
            help="choose another output_dir, for example runs/NAME",
        )


def require_new_or_run(directory: RunDir) -> None:
    """Raise if the directory has files in place of a run's artifacts, but no run.

    Raises:
        ConfigError: files or directories that a run would write exist, and no run has written them.
    """
    existing = [path for path in directory.artefacts() if path.is_file() or (path.is_dir() and any(path.iterdir()))]
    if existing and not (directory.resolved.exists() or directory.events.exists()):
        raise ConfigError(
            f"{existing[0].name} exists but was not written by a run: it would be overwritten",
            code="E8601",
            path=directory.path,
            field="output_dir",
            help="choose another output_dir, for example runs/NAME",
        )


def require_shards_apart(config: SureFitConfig, names: Mapping[str, bool], plan: str) -> None:
    """Check every file and directory that `surefit prepare` writes into data.tokenized.

    Args:
        config: the run's config.
        names: the names written there, and whether each is a directory.
        plan: the name that marks the others as shards; if it is damaged, its reader raises.

    Raises:
        ConfigError: one of them is an input of the same config.
    """
    assert config.data.tokenized is not None
    directory, inputs = Path(config.data.tokenized), input_files(config)
    # A plan may have been deleted while complete shards were kept.
    has_shards = (directory / plan).is_file() or any(directory.glob("shard-*/"))
    for name, is_directory in names.items():
        output_file(
            directory / name,
            inputs,
            overwrite=has_shards,
            directory=is_directory,
            as_rows=True,
            option="data.tokenized",
        )
