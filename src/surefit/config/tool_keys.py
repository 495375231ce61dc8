"""How the keys of other tools are written here, for the error at an unknown key.

tool_keys.json has every key of transformers' TrainingArguments, TRL, Axolotl and LLaMA-Factory; scripts/keys_here.py
writes it from the importers' tables. It is read only where a config has an unknown key.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any


@lru_cache(maxsize=1)
def _table() -> tuple[list[str], dict[str, list[Any]]]:
    """Return (the reasons, key → [tools, SureFit's key or the number of a reason, translated values if any])."""
    table = json.loads(Path(__file__).with_name("tool_keys.json").read_text(encoding="utf-8"))
    return table["reasons"], table["keys"]


def describe_tool_key(name: str, value: Any) -> tuple[str, str]:
    """Return (SureFit's key, a sentence about another tool's key and its value); both empty if no tool has it.

    >>> describe_tool_key("load_in_4bit", True)[1]
    'SureFit writes load_in_4bit of TRL and Axolotl as model.quantization: nf4'
    >>> describe_tool_key("num_epochs", 3)
    ('train.num_train_epochs', 'SureFit writes num_epochs of Axolotl as train.num_train_epochs')
    >>> describe_tool_key("packing_strategy", "bfd")[0], describe_tool_key("learnig_rate", 1)
    ('', ('', ''))
    """
    reasons, keys = _table()
    entry = keys.get(name)
    if entry is None:
        return "", ""
    tools, target, *values = entry
    source = f"{name} of {tools}" if tools else name
    if isinstance(target, int):
        return "", f"{source} cannot be set in SureFit: {reasons[target]}"
    word = values[0].get(str(value).lower()) if values else None
    written = target if word is None else f"{target}: {word}"
    return target.partition(",")[0], f"SureFit writes {source} as {written}"
