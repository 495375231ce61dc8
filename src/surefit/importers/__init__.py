"""Other tools' configs, read into SureFit's terms: one file per tool, each mostly a table.

found = read(Path("axolotl.yml"))
found.setup   # what the rules judge
found.loaded  # the SureFit config it maps to
found.lost    # the keys that have no place in one, and why

A Python script and a requirements file are read too: the first by its syntax tree, never run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from surefit.config.load import read_text
from surefit.core.errors import ConfigError
from surefit.importers.configs import MODULES, UNKNOWN, parse, read_config, takes
from surefit.importers.recognise import flat_keys, other_schema, recognise
from surefit.importers.requirements import is_conda_list, is_requirements, read_requirements
from surefit.importers.result import Foreign, Lost

__all__ = ["Foreign", "Lost", "detect", "read", "tool_of"]

KNOWN = (
    "known are SureFit's own configs, those of axolotl, llamafactory (its `train` command), trl, accelerate and "
    "deepspeed, PEFT's adapter_config.json, SLURM batch scripts, Python training scripts, and requirements"
)
SHELL = (".sh", ".bash", ".sbatch", ".slurm")
_SCRIPT = re.compile(r"\A#!.*\b(?:ba|da|k|z)?sh\b|^#SBATCH\b", re.MULTILINE)
_IMAGE = re.compile(r"(?:\s+|#[^\n]*\n|ARG [^\n]*\n)*+FROM [^\s:=]\S*[ \t]*(?:AS \w+[ \t]*)?\n", re.IGNORECASE)


def tool_of(path: Path) -> str | None:
    """Whose config this is, as `detect` says; None where it cannot be read, or is empty.

    Raises:
        ConfigError: it is a mapping, and no config of a tool that SureFit knows.
    """
    try:
        return detect(path)
    except ConfigError as error:
        named = path.suffix == ".py" or is_requirements(path)
        if named or error.message.startswith((UNKNOWN, "not valid JSON")):
            raise
        return None


def detect(path: Path) -> str:
    """Whose config this is: surefit, axolotl, llamafactory, trl, accelerate, deepspeed, peft, slurm, python (a script
    that trains) or requirements.

    The tool whose keys the file has most of, among those of whose marks it has one.

    Raises:
        ConfigError: it is none of them, or not readable.
    """
    if path.suffix == ".py":
        return "python"
    if is_requirements(path):
        return "requirements"
    text = read_text(path)
    if _SCRIPT.search(text) or path.suffix in SHELL:
        return "slurm"
    if "Dockerfile" in path.name or _IMAGE.match(text):
        raise ConfigError(f"{UNKNOWN}: this is a Dockerfile", code="E3901", path=path, help=KNOWN)
    if path.suffix == ".txt" and is_conda_list(text):
        return "requirements"
    tree = parse(text, path, {})[0]
    if isinstance(tree, dict) and isinstance(tree.get("dependencies"), list) and tree.keys() & {"channels", "name"}:
        return "requirements"
    other = other_schema(tree) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and other is None and (flat := flat_keys(tree)):
        raise _without_sections(flat, path)
    found = recognise(tree, takes) if isinstance(tree, dict) and other is None else None
    if not isinstance(tree, dict | list):
        raise ConfigError("holds no keys", code="E3001", path=path, help=KNOWN)
    if found is None:
        raise ConfigError(
            UNKNOWN + (f": {other}" if other else ""),
            code="E3002",
            path=path,
            help=KNOWN,
        )
    return found


def _without_sections(flat: dict[str, str], path: Path) -> ConfigError:
    """What to write in place of keys that stand at the top of a file and belong into SureFit's sections."""
    places = "; ".join(f"{key}: {dotted}" for key, dotted in flat.items() if key != dotted)
    return ConfigError(
        f"{UNKNOWN}, and its keys lack the sections of a SureFit config",
        code="E3550",
        path=path,
        help="if it is meant for SureFit, write each key in its section, such as `train: {learning_rate: 2e-4}` "
        f"({places}); `surefit init` writes a whole config",
    )


def read(path: Path, tool: str | None = None) -> Foreign:
    """Read another tool's config.

    Args:
        path: the file.
        tool: whose it is; found out where it is not given.

    Raises:
        ConfigError: it cannot be parsed, or is not another tool's. What is wrong with single values is returned.
    """
    tool = tool or detect(path)
    if tool == "slurm":
        from surefit.importers.slurm import read_script

        return read_script(path)
    if tool == "python":
        from surefit.importers.python import read_python

        return read_python(path)
    if tool == "requirements":
        return read_requirements(path)
    if tool not in MODULES:
        raise ConfigError(
            f"there is no reader for {tool!r}",
            code="E3003",
            path=path,
            help=f"known are {', '.join([*MODULES, 'slurm'])}",
        )
    found = read_config(path, tool)
    return _with_scripts(found) if tool == "accelerate" else found


def _with_scripts(found: Foreign) -> Foreign:
    """What an Accelerate config says, with the model of the one script that is launched with it."""
    from surefit.importers.joined import scripts_under, together
    from surefit.importers.python import read_python

    scripts = set(scripts_under(found.path))
    if len(scripts) != 1:
        return found
    try:
        setup = read_python(scripts.pop()).setup
    except ConfigError:
        return found
    return replace(found, setup=together(found.setup, [(setup, ("base_model", "base_revision"))]))
