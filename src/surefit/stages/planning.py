"""The stage `plan`: what a run needs of memory, time and disk."""

from __future__ import annotations

from typing import Any

from surefit.stages.prepare import Prepared, lengths_of


def planned_run(run: Prepared, *, quick: bool = False) -> dict[str, Any]:
    """The content of plan.json.

    Args:
        quick: by arithmetic alone; nothing is simulated.
    """
    from surefit.plan.document import planned

    rows = len(run.rows) if run.rows is not None else None
    return planned(run.resolved, run.model, run.hardware, rows, quick=quick, lengths=lengths_of(run))
