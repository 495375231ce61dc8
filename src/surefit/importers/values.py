"""Values that the keys of other tools accept: their kinds and words, from the releases that the files in schemas/ name.

A kind is `bool`, `int`, `float`, `str`, `list`, `dict` or a word after `=`, in which `*` matches anything; kinds are
joined by `|`. Words are compared exactly, except for the keys of `ANY_CASE`, which their tools compare without regard
to case. A key that is not listed accepts any value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import Path
from typing import Any

from surefit.core.errors import did_you_mean
from surefit.importers import convert as c
from surefit.importers.known import key_set

SCHEMAS = Path(__file__).parent / "schemas"
NOUNS = {
    "bool": "true or false", "int": "a whole number", "float": "a number", "str": "a text", "list": "a list",
    "dict": "a mapping",
}  # fmt: skip
PLACEHOLDER = re.compile(r"\$\{?\w+\}?|\{\{.*\}\}|<[\w -]+>")
NAME = re.compile(r"[A-Z][A-Z0-9]*(_[A-Z0-9]+)+")
"""The name of a variable that a program fills in before the tool reads the file, like `PLACEHOLDER`."""
SHOWN = 12
"""The largest number of words that a message lists."""
ABOVE_ZERO, NOT_NEGATIVE, SHARES = (
    key_set(keys) for keys in json.loads((SCHEMAS / "ranges.json").read_text(encoding="utf-8")).values()
)
"""Last parts of keys whose numbers are above 0, at least 0, or from 0 to 1, in every tool."""
ANY_CASE = re.compile(
    r"fsdp_config\.|mixed_precision|downcast_bf16|rdzv_backend|optimizer\.type|gradient_allreduce_op|"
    r"(seq_parallel_)?communication_data_type|dynamo_|\w*log_level|bias"
)
"""Prefixes of keys whose values Accelerate and DeepSpeed convert to upper or lower case before they compare them."""
RATES = frozenset({"learning_rate", "lr"})
HIGHEST_RATE = 10
"""No learning rate of at least this value trains a model: 2e4 is 2e-4 without its sign."""
PORTS = frozenset({"main_process_port", "master_port"})


@lru_cache(maxsize=16)
def value_kinds(tool: str) -> Mapping[str, str]:
    """Return key → its kinds; empty if the tool's kinds are not written down."""
    path = SCHEMAS / f"{tool}.json"
    if not path.is_file():
        return {}
    table = json.loads(path.read_text(encoding="utf-8"))["kinds"]
    return {key: kind for kind, keys in table.items() for key in keys.split()}


@lru_cache(maxsize=1)
def trl_commands() -> Mapping[str, frozenset[str]]:
    """Return TRL's command (sft, dpo, …) → the keys that it accepts (scripts/trl_stages.py)."""
    table = json.loads((SCHEMAS / "trl_stages.json").read_text(encoding="utf-8"))
    shared = key_set(table["shared"])
    return {stage: shared | key_set(names) for stage, names in table["stages"].items()}


def value_kind(tool: str, key: str) -> str | None:
    """Return the kinds of a key; FSDP settings have the same kinds in every tool."""
    kind = value_kinds(tool).get(key)
    if kind is None and key.startswith("fsdp_config."):
        leaf = key.removeprefix("fsdp_config.").removeprefix("fsdp_")
        return value_kinds("accelerate").get(f"fsdp_config.fsdp_{leaf}")
    return kind


def is_placeholder(value: Any, kind: str) -> bool:
    """Return whether a string where none is expected is a placeholder that a program replaces."""
    parts = kind.split("|")
    if not isinstance(value, str) or {"str", "dict", "list"} & set(parts):
        return False
    words = any(part.startswith("=") and part[1:].isupper() for part in parts)
    return bool(PLACEHOLDER.fullmatch(value.strip()) or (not words and NAME.fullmatch(value.strip())))


def expected_value(key: str, kind: str, value: Any) -> str | None:
    """Return what the tool expects instead of this value, or None if it accepts the value."""
    parts = kind.split("|")
    if not any(_fits(part, value, bool(ANY_CASE.match(key))) for part in parts):
        return (
            "one of " + _format_choices(parts, value)
            if parts[0].startswith("=") or _is_word(value, parts)
            else _nouns(parts)
        )
    return expected_range(key.rpartition(".")[2], value)


def expected_range(leaf: str, value: Any) -> str | None:
    """Return the range that a number violates, or None if it is in range or no number."""
    if isinstance(value, bool):
        return None
    try:
        number = c.to_float(value)
    except c.InvalidValue:
        return None
    checks = (
        (leaf in ABOVE_ZERO and number <= 0, "a number above 0"),
        (leaf in NOT_NEGATIVE and number < 0, "a number (at least 0)"),
        (leaf in SHARES and not 0 <= number <= 1, "a number from 0 to 1"),
        (leaf in RATES and number >= HIGHEST_RATE, f"a number below {HIGHEST_RATE}, such as 2e-4"),
        (leaf in PORTS and not 0 <= number <= 65535, "a port, from 0 to 65535"),
    )
    return next((expected for wrong, expected in checks if wrong), None)


def _fits(part: str, value: Any, any_case: bool) -> bool:
    if part.startswith("="):
        return isinstance(value, str | int) and _is_like(str(value), part[1:], any_case)
    if part in ("list", "dict"):
        return isinstance(value, list if part == "list" else dict)
    if part == "str":
        return not isinstance(value, list | dict)
    if part == "any":
        return True
    try:
        # Every tool reads False as 0.
        value is False or {"bool": _switch, "int": c.to_int, "float": c.to_float}[part](value)
    except c.InvalidValue:
        return False
    return True


def _is_like(value: str, pattern: str, any_case: bool) -> bool:
    """Return whether a word matches. An unquoted `No` is false in YAML 1.1, like `no`."""
    is_no = pattern == "no" and value.lower() == "no"
    return is_no or (fnmatchcase(value.lower(), pattern.lower()) if any_case else fnmatchcase(value, pattern))


def _switch(value: Any) -> Any:
    return value if type(value) is int and value in (0, 1) else c.to_bool(value)


def _is_word(value: Any, parts: list[str]) -> bool:
    return isinstance(value, str) and any(part.startswith("=") for part in parts)


def _words(parts: list[str]) -> Iterator[str]:
    yield from (part.removeprefix("=") for part in parts if part.startswith("="))


def _format_choices(parts: list[str], value: Any) -> str:
    words = list(dict.fromkeys(_words(parts)))
    nouns = [NOUNS[part] for part in parts if part in NOUNS]
    hint = did_you_mean(value, words) if isinstance(value, str) else ""
    more = f" and {len(words) - SHOWN} more" if len(words) > SHOWN else ""
    return ", ".join([*words[:SHOWN], *nouns]) + more + hint


def _nouns(parts: list[str]) -> str:
    return " or ".join(dict.fromkeys(NOUNS[part] for part in parts if part in NOUNS)) or "one of " + _format_choices(
        parts, None
    )
