"""Model families by name, and the family that a chat template or an end token belongs to.

Only names are used: a name with two families in it, or none, has no family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

_TABLE = json.loads((Path(__file__).parent / "families.json").read_text(encoding="utf-8"))
FAMILIES: tuple[tuple[str, str], ...] = tuple((family, entry["names"]) for family, entry in _TABLE.items())
"""(family, pattern of its models' names). A distilled model has two families in its name, and belongs to the first."""
TEMPLATES: tuple[tuple[str, str], ...] = tuple((family, entry["templates"]) for family, entry in _TABLE.items())
"""(family, beginnings of the names of its templates in LLaMA-Factory and Axolotl); `chatml` belongs to no family."""
END_TOKENS: Mapping[str, frozenset[str]] = {family: frozenset(entry["end_tokens"]) for family, entry in _TABLE.items()}
"""Family → tokens that end its answers or its documents."""
ADDED = frozenset({"<|im_end|>"})
"""ChatML's end token, which is often added to models that do not have it."""
DISTILLED = re.compile(r"deepseek.*distill", re.IGNORECASE)
SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)([bm])(?![a-z\d])", re.IGNORECASE)


def family_of(name: str) -> str | None:
    """Return the family of a model's name.

    >>> family_of("meta-llama/Llama-3.1-8B"), family_of("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"), family_of("a/b")
    ('Llama 3', 'DeepSeek', None)
    """
    leaf = name.rstrip("/").rpartition("/")[2].lower()
    families = [family for family, pattern in FAMILIES if re.search(pattern, leaf)]
    return families[0] if len(families) == 1 or (families and DISTILLED.search(leaf)) else None


def family_of_template(name: str) -> str | None:
    """Return the family that a template's name belongs to.

    >>> family_of_template("qwen3_nothink"), family_of_template("mistral_v7_tekken"), family_of_template("chatml")
    ('Qwen', 'Mistral', None)
    """
    return next((family for family, pattern in TEMPLATES if re.match(pattern, name.lower())), None)


def foreign_end_token(name: str, token: str) -> str | None:
    """Return the family that an end token belongs to, where the family of the model's name does not have it."""
    family = family_of(name)
    if family is None or token in END_TOKENS[family] | ADDED:
        return None
    return next((owner for owner, tokens in END_TOKENS.items() if token in tokens), None)


def size_in_name(name: str) -> int | None:
    """Return the number of parameters in a model's name.

    >>> size_in_name("Qwen/Qwen2.5-1.5B-Instruct"), size_in_name("gemma-3-270m-it"), size_in_name("microsoft/phi-2")
    (1500000000, 270000000, None)
    """
    match = SIZE.search(name.rpartition("/")[2].replace("_", "-"))
    return round(float(match[1]) * (10**9 if match[2].lower() == "b" else 10**6)) if match else None
