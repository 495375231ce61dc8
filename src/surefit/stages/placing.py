"""Whether the directories that a config names for writing hold nothing that the same config reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from surefit.config.inputs import input_files, overwritten_inputs
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.core.output import output_file
from surefit.core.rundir import RunDir
from surefit.stages.run_context import CheckedRun


def require_inputs_apart(run: CheckedRun, *written: Path) -> None:
    """Require that a stage writes over nothing that the config reads, and deletes none of it with --overwrite.

    Args:
        run: the run.
        written: what of its directory the stage writes; by default everything.

    Raises:
        ConfigError: it would.
    """
    found: Mapping[str, Path] = overwritten_inputs(run.resolved.config, run.run, run.loaded.path, written)
    for name, path in found.items():
        raise ConfigError(
            f"{name} ({path}) is where the run writes files of its own: it would be overwritten",
            code="E8600",
            path=run.run.path,
            field="output_dir",
            help="choose another output_dir, for example runs/NAME",
        )


def require_new_or_run(directory: RunDir) -> None:
    """Raises:
    ConfigError: files or directories that a run would write are there, and no run has written them.
    """
    there = [place for place in directory.artefacts() if place.is_file() or (place.is_dir() and any(place.iterdir()))]
    if there and not (directory.resolved.exists() or directory.events.exists()):
        raise ConfigError(
            f"{there[0].name} is there, and no run has written it: it would be overwritten",
            code="E8601",
            path=directory.path,
            field="output_dir",
            help="choose another output_dir, for example runs/NAME",
        )


def require_shards_apart(config: Config, names: Mapping[str, bool], plan: str) -> None:
    """Look at every file and directory that `surefit prepare` writes into data.tokenized.

    Args:
        config: the run's.
        names: of what is written there, and whether it is a directory.
        plan: of these, the file that says that the others are shards; a damaged one is an error where it is read.

    Raises:
        ConfigError: it is read by the same config.
    """
    assert config.data.tokenized is not None
    directory, inputs = Path(config.data.tokenized), input_files(config)
    # A plan may be deleted, and complete shards are kept.
    planned = (directory / plan).is_file() or any(directory.glob("shard-*/"))
    for name, is_directory in names.items():
        output_file(
            directory / name,
            inputs,
            overwrite=planned,
            directory=is_directory,
            as_rows=True,
            option="data.tokenized",
        )
