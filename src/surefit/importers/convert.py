"""Single values of other tools' configs → plain values.

A converter returns the value, or `UNSET` where it says nothing (such as -1 for "no limit"); it raises `InvalidValue`
where the tool itself could not use it, and `Unmappable` where it is fine and SureFit has nothing like it.

The other tools read YAML by its 1.1 rules and pass numbers through `float()`: `yes` is true there, and "2e-4" a number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

Convert = Callable[[Any], Any]
UNSET: Final = object()
"""Stands for "the file does not say"."""

LARGEST = 10**18
"""No setting of any tool is a larger number."""


class InvalidValue(Exception):
    """The tool cannot use this value; the text says what it expects."""


class Unmappable(Exception):
    """A good value that SureFit has no place for; the text says why."""


def to_int(value: Any) -> int:
    """A whole number, also as a text of digits."""
    found = _number(value, "a whole number")
    if found != int(found) or abs(found) > LARGEST:
        raise InvalidValue("a whole number")
    return int(found)


def to_float(value: Any) -> float:
    """A finite number, also as a text such as 2e-4."""
    return float(_number(value, "a number"))


def _number(value: Any, expected: str) -> float | int:
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidValue(expected)
    if isinstance(value, int):
        return value
    if not math.isfinite(value):
        raise InvalidValue(expected)
    return value


def to_limit(value: Any) -> Any:
    """A whole number, where -1 (or 0) means that there is none."""
    found = to_int(value)
    return found if found > 0 else UNSET


def to_bool(value: Any) -> bool:
    """True or false, as YAML 1.1 writes them too."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    known = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(known, bool):
        raise InvalidValue("true or false")
    return known


def to_text(value: Any) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidValue("a text")
    return value


def to_texts(value: Any) -> tuple[str, ...]:
    """A list of texts, or one text with commas."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidValue("a list of texts")
    return tuple(item.strip() for item in items if item.strip())


def value_when_true(result: Any) -> Convert:
    """A switch that says `result` when it is on, and nothing when it is off."""
    return lambda value: result if to_bool(value) else UNSET


def choice_of(known: Mapping[str, Any], otherwise: str) -> Convert:
    """One of some words; `otherwise` says why SureFit has no place for the rest."""

    def convert(value: Any) -> Any:
        word = to_text(value).lower()
        if word not in known:
            raise Unmappable(otherwise.format(value=value))
        return known[word]

    return convert


def to_lowercase(value: Any) -> str:
    """A text in small letters."""
    return to_text(value).lower()


def true_if_nonempty(value: Any) -> Any:
    """Whether a list, text or mapping says anything; nothing when it is empty."""
    return bool(value) or UNSET


def unless_auto(convert: Convert) -> Convert:
    """The same, where "auto" says nothing."""
    return lambda value: UNSET if value == "auto" else convert(value)


def unsupported_setting(value: Any, what: str) -> Convert:
    """A setting SureFit does not offer: `value` is what it uses."""

    def convert(found: Any) -> Any:
        raise Unmappable(f"SureFit has no setting for {what}: it uses {value}")

    return convert


WHOLE_RUN_STEPS = "a share of the run; SureFit counts steps"


def to_step_count(value: Any) -> Any:
    """Steps between two events: a whole number; below 1 it is a share of the run, which has no place."""
    found = to_float(value)
    if 0 < found < 1:
        raise Unmappable(WHOLE_RUN_STEPS)
    if found == 0:
        return UNSET
    return to_int(value)


def to_fraction(value: Any) -> float:
    """A number from 0 up to 1."""
    found = to_float(value)
    if not 0 <= found <= 1:
        raise InvalidValue("a number from 0 to 1")
    return found


def to_eval_fraction(value: Any) -> Any:
    """Return the share of the rows to hold out, 0 for none."""
    found = to_float(value)
    if found >= 1:
        raise Unmappable("a number of rows; SureFit's data.eval is a share of them, or a file")
    return found
