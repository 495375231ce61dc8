"""A run's answers, row by row, beside another variant's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from surefit.core.rundir import RunDir
from surefit.evaluate.answers import base_variant, list_scored_variants
from surefit.facts.free_text import LIKELIHOOD_BESIDE_ANSWER, is_likelihood
from surefit.report.artefacts import Artefacts, read_artefacts
from surefit.report.scores import find_tuned_variant, primary_metric
from surefit.report.shapes import PredictionRecord
from surefit.ui.pages import UiContext

PAGE = 20
FILTERS = {"all": "All", "won": "Won", "lost": "Lost", "equal": "Equal"}


@dataclass(frozen=True)
class VariantPair:
    """A row with the answers of two variants; `outcome`: won, lost or equal from the first to the second, or empty."""

    before: PredictionRecord | None
    after: PredictionRecord
    outcome: str


def examples_page(ui: UiContext, request: Request) -> Response:
    """Show a page of a set's rows: `?path=&set=&variant=&against=&filter=&page=`."""
    query = request.query_params
    run = ui.workspace.run(query.get("path", ""))
    sets = sorted(path.name for path in run.eval.glob("*/") if not path.name.startswith("."))
    set_name = query.get("set") or ("eval" if "eval" in sets else next(iter(sets), ""))
    if set_name and set_name not in sets:
        raise HTTPException(404, "There is no such set.")
    variants = (
        [name for name in list_scored_variants(run, set_name) if _file(run, set_name, name).is_file()]
        if set_name
        else []
    )
    variant = query.get("variant") or find_tuned_variant(variants) or next(iter(variants), "")
    against = query.get("against", base_variant(variant) if base_variant(variant) in variants else "")
    if not {variant, against} <= {*variants, ""}:
        raise HTTPException(404, "There is no such variant.")
    metric = primary_metric(read_artefacts(run), set_name)
    pairs = _pairs(ui, run, set_name, variant, "" if against == variant else against, metric) if variant else []
    counts = {name: sum(name in ("all", pair.outcome) for pair in pairs) for name in FILTERS}
    outcome = query.get("filter", "all")
    filtered_pairs = [pair for pair in pairs if outcome in ("all", pair.outcome)]
    pages = max(1, -(-len(filtered_pairs) // PAGE))
    page = min(max(1, int(number) if (number := query.get("page", "1")).isdecimal() and len(number) < 9 else 1), pages)
    return ui.page(
        "examples",
        name=ui.workspace.name(run.path),
        has_report=run.report.is_file(),
        sets=sets,
        variants=variants,
        filters=FILTERS,
        counts=counts,
        metric=metric,
        note=LIKELIHOOD_BESIDE_ANSWER if metric and is_likelihood(metric) else "",
        asked={"path": ui.workspace.name(run.path), "set": set_name, "variant": variant, "against": against,
               "filter": outcome},
        page=page,
        pages=pages,
        pairs=filtered_pairs[(page - 1) * PAGE : page * PAGE],
    )  # fmt: skip


def _file(run: RunDir, set_name: str, variant: str) -> Path:
    return run.eval / set_name / f"{variant}.predictions.jsonl"


def _pairs(
    ui: UiContext, run: RunDir, set_name: str, variant: str, against: str, metric: str | None
) -> list[VariantPair]:
    before = {prediction.index: prediction for prediction in _read(ui, run, set_name, against)} if against else {}
    return [
        VariantPair(before.get(after.index), after, _outcome(before.get(after.index), after, metric))
        for after in _read(ui, run, set_name, variant)
    ]


def _read(ui: UiContext, run: RunDir, set_name: str, variant: str) -> tuple[PredictionRecord, ...]:
    path = ui.workspace.file_of(run, _file(run, set_name, variant))
    return _predictions(run, set_name, variant, path.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _predictions(run: RunDir, set_name: str, variant: str, changed: int) -> tuple[PredictionRecord, ...]:
    """Return the lines of a file, read again if it has changed; texts are cut and secrets redacted, as for the
    report."""
    return tuple(Artefacts(run).predictions(set_name, variant))


def _outcome(before: PredictionRecord | None, after: PredictionRecord, metric: str | None) -> str:
    if before is None or metric is None or metric not in before.scores or metric not in after.scores:
        return ""
    first, second = before.scores[metric], after.scores[metric]
    return "equal" if first == second else "won" if second > first else "lost"
