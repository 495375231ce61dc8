"""The numbers of a metrics.jsonl line that trackers accept, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

FINAL_STEP = 0
"""The step of the final numbers: always the same, so that a repeated stage does not draw a curve."""


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a line, booleans as 0 and 1; without `step` and `time`.

    >>> numbers_of({"step": 3, "time": 0.0, "loss": None, "mfu": 0.4, "rejected": True, "expert_use": [[0, 4, 0.5, 1]]})
    {'mfu': 0.4, 'rejected': 1.0}
    """
    return {
        key: float(value)
        for key, value in record.items()
        if key not in ("step", "time") and isinstance(value, bool | int | float)
    }
