"""metrics.jsonl: one line per optimizer step, and one per measurement of the held-out loss.

Step lines have `step epoch loss grad_norm learning_rate tokens supervised_tokens tokens_per_second seconds
memory_bytes rejected`; held-out lines have `step eval_loss eval_tokens`. JSON has no NaN: the loss and gradient norm of
a rejected step are null where they are not finite.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from surefit.core.rundir import append_jsonl, read_jsonl, write_atomic


class MetricsLog:
    """The metrics of one run, in step order."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, record: dict[str, Any]) -> None:
        """Add one line; numbers that are not finite become null."""
        append_jsonl(self.path, {key: _finite(value) for key, value in record.items()})

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines after `step`, which a resumed run will write again, and return those that stay."""
        records = read_jsonl(self.path)
        kept = [record for record in records if record["step"] <= step]
        if self.path.exists():
            write_atomic(self.path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
        return kept


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
