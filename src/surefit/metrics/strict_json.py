"""Strict JSON parsing for text from untrusted sources.

Python's `json` also accepts NaN and Infinity, keeps the last of two equal keys, parses `1e999` as infinity and accepts
a lone surrogate that no file can hold. Text that a model wrote, or that a model will learn to write, must not contain
any of these.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

from surefit.core.reading import deeper_than

MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 64
"""Largest nesting depth of brackets."""
MAX_DIGITS = 300
"""Digits of an integer: enough for any quantity, and every such integer fits a float."""


def strict_json(text: str) -> Any:
    """Return the value of a JSON text, in time linear in its length.

    Raises:
        ValueError: the text is not JSON (RFC 8259), repeats a key, holds a number that is not finite or has more than
            `MAX_DIGITS` digits, holds half a surrogate pair, or is longer or deeper than the bounds above.

    >>> strict_json('{"a": [1, 2.5, null]}')
    {'a': [1, 2.5, None]}
    """
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"{len(text):,} characters; at most {MAX_CHARACTERS:,} are read")
    try:
        value = json.loads(
            text,
            parse_int=_integer,
            parse_float=_finite,
            parse_constant=_not_a_number,
            object_pairs_hook=_without_repeated_keys,
        )
        if not text.isascii() or "\\u" in text:  # otherwise the text cannot contain a surrogate
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise ValueError("half of a surrogate pair, which is not a character") from None
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    if deeper_than(value, MAX_DEPTH):
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    return value


def json_kind(value: Any) -> str:
    """Name the type of a JSON value in plain words.

    >>> json_kind(None), json_kind({}), json_kind("a"), json_kind(2.5)
    ('null', 'an object', 'text', 'a number')
    """
    if value is None:
        return "null"
    names: dict[type, str] = {bool: "true or false", int: "a number", float: "a number", str: "text", list: "a list"}
    return "an object" if isinstance(value, Mapping) else names.get(type(value), type(value).__name__)


def _integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"an integer of {len(digits)} digits; at most {MAX_DIGITS} are read")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is out of a float's range")
    return value


def _not_a_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _without_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        repeated = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {repeated!r} occurs twice in one object")
    return value
