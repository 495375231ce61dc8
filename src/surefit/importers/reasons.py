"""Reasons for which a key of another tool's config cannot be expressed in SureFit's."""

from __future__ import annotations

from surefit.config.trackers import TRACKERS
from surefit.importers.known import read_schema

REASONS: tuple[tuple[str, tuple[str, ...]], ...] = tuple(
    (entry["reason"], tuple(" ".join(entry["keys"]).format(trackers=" ".join(TRACKERS)).split()))
    for entry in read_schema("reasons.json")
)
"""(reason, parts of the keys it applies to; with = a whole key): the first match counts."""


def unmapped_reason(key: str) -> str:
    """Return the reason for which SureFit's config cannot express a key.

    >>> unmapped_reason("wandb_entity")
    'SureFit writes metrics.jsonl and report.html, and reports to the trackers in its section telemetry'
    >>> unmapped_reason("packing_strategy")
    'SureFit packs whole examples of one step; it counts and leaves out examples longer than data.max_length'
    """
    for reason, parts in REASONS:
        if any(part[1:] == key if part.startswith("=") else part in key for part in parts):
            return reason
    return "SureFit has no such setting"
