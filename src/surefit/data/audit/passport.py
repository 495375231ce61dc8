"""passport.json: a data set's identity and condition, from an audit; docs/audit.md explains the fields."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from surefit import __version__
from surefit.core.rundir import file_sha256
from surefit.data.audit.lengths import LengthCounts
from surefit.data.audit.whole import AuditableRows, AuditResult

BINS = 24


@dataclass(frozen=True)
class LengthHistogram:
    """Lengths in bins of equal width from 0; the few beyond the last bin (1 % at most) are counted in `over`."""

    width: int
    counts: tuple[int, ...]
    over: int


def build_histogram(lengths: LengthCounts) -> LengthHistogram:
    """Build a histogram of at most `BINS` bins up to the 99th percentile; the width is 1, 2 or 5 times a power of ten.

    >>> build_histogram(LengthCounts([3, 4, 12, 19]))
    LengthHistogram(width=1, counts=(0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1), over=0)
    """
    if not len(lengths):
        return LengthHistogram(1, (), 0)
    top = lengths.quantile(0.99)
    width = _round_width((top + 1) / BINS)
    bins = top // width + 1
    values, rows = lengths.counted()
    counts = np.bincount(np.minimum(values // width, bins), weights=rows, minlength=bins + 1)
    return LengthHistogram(width, tuple(int(count) for count in counts[:bins]), int(counts[bins]))


def _round_width(least: float) -> int:
    power: int = 10 ** math.floor(math.log10(max(least, 1)))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= least)


def summarize_lengths(lengths: LengthCounts) -> dict[str, Any]:
    """Return total, extremes, quantiles and histogram of the lengths of one part of the examples."""
    if not len(lengths):
        return {"total": 0}
    p50, p95, p99 = (lengths.quantile(share) for share in (0.5, 0.95, 0.99))
    bins = build_histogram(lengths)
    return {
        "total": lengths.total,
        "min": lengths.quantile(0),
        "mean": round(lengths.total / len(lengths), 2),
        "p50": p50,
        "p95": p95,
        "p99": p99,
        "max": lengths.quantile(1),
        "histogram": {"width": bins.width, "counts": list(bins.counts), "over": bins.over},
    }


def build_passport(
    audit: AuditResult, rows: AuditableRows, findings: Sequence[Mapping[str, Any]], about: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the content of passport.json.

    Args:
        audit: the audit's result.
        rows: the rows that were audited.
        findings: the rules' findings, as in check.json.
        about: how the audit was run: the recipe, the tokenizer, the seconds.
    """
    facts = audit.facts
    learnt, total = audit.learnt.total, audit.whole.total
    return {
        "surefit": __version__,
        "source": facts.source,
        "files": [_file(path, rows) for path in rows.files],
        "sha256": audit.sha256,
        "content_sha256": audit.content_sha256,
        "rows": about.get("rows", facts.rows),
        "audited": facts.audited,
        "usable": audit.usable,
        "examples": len(audit.whole),
        "columns": {name: column.present for name, column in audit.dataset.columns.items()},
        **{key: value for key, value in about.items() if key != "rows"},
        "unit": audit.unit,
        "max_length": facts.max_length,
        "lengths": {
            "prompt": summarize_lengths(audit.given),
            "answer": summarize_lengths(audit.learnt),
            "whole": summarize_lengths(audit.whole),
        },
        "supervised_share": round(learnt / total, 6) if total else None,
        "scripts": _shares(audit.scripts),
        "languages": _shares(audit.languages),
        "scored": {name: dict(entry) for name, entry in audit.scored.items()},
        "observations": {
            name: {
                "rows": observation.rows, "of": observation.of, "share": round(observation.share, 6),
                "examples": list(observation.examples), "detail": observation.detail,
            }
            for name, observation in facts.observations.items()
        },
        "findings": list(findings),
    }  # fmt: skip


def _file(path: Path, rows: AuditableRows) -> dict[str, Any]:
    return {
        "name": path.name,
        "bytes": path.stat().st_size,
        "sha256": rows.sha256 if len(rows.files) == 1 else file_sha256(path),
    }


def _shares(counts: Mapping[str, int]) -> dict[str, float]:
    """Return the shares of at least one in a thousand."""
    total = sum(counts.values())
    return {name: round(count / total, 4) for name, count in counts.items() if count * 1000 >= total}
