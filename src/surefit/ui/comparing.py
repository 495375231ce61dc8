"""Runs side by side: every score with its interval."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from surefit.report.artefacts import Artefacts, read_artefacts
from surefit.report.scores import MetricRow, SetScores, set_scores
from surefit.report.shapes import ScoreRecord
from surefit.ui.pages import UiContext

MOST_RUNS = 8
SETTINGS = 40


@dataclass(frozen=True)
class ComparedMetric:
    """One metric of a set, for all runs: `scores` is parallel to the columns."""

    name: str
    primary: bool
    scores: list[ScoreRecord | None]

    @property
    def drawable(self) -> bool:
        """Whether the scores lie on an axis from 0 to 1."""
        known = [score for score in self.scores if score]
        return bool(known) and all(0 <= score.mean <= 1 for score in known)


def side_by_side_page(ui: UiContext, request: Request) -> Response:
    """`?path=A&path=B…`, the base of the first run and the tuned model of each as columns."""
    names = list(dict.fromkeys(request.query_params.getlist("path")))[:MOST_RUNS]
    found = {name: read_artefacts(ui.workspace.run(name)) for name in names}
    by_run = {name: {one.name: one for one in set_scores(each)} for name, each in found.items()}
    sets = {name: _table(name, by_run) for name in dict.fromkeys(key for sets in by_run.values() for key in sets)}
    return ui.page("compare", names=names, sets=sets, settings=_differences(found))


def _table(
    set_name: str, by_run: dict[str, dict[str, SetScores]]
) -> dict[str, list[ComparedMetric] | list[tuple[str, str]]]:
    """The columns, (run, variant), and the metrics of one set."""
    columns: list[tuple[str, str]] = []
    for name, sets in by_run.items():
        one = sets.get(set_name)
        for variant in ("base", one.tuned) if one else ():
            if one and variant in one.variants and variant:
                columns.append((name, variant))
    rows: dict[str, list[MetricRow]] = {name: sets[set_name].rows for name, sets in by_run.items() if set_name in sets}
    metrics = dict.fromkeys(row.metric for each in rows.values() for row in each)
    primary = {row.metric for each in rows.values() for row in each if row.primary}

    def score(name: str, variant: str, metric: str) -> ScoreRecord | None:
        return next((row.scores.get(variant) for row in rows[name] if row.metric == metric), None)

    return {
        "columns": columns,
        "metrics": [
            ComparedMetric(metric, metric in primary, [score(name, variant, metric) for name, variant in columns])
            for metric in metrics
        ],
    }


def _differences(found: dict[str, Artefacts]) -> list[tuple[str, list[str]]]:
    """The settings that the runs do not share."""
    values = {name: {each.key: each.value for each in one.settings or []} for name, one in found.items()}
    keys = dict.fromkeys(key for each in values.values() for key in each)
    rows = [(key, [each.get(key, "–") for each in values.values()]) for key in keys]
    return [(key, row) for key, row in rows if len(set(row)) > 1][:SETTINGS]
