"""Readers of other tools' configs: one module per tool, each mostly a table of keys.

imported = read_tool_config(Path("axolotl.yml"))
imported.setup   # what the rules check
imported.loaded  # the SureFit config it maps to
imported.lost    # the keys that SureFit cannot express, and why

A Python script and a requirements file are read too; a script is parsed to its syntax tree and never run.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from surefit.config.load import read_config_text
from surefit.core.errors import ConfigError
from surefit.importers.configs import MODULES, UNKNOWN, is_key_known, parse_config_text, read_tool_file
from surefit.importers.recognize import find_unsupported_schema, flat_keys, recognize_tool
from surefit.importers.requirements import is_conda_list, is_requirements, read_requirements
from surefit.importers.result import ImportedConfig, UnmappedKey

__all__ = ["ImportedConfig", "UnmappedKey", "detect_tool", "find_tool", "read_tool_config"]

KNOWN = (
    "supported: SureFit's own configs, configs of axolotl, llamafactory (its `train` command), ms-swift, trl, "
    "accelerate and deepspeed, PEFT's adapter_config.json, OpenAI's fine-tuning jobs, SLURM batch scripts, "
    "Python training scripts, and requirements"
)
TOOL_NAMES = {
    "axolotl": "Axolotl", "llamafactory": "LLaMA-Factory", "trl": "TRL", "accelerate": "Accelerate", "slurm": "SLURM",
    "deepspeed": "DeepSpeed", "peft": "PEFT", "python": "Python", "swift": "ms-swift",
}  # fmt: skip
"""Tools as messages name them."""
SHELL = (".sh", ".bash", ".sbatch", ".slurm")
_SCRIPT = re.compile(r"\A#!.*\b(?:ba|da|k|z)?sh\b|^#SBATCH\b", re.MULTILINE)
_IMAGE = re.compile(r"(?:\s+|#[^\n]*\n|ARG [^\n]*\n)*+FROM [^\s:=]\S*[ \t]*(?:AS \w+[ \t]*)?\n", re.IGNORECASE)


def find_tool(path: Path) -> str | None:
    """Return the tool of a config, like `detect_tool`; None if the file cannot be read or is empty.

    Raises:
        ConfigError: it is a mapping, but no config of a supported tool.
    """
    try:
        return detect_tool(path)
    except ConfigError as error:
        has_known_name = path.suffix == ".py" or is_requirements(path)
        if has_known_name or error.message.startswith((UNKNOWN, "not valid JSON")):
            raise
        return None


def detect_tool(path: Path) -> str:
    """Return the tool of a config: surefit, axolotl, llamafactory, swift, trl, accelerate, deepspeed, peft, slurm,
    python (a training script) or requirements.

    Among the tools with a characteristic key in the file, it is the one that knows most of the file's keys.

    Raises:
        ConfigError: it is none of them, or not readable.
    """
    if path.suffix == ".py":
        return "python"
    if is_requirements(path):
        return "requirements"
    text = read_config_text(path)
    if _SCRIPT.search(text) or path.suffix in SHELL:
        return "slurm"
    if "Dockerfile" in path.name or _IMAGE.match(text):
        raise ConfigError(f"{UNKNOWN}: this is a Dockerfile", code="E3901", path=path, help=KNOWN)
    if path.suffix == ".txt" and is_conda_list(text):
        return "requirements"
    tree = parse_config_text(text, path, {})[0]
    if isinstance(tree, dict) and isinstance(tree.get("dependencies"), list) and tree.keys() & {"channels", "name"}:
        return "requirements"
    unsupported = find_unsupported_schema(tree) if isinstance(tree, dict) else None
    if isinstance(tree, dict) and unsupported is None and (flat := flat_keys(tree)):
        raise _without_sections(flat, path)
    tool = recognize_tool(tree, is_key_known) if isinstance(tree, dict) and unsupported is None else None
    if not isinstance(tree, dict | list):
        raise ConfigError("has no keys", code="E3001", path=path, help=KNOWN)
    if tool is None:
        raise ConfigError(
            UNKNOWN + (f": {unsupported}" if unsupported else ""),
            code="E3002",
            path=path,
            help=KNOWN,
        )
    return tool


def _without_sections(flat: dict[str, str], path: Path) -> ConfigError:
    """Return the error for top-level keys that belong in a section of SureFit's config."""
    destinations = "; ".join(f"{key}: {dotted}" for key, dotted in flat.items() if key != dotted)
    return ConfigError(
        f"{UNKNOWN}, nor does it have the sections of a SureFit config",
        code="E3550",
        path=path,
        help="if it is meant for SureFit, write each key in its section, such as `train: {learning_rate: 2e-4}` "
        f"({destinations}); `surefit init` writes a whole config",
    )


def read_tool_config(path: Path, tool: str | None = None) -> ImportedConfig:
    """Read another tool's config.

    Args:
        path: the file.
        tool: the file's tool; detected if None.

    Raises:
        ConfigError: it cannot be parsed, or is not another tool's. Errors in single values are part of the result.
    """
    tool = tool or detect_tool(path)
    if tool == "slurm":
        from surefit.importers.slurm import read_shell_script

        return read_shell_script(path)
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
            help=f"supported: {', '.join([*MODULES, 'slurm'])}",
        )
    imported = read_tool_file(path, tool)
    return _with_launched_script(imported) if tool == "accelerate" else imported


def _with_launched_script(found: ImportedConfig) -> ImportedConfig:
    """Return an Accelerate config with the model of the script that is launched with it, if there is exactly one."""
    from surefit.importers.joined import find_scripts_of_config, merge_setups
    from surefit.importers.python import read_python

    scripts = set(find_scripts_of_config(found.path))
    if len(scripts) != 1:
        return found
    try:
        setup = read_python(scripts.pop()).setup
    except ConfigError:
        return found
    return replace(found, setup=merge_setups(found.setup, [(setup, ("base_model", "base_revision"))]))
