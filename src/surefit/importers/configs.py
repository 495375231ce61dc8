"""Reader of another tool's YAML or JSON config, by the tool's table."""

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
    "llamafactory": "llamafactory", "trl": "trl", "openai": "openai_job",
    "swift": "swift",
}  # fmt: skip
"""Tool → the module with its table."""
UNKNOWN = "not a file of a tool that SureFit knows"
_TEMPLATE = re.compile(r":\s*(\$\{?\w+\}?|\{\{.*?\}\}|[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+)\s*,?\s*$", re.MULTILINE)
"""A value that is not valid JSON but a variable in a template."""


def read_tool_file(path: Path, tool: str) -> ImportedConfig:
    """Read a config of one of `MODULES`.

    Raises:
        ConfigError: it cannot be parsed, or has no keys. Errors in single values are part of the result.
    """
    repeated: dict[str, tuple[int, int]] = {}
    tree, lines = parse_config_text(read_config_text(path), path, repeated)
    if not isinstance(tree, dict):
        raise ConfigError(
            "has no keys", code="E3004", path=path, help=f"a config of {tool} is a mapping of keys to values"
        )
    return ConfigDraft(load_tool_schema(tool), path, tree, lines, repeated).finished()


def parse_config_text(text: str, path: Path, repeated: dict[str, tuple[int, int]]) -> tuple[Any, dict[str, int]]:
    """Return the values of a YAML or JSON text and the line of each; `repeated` collects the keys that are set
    twice."""
    if path.suffix != ".json" and not text.lstrip().startswith("{"):
        return parse_yaml(text, path, repeated)
    try:
        json.loads(text)
    except ValueError as error:
        # A YAML file may start with a brace, too.
        if path.suffix == ".json" or not isinstance(error, json.JSONDecodeError):
            raise _not_json(text, path, error) from None
    except RecursionError:
        raise ConfigError("nested too deeply to be a config", code="E3005", path=path) from None
    # JSON is valid YAML except for tabs between tokens; JSON strings contain no raw tabs.
    return parse_yaml(text.replace("\t", " "), path, repeated)


def _not_json(text: str, path: Path, error: ValueError) -> ConfigError:
    """Return the error for a text that is not valid JSON, at the line to change."""
    variable = _TEMPLATE.search(text)
    if variable:
        return ConfigError(
            f"{UNKNOWN}: a template, whose {variable[1]} another program fills in",
            code="E3006",
            path=path,
            help="check the file made from it",
        )
    if not isinstance(error, json.JSONDecodeError):
        return ConfigError(f"not valid JSON: {error}", code="E3007", path=path)
    prefix = text[: error.pos].rstrip()
    line, problem = error.lineno, error.msg
    if prefix.endswith(",") and text[error.pos : error.pos + 1] in ("}", "]"):
        line, problem = prefix.count("\n") + 1, "a comma after the last entry"
    elif "delimiter" in error.msg and prefix and error.lineno > prefix.count("\n") + 1:
        line, problem = prefix.count("\n") + 1, f"{error.msg.lower()} after this line's value"
    elif error.msg.startswith("Illegal trailing comma"):
        problem = "a comma after the last entry"
    return ConfigError(
        f"not valid JSON: {problem}",
        code="E3008",
        path=path,
        line=line,
        help="check quotes, commas and brackets at and above this line",
    )


def load_tool_schema(tool: str) -> ToolSchema:
    """Return the table of a tool."""
    schema = import_module(f"surefit.importers.{MODULES[tool]}").TOOL
    assert isinstance(schema, ToolSchema)
    return schema


def is_key_known(tool: str, key: str) -> bool:
    """Return whether a tool knows this top-level key now or did in an earlier release."""
    table = load_tool_schema(tool)
    return table.knows(key) or key in table.gone or key in table.deprecated or table.is_section(key)
