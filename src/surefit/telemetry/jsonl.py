"""metrics.jsonl: one line per optimizer step, and one per measurement of the held-out loss.

Step lines have `step epoch loss grad_norm learning_rate tokens supervised_tokens tokens_per_second flops mfu seconds
memory_bytes disk_free_bytes rejected`; flops and mfu (facts/flops.py) are null where they are not known. Held-out lines
have `step eval_loss eval_tokens eval_perplexity`, and the task's scores if they are measured (`evaluate.in_training`).
Of pairs, step lines also have `rewards/chosen rewards/rejected rewards/margins rewards/accuracies logps/chosen
logps/rejected`, with a cross-entropy term `nll`, and held-out lines the same as `eval_…` instead of `eval_perplexity`.
Step lines of a mixture of experts also have `expert_entropy expert_max_share expert_use` (train/expert_use.py), the
last of which is a table, which trackers do not accept, and `router_loss` if the router is trained. JSON has no NaN: the
loss and gradient norm of a rejected step are null if they are not finite. A full disk loses no line: it waits in memory
until there is space.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from surefit.core.rundir import append_jsonl, flush_jsonl, forget_unwritten, fsync_file, read_jsonl, write_atomic


class MetricsLog:
    """The metrics of one run, in step order.

    Args:
        path: the file.
        on_line: called with every line that is added.
        writes: False in all ranks but the first, which write nothing.
    """

    def __init__(
        self, path: Path, on_line: Callable[[dict[str, Any]], None] = lambda line: None, writes: bool = True
    ) -> None:
        self.path, self.on_line, self.writes = path, on_line, writes

    def append(self, record: dict[str, Any]) -> dict[str, Any]:
        """Add one line, and return it as it will be read back: numbers that are not finite become null."""
        line = {key: _finite(value) for key, value in record.items()}
        if self.writes:
            append_jsonl(self.path, line)
            self.on_line(line)
        return line

    def flush(self) -> int:
        """Write the lines that a full disk has delayed; return the bytes that still wait."""
        return flush_jsonl(self.path)

    def sync(self) -> None:
        """Make the written lines survive a power cut."""
        if self.path.exists():
            fsync_file(self.path)

    def rewind(self, step: int) -> list[dict[str, Any]]:
        """Drop the lines after `step`, which a resumed run will write again, and return the lines that stay."""
        forget_unwritten(self.path)
        records = read_jsonl(self.path)
        kept = [record for record in records if record["step"] <= step]
        if self.path.exists():
            write_atomic(self.path, "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in kept))
        return kept


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
