"""Other tools' configs, read into SureFit's terms: one file per tool, each mostly a table.

found = read(Path("axolotl.yml"))
found.setup   # what the rules judge
found.loaded  # the SureFit config it maps to
found.lost    # the keys that have no place in one, and why
"""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

from surefit.config.load import parse_yaml, read_text
from surefit.config.schema import Config
from surefit.core.errors import ConfigError
from surefit.foreign.draft import Draft, Tool
from surefit.foreign.result import Foreign, Lost

__all__ = ["Foreign", "Lost", "detect", "read", "tool_of"]

MARKS: dict[str, tuple[str, ...]] = {
    "surefit": ("recipe", "model", "data", "train", "hardware", "checkpoint", "evaluate"),
    "peft": ("peft_type",),
    "deepspeed": ("zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size"),
    "accelerate": ("compute_environment", "distributed_type", "machine_rank", "main_training_function"),
    "axolotl": ("base_model", "micro_batch_size", "sequence_len", "num_epochs"),
    "llamafactory": (
        "finetuning_type", "cutoff_len", "lora_rank", "lora_target", "template", "stage", "dataset_dir", "export_dir",
    ),
    "trl": (
        "dataset_name", "per_device_train_batch_size", "num_train_epochs", "model_name_or_path", "use_peft",
        "eval_strategy", "save_strategy", "max_length", "max_seq_length", "per_device_eval_batch_size",
    ),
}  # fmt: skip
"""Tool → top-level keys of which one at least is in each of its files. In the order in which ties are decided."""
MODULES = {tool: tool for tool in MARKS if tool != "surefit"} | {"peft": "peft_adapter"}
_SCRIPT = re.compile(r"\A#!|^#SBATCH\b", re.MULTILINE)


def tool_of(path: Path) -> str | None:
    """Whose config this is, as `detect` says; None where it is none, or cannot be read."""
    try:
        return detect(path)
    except ConfigError:
        return None


def detect(path: Path) -> str:
    """Whose config this is: surefit, axolotl, llamafactory, trl, accelerate, deepspeed, peft or slurm.

    The tool whose keys the file has most of, among those of whose marks it has one.

    Raises:
        ConfigError: it is none of them, or not readable.
    """
    text = read_text(path)
    if _SCRIPT.search(text):
        return "slurm"
    tree = _parse(text, path)[0]
    found = _recognise(tree) if isinstance(tree, dict) else None
    if found is None:
        looked_for = "; ".join(f"{tool} ({', '.join(marks[:3])})" for tool, marks in MARKS.items())
        raise ConfigError(
            "not a config that SureFit knows",
            path=path,
            help=f"looked for the keys of {looked_for}; and for #SBATCH lines of a SLURM script",
        )
    return found


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
        from surefit.foreign.slurm import read_script

        return read_script(path)
    if tool not in MODULES:
        raise ConfigError(
            f"there is no reader for {tool!r}", path=path, help=f"known are {', '.join([*MODULES, 'slurm'])}"
        )
    tree, lines = _parse(read_text(path), path)
    if not isinstance(tree, dict):
        raise ConfigError("holds no keys", path=path, help=f"a config of {tool} is a mapping of keys to values")
    return Draft(_table(tool), path, tree, lines).finished()


def _parse(text: str, path: Path) -> tuple[Any, dict[str, int]]:
    # JSON is YAML but for tabs between its tokens; inside its texts there are none.
    is_json = path.suffix == ".json" or text.lstrip().startswith("{")
    if not is_json:
        return parse_yaml(text, path)
    try:
        return parse_yaml(text.replace("\t", " "), path)
    except ConfigError as error:
        error.message = error.message.replace("not valid YAML", "not valid JSON")
        error.help = error.help and "check quotes, commas and brackets at and above this line"
        raise


def _table(tool: str) -> Tool:
    found = import_module(f"surefit.foreign.{MODULES[tool]}").TOOL
    assert isinstance(found, Tool)
    return found


def _recognise(tree: dict[str, Any]) -> str | None:
    """The tool that knows most of the keys, among those whose marks are there; of two that know as many, the first."""
    marked = [tool for tool, marks in MARKS.items() if any(mark in tree for mark in marks)]
    return max(marked, key=lambda tool: _known_keys(tool, tree), default=None)


def _known_keys(tool: str, tree: dict[str, Any]) -> int:
    if tool == "surefit":
        # Its sections are mappings; a tool with a plain value of that name is another one.
        return sum(
            isinstance(value, dict) or key == "recipe" for key, value in tree.items() if key in Config.model_fields
        )
    table = _table(tool)
    return sum(table.knows(key) or key in table.gone or table.is_section(key) for key in tree)
