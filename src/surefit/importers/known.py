"""The keys that the other tools accept, by schemas/keys.json, which scripts/tool_keys.py reads from their classes.

A key that is neither here nor in a tool's table nor in its `gone` keys is unknown to the tool.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def key_set(text: str) -> frozenset[str]:
    """Return the whitespace-separated words of a text as a set."""
    return frozenset(text.split())


def read_schema(name: str) -> Any:
    """Return the content of a file in schemas/."""
    return json.loads((Path(__file__).parent / "schemas" / name).read_text(encoding="utf-8"))


_RENAMED: dict[str, dict[str, str]] = read_schema("renamed.json")


def key_replacements(table: str) -> dict[str, str]:
    """Return the keys of a table in schemas/renamed.json → what to write instead, or the tool's name for the key of
    another tool."""
    return dict(_RENAMED[table])


def tool_defaults(tool: str) -> dict[str, tuple[str, Any]]:
    """Return a tool's defaults in schemas/defaults.json: config key → (the tool's key, its default)."""
    return {dotted: (key, value) for dotted, (key, value) in read_schema("defaults.json")[tool].items()}


_SETS = {name: key_set(entry["keys"]) for name, entry in read_schema("keys.json").items()}
TRAINING_ARGUMENTS = _SETS["training_arguments"]
TRAINING_ARGUMENTS_4 = _SETS["training_arguments_4"]
"""Keys that transformers 4.57 accepted and 5 does not."""
SFT_CONFIG = _SETS["sft_config"]
"""Keys that SFTConfig adds to TrainingArguments."""
TRL = _SETS["trl"]
TRL_STAGES = _SETS["trl_stages"]
"""Keys of TRL's other trainers' configs that SFTConfig does not have; some of them once belonged to SFTConfig."""
TRL_LAUNCHER = _SETS["trl_launcher"]
OPEN_R1 = _SETS["open_r1"]
LORA_CONFIG = _SETS["lora_config"]
LLAMAFACTORY = _SETS["llamafactory"]
SWIFT = _SETS["swift"]
AXOLOTL = _SETS["axolotl"]
AXOLOTL_PLUGINS = _SETS["axolotl_plugins"]
ACCELERATE = _SETS["accelerate"]
DEEPSPEED = _SETS["deepspeed"]
ZERO = _SETS["zero"]
"""DeepSpeed's keys under zero_optimization."""
