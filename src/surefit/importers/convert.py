"""Conversion of single values of other tools' configs to plain values.

A converter returns the value, or `UNSET` if it means nothing is set (such as -1 for "no limit"); it raises
`InvalidValue` if the tool itself cannot use the value, and `Unmappable` if the value is valid and SureFit has no
equivalent.

The other tools read YAML 1.1 and pass numbers through `float()`: `yes` is true, and "2e-4" is a number.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

Convert = Callable[[Any], Any]
UNSET: Final = object()
"""The value of a key that the file does not set."""

LARGEST = 10**18
"""The largest number accepted; no setting of any tool is larger."""


class InvalidValue(Exception):
    """Raised for a value that the tool cannot use; the message says what it expects."""


class Unmappable(Exception):
    """Raised for a valid value that SureFit cannot express; the message says why."""


def to_int(value: Any) -> int:
    """Return a whole number, which may be given as a string of digits."""
    number = _number(value, "a whole number")
    if number != int(number) or abs(number) > LARGEST:
        raise InvalidValue("a whole number")
    return int(number)


def to_float(value: Any) -> float:
    """Return a finite number, which may be given as a string such as 2e-4."""
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
    """Return a whole number, or `UNSET` for -1 or 0, which mean no limit."""
    limit = to_int(value)
    return limit if limit > 0 else UNSET


def to_bool(value: Any) -> bool:
    """Return a bool, which may be given as a YAML 1.1 word."""
    words = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
    switch = words.get(value.lower()) if isinstance(value, str) else value
    if not isinstance(switch, bool):
        raise InvalidValue("true or false")
    return switch


def to_text(value: Any) -> str:
    """Return a string that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise InvalidValue("a text")
    return value


def to_texts(value: Any) -> tuple[str, ...]:
    """Return the items of a list of strings, or of one comma-separated string."""
    items = value.split(",") if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise InvalidValue("a list of strings")
    return tuple(item.strip() for item in items if item.strip())


def value_when_true(result: Any) -> Convert:
    """Return a converter of a switch: `result` if it is on, `UNSET` if it is off."""
    return lambda value: result if to_bool(value) else UNSET


def choice_of(known: Mapping[str, Any], otherwise: str) -> Convert:
    """Return a converter of one of several words; `otherwise` is the reason why SureFit cannot express any other."""

    def convert(value: Any) -> Any:
        word = to_text(value).lower()
        if word not in known:
            raise Unmappable(otherwise.format(value=value))
        return known[word]

    return convert


def to_lowercase(value: Any) -> str:
    """Return a string in lower case."""
    return to_text(value).lower()


def true_if_nonempty(value: Any) -> Any:
    """Return True for a list, string or mapping that is not empty, and `UNSET` for an empty one."""
    return bool(value) or UNSET


def true_if_offloaded(value: Any) -> Any:
    """Return True for the device cpu or nvme, and `UNSET` for none."""
    return True if to_lowercase(value) in ("cpu", "nvme") else UNSET


def unless_auto(convert: Convert) -> Convert:
    """Return a converter that reads "auto" as `UNSET` and anything else like `convert`."""
    return lambda value: UNSET if value == "auto" else convert(value)


def unsupported_setting(value: Any, what: str) -> Convert:
    """Return a converter for a setting that SureFit does not have: it raises and names `value`, which SureFit uses."""

    def convert(found: Any) -> Any:
        raise Unmappable(f"SureFit has no setting for {what}: it uses {value}")

    return convert


WHOLE_RUN_STEPS = "a share of the run; SureFit counts steps"


def to_step_count(value: Any) -> Any:
    """Return the steps between two events, `UNSET` for 0; a value below 1 is a share of the run and raises
    `Unmappable`."""
    steps = to_float(value)
    if 0 < steps < 1:
        raise Unmappable(WHOLE_RUN_STEPS)
    if steps == 0:
        return UNSET
    return to_int(value)


def to_fraction(value: Any) -> float:
    """Return a number from 0 up to 1."""
    fraction = to_float(value)
    if not 0 <= fraction <= 1:
        raise InvalidValue("a number from 0 to 1")
    return fraction


def to_eval_fraction(value: Any) -> Any:
    """Return the share of the rows to hold out, 0 for none."""
    fraction = to_float(value)
    if fraction >= 1:
        raise Unmappable("a number of rows; SureFit's data.eval is a share of them, or a file")
    return fraction
