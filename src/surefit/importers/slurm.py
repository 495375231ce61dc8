"""Reader of SLURM batch scripts and other shell scripts: resources, installs, launches, and the launched script."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from surefit.core.errors import SureFitError
from surefit.facts.job_script import JobScript, Launch, read_job_script, setup_of_job
from surefit.facts.setup import SettingLocation, Setup
from surefit.importers import hf, trl
from surefit.importers.config_mapping import ConfigDraft, ToolSchema
from surefit.importers.joined import (
    FROM_CONFIG,
    FROM_SCRIPT,
    apply_accelerate_config,
    find_launched_script,
    merge_setups,
    uses_several_gpus,
)
from surefit.importers.known import SFT_CONFIG, TRAINING_ARGUMENTS
from surefit.importers.python import find_target_releases, read_python
from surefit.importers.python_script import INSTEAD
from surefit.importers.python_source import (
    ParserOptions,
    ScriptSource,
    parse_script,
    script_options,
    takes_training_arguments,
)
from surefit.importers.requirements import stack_of_installs
from surefit.importers.result import ImportedConfig

ENOUGH = 3
"""The least number of a script's arguments named like the Trainer's for which they are read as the Trainer's."""
KEYS = {key: to for key, to in trl.KEYS.items() if key in TRAINING_ARGUMENTS | SFT_CONFIG} | hf.ONCE_IN_5
PLAIN = frozenset({"", "$"})
"""Values of a switch, and of an argument known only at run time."""


def read_shell_script(path: Path) -> ImportedConfig:
    """Return what a shell script requests, installs and launches.

    Raises:
        ConfigError: the file cannot be read.
    """
    job = read_job_script(path)
    launches = [apply_accelerate_config(launch, path) for launch in job.launches]
    job = replace(job, launches=tuple(launch for launch, _ in launches))
    main = job.launch
    script = find_launched_script(main, path) if main else None
    job = replace(job, spreads=uses_several_gpus(script), lacking=tuple(_find_unknown_arguments(job, path)))
    stack, places = stack_of_installs(job.installs, path)
    setup = setup_of_job(job)
    setup = replace(setup, places={**places, **setup.places})
    config = next((accelerate_setup for launch, accelerate_setup in launches if launch is main), None)
    other_setups: list[tuple[Setup, tuple[str, ...]]] = [(config, FROM_CONFIG)] if config else []
    problems: tuple[SureFitError, ...] = ()
    if main:
        source = _source(script)
        arguments = _arguments(main, path, source)
        if arguments is not None:
            setup, problems = _with_arguments(setup, arguments), tuple(arguments.problems)
        if source is not None and script is not None:
            other_setups.append((_setup_of(script), FROM_SCRIPT))
    if (
        config
        and config.processes
        and setup.processes == config.processes
        and not (main and "num_processes" in main.flags)
    ):
        setup = replace(setup, places={**setup.places, "processes": config.places["processes"]})
    return ImportedConfig("slurm", path, merge_setups(setup, other_setups), None, {}, (), job, problems, stack=stack)


def _source(script: Path | None) -> ScriptSource | None:
    try:
        return parse_script(script) if script else None
    except SureFitError:
        return None


def _setup_of(script: Path) -> Setup:
    try:
        return read_python(script).setup
    except SureFitError:
        return Setup("python")


def _find_unknown_arguments(job: JobScript, path: Path) -> Iterator[tuple[str, str, int]]:
    """Yield the arguments of launched scripts that their parsers do not have."""
    for launch in job.launches:
        source = _source(find_launched_script(launch, path))
        options = script_options(source) if source and launch.arguments else None
        for name in launch.arguments if options else ():
            if options and not _takes(options, name) and launch.script:
                yield name, launch.script, launch.lines.get(name, launch.line)


def _takes(options: ParserOptions, name: str) -> bool:
    """Return whether argparse accepts an argument; it also accepts a prefix of an option."""
    return name == "help" or any(option.startswith(name) for option in options.defaults)


def _arguments(launch: Launch, path: Path, source: ScriptSource | None) -> ConfigDraft | None:
    """Return the arguments passed to a script if they are the Trainer's, or None."""
    has_trainer_parser = takes_training_arguments(source) if source else False
    trainer_names = [name for name in launch.arguments if name in TRAINING_ARGUMENTS | SFT_CONFIG or name in INSTEAD]
    if not has_trainer_parser and (
        len(trainer_names) < ENOUGH or (source is not None and script_options(source) is not None)
    ):
        return None
    values = {name: _value(launch.arguments[name]) for name in trainer_names if launch.arguments[name] != "$"}
    values = {name: value for name, value in values.items() if not (isinstance(value, str) and "$" in value)}
    judge = find_target_releases(source) if has_trainer_parser and source else None
    gone = {key: INSTEAD[key] for key in values if judge and key in INSTEAD and _is_gone(judge, key)}
    tool = ToolSchema(
        "trl",
        {key: mapping for key, mapping in KEYS.items() if key not in gone},
        TRAINING_ARGUMENTS | SFT_CONFIG | frozenset(INSTEAD),
        gone,
        finish=_finish,
        conflicts=trl.TOOL.conflicts,
        open_sections=trl.TOOL.open_sections,
    )
    draft = ConfigDraft(tool, path, values, launch.lines)
    draft.read_all()
    return draft


def _is_gone(judge: Any, key: str) -> bool:
    verdicts = {judge.takes(name, key) for name in ("TrainingArguments", "SFTConfig")}
    return "gone" in verdicts and "taken" not in verdicts


def _finish(draft: ConfigDraft) -> None:
    draft.whole_run = False
    hf.map_warmup(draft, "warmup_steps")
    hf.map_sharding(draft)


def _value(written: str) -> Any:
    if written in PLAIN:
        return True
    try:
        value = yaml.safe_load(written)
    except yaml.YAMLError:
        return written
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return {"True": True, "False": False, "None": None}.get(value, value)
    return value


def _with_arguments(setup: Setup, draft: ConfigDraft) -> Setup:
    """Return the setup with the values of the script's arguments, each at its line of the shell script."""
    names = [name for name in draft.setup if getattr(setup, name) is None]
    places = {name: replace(draft.places[name], name=f"--{draft.places[name].name}") for name in names}
    places |= {
        key: SettingLocation(f"--{key}", str(draft.path), draft.line(key)) for key in (*draft.gone, *draft.ignored)
    }
    return replace(
        setup,
        places={**setup.places, **places},
        gone=dict(draft.gone),
        ignored=dict(draft.ignored),
        **{name: draft.setup[name] for name in names},
    )
