"""A config of another tool, YAML or JSON, read by that tool's table."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path
from typing import Any

from surefit.config.load import parse_yaml, read_config_text
from surefit.core.errors import ConfigError
from surefit.importers.config_mapping import ConfigDraft, ToolSchema
from surefit.importers.result import ImportedConfig

MODULES = {
    "peft": "peft_adapter", "deepspeed": "deepspeed", "accelerate": "accelerate", "axolotl": "axolotl",
    "llamafactory": "llamafactory", "trl": "trl",
}  # fmt: skip
"""Tool → the module with its table."""
UNKNOWN = "not a file of a tool that SureFit knows"
_TEMPLATE = re.compile(r":\s*(\$\{?\w+\}?|\{\{.*?\}\}|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\s*,?\s*$", re.MULTILINE)
"""A value that is no JSON and stands for one."""


def read_tool_file(path: Path, tool: str) -> ImportedConfig:
    """Read a config of one of `MODULES`.

    Raises:
        ConfigError: it cannot be parsed, or holds no keys. What is wrong with single values is returned.
    """
    repeated: dict[str, tuple[int, int]] = {}
    tree, lines = parse_config_text(read_config_text(path), path, repeated)
    if not isinstance(tree, dict):
        raise ConfigError(
            "holds no keys", code="E3004", path=path, help=f"a config of {tool} is a mapping of keys to values"
        )
    return ConfigDraft(load_tool_schema(tool), path, tree, lines, repeated).finished()


def parse_config_text(text: str, path: Path, repeated: dict[str, tuple[int, int]]) -> tuple[Any, dict[str, int]]:
    """The values of a YAML or JSON text, and the line of each; keys that are set twice go into `repeated`."""
    if path.suffix != ".json" and not text.lstrip().startswith("{"):
        return parse_yaml(text, path, repeated)
    try:
        json.loads(text)
    except ValueError as error:
        # Braces may also begin a YAML file.
        if path.suffix == ".json" or not isinstance(error, json.JSONDecodeError):
            raise _not_json(text, path, error) from None
    except RecursionError:
        raise ConfigError("nested too deeply to be a config", code="E3005", path=path) from None
    # JSON is YAML but for tabs between its tokens; inside its texts there are none.
    return parse_yaml(text.replace("\t", " "), path, repeated)


def _not_json(text: str, path: Path, error: ValueError) -> ConfigError:
    """What is wrong with the text, at the line that has to be changed."""
    filled = _TEMPLATE.search(text)
    if filled:
        return ConfigError(
            f"{UNKNOWN}: a template, whose {filled[1]} something else fills in",
            code="E3006",
            path=path,
            help="check the file that it becomes",
        )
    if not isinstance(error, json.JSONDecodeError):
        return ConfigError(f"not valid JSON: {error}", code="E3007", path=path)
    before = text[: error.pos].rstrip()
    line, problem = error.lineno, error.msg
    if before.endswith(",") and text[error.pos : error.pos + 1] in ("}", "]"):
        line, problem = before.count("\n") + 1, "a comma behind the last entry"
    elif "delimiter" in error.msg and before and error.lineno > before.count("\n") + 1:
        line, problem = before.count("\n") + 1, f"{error.msg.lower()} behind this line's value"
    elif error.msg.startswith("Illegal trailing comma"):
        problem = "a comma behind the last entry"
    return ConfigError(
        f"not valid JSON: {problem}",
        code="E3008",
        path=path,
        line=line,
        help="check quotes, commas and brackets at and above this line",
    )


def load_tool_schema(tool: str) -> ToolSchema:
    """Return the table of a tool."""
    found = import_module(f"surefit.importers.{MODULES[tool]}").TOOL
    assert isinstance(found, ToolSchema)
    return found


def is_key_known(tool: str, key: str) -> bool:
    """Whether a tool takes this top-level key, or did so once."""
    table = load_tool_schema(tool)
    return table.knows(key) or key in table.gone or key in table.deprecated or table.is_section(key)
