"""The stage `report`: the page of one run, or a page that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from surefit.core.output import output_file, text_with
from surefit.core.rundir import RunDir
from surefit.stages.concluding import report_stage_to_trackers
from surefit.stages.events import record_stage
from surefit.stages.progress_listener import ProgressListener

COMPARISON = "compare.html"


def write_run_report(directory: RunDir, watcher: ProgressListener) -> Path:
    """Write the run's report.html and return its path."""
    from surefit.report.build import build_report

    with report_stage_to_trackers(directory, "report", watcher), record_stage(directory, "report"):
        watcher.log_to(directory.log)
        return build_report(directory)


def write_comparison_report(runs: Sequence[RunDir], watcher: ProgressListener, output: Path | None = None) -> Path:
    """Write a page that compares runs, beside the first or at `output`, and the pages of runs that have none."""
    from surefit import recipes
    from surefit.report.comparison import build_comparison

    page = output or runs[0].path.parent / COMPARISON
    mark = text_with('<meta name="generator" content="SureFit', "SureFit comparison of")
    output_file(page, {str(run.path): run.path for run in runs}, earlier=mark)
    for run in runs:
        if not run.report.exists():
            write_run_report(run, watcher)
    return build_comparison(runs, page, recipes.get_recipe)
