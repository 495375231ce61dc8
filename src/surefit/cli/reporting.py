"""`surefit report`: the page of one run, or the page that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefit.cli import stages
from surefit.cli.prepare import run_directory
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text

if TYPE_CHECKING:
    from surefit.cli.render import Output

COMPARISON = "compare.html"


def report(out: Output, targets: Sequence[Path], output: Path | None) -> int:
    """One target: its report.html. Several: a page that compares them, beside the first run or in `output`.

    Raises:
        ConfigError: a target is no run, or one is named twice; an `output` for one run.
    """
    runs = [run_directory(target) for target in targets]
    if len(runs) == 1:
        if output is not None:
            problem = "--output is for the page that compares several runs"
            raise ConfigError(problem, help=f"the page of one run is {runs[0].report}")
        return stages.report(out, runs[0])
    return _compare(out, runs, output)


def _compare(out: Output, runs: Sequence[RunDir], output: Path | None) -> int:
    from surefit import recipes
    from surefit.report.comparison import build_comparison

    for run in runs:
        if not run.report.exists():
            stages.report(out.without_result(), run)
    path = build_comparison(runs, output or runs[0].path.parent / COMPARISON, recipes.get)
    out.say(f"Wrote {path} ({bytes_text(path.stat().st_size)}): open it in a browser, it needs no network")
    out.result({"report": str(path), "runs": [str(run.path) for run in runs]})
    return EXIT_OK
