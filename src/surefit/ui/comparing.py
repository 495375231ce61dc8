"""The page that compares runs: every score with its interval."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request
from starlette.responses import Response

from surefit.report.artefacts import read_artefacts
from surefit.report.comparison import MAX_RUNS, list_setting_differences
from surefit.report.scores import MetricRow, SetScores, set_scores
from surefit.report.shapes import ScoreRecord
from surefit.ui.pages import UiContext

SETTINGS = 40


@dataclass(frozen=True)
class ComparedMetric:
    """One metric of a set, for all runs; `scores` is parallel to the columns."""

    name: str
    primary: bool
    scores: list[ScoreRecord | None]

    @property
    def drawable(self) -> bool:
        """Return whether all scores lie in [0, 1], the range of the chart's axis."""
        scores = [score for score in self.scores if score]
        return bool(scores) and all(0 <= score.mean <= 1 for score in scores)


def side_by_side_page(ui: UiContext, request: Request) -> Response:
    """Show `?path=A&path=B…`: the base of each run and its tuned model as columns."""
    names = list(dict.fromkeys(request.query_params.getlist("path")))[:MAX_RUNS]
    artefacts_by_run = {name: read_artefacts(ui.workspace.run(name)) for name in names}
    by_run = {
        name: {scores.name: scores for scores in set_scores(artefacts)} for name, artefacts in artefacts_by_run.items()
    }
    sets = {name: _table(name, by_run) for name in dict.fromkeys(key for sets in by_run.values() for key in sets)}
    settings, _ = list_setting_differences(list(artefacts_by_run.values()))
    return ui.page("compare", names=names, sets=sets, settings=settings[:SETTINGS])


def _table(
    set_name: str, by_run: dict[str, dict[str, SetScores]]
) -> dict[str, list[ComparedMetric] | list[tuple[str, str]]]:
    """Return the columns, (run, variant), and the metrics of one set."""
    columns: list[tuple[str, str]] = []
    for name, sets in by_run.items():
        set_of_run = sets.get(set_name)
        for variant in ("base", set_of_run.tuned) if set_of_run else ():
            if set_of_run and variant in set_of_run.variants and variant:
                columns.append((name, variant))
    rows: dict[str, list[MetricRow]] = {name: sets[set_name].rows for name, sets in by_run.items() if set_name in sets}
    metrics = dict.fromkeys(row.metric for metric_rows in rows.values() for row in metric_rows)
    primary = {row.metric for metric_rows in rows.values() for row in metric_rows if row.primary}

    def score(name: str, variant: str, metric: str) -> ScoreRecord | None:
        return next((row.scores.get(variant) for row in rows[name] if row.metric == metric), None)

    return {
        "columns": columns,
        "metrics": [
            ComparedMetric(metric, metric in primary, [score(name, variant, metric) for name, variant in columns])
            for metric in metrics
        ],
    }
