"""`surefit report`: the page of one run, or the page that compares several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text
from surefit.stages import reporting
from surefit.stages.run_context import find_run_directory

if TYPE_CHECKING:
    from surefit.cli.render import Output


def report_command(out: Output, targets: Sequence[Path], output: Path | None) -> int:
    """Write the report.html of one target; of several, a page that compares them, beside the first run or in `output`.

    Raises:
        ConfigError: a target is no run, or is named twice; an `output` for one run.
    """
    runs = [find_run_directory(target) for target in targets]
    if len(runs) > 1:
        without_report = [run for run in runs if not run.report.exists()]
        path = reporting.write_comparison_report(runs, out, output)
        for run in without_report:
            out.note(f"wrote {run.report}")
        return _say(out, path, {"report": str(path), "runs": [str(run.path) for run in runs]})
    if output is not None:
        problem = "--output is for the page that compares several runs"
        raise ConfigError(problem, code="E1038", help=f"the page of one run is {runs[0].report}")
    return report_run_and_show(out, runs[0])


def report_run_and_show(out: Output, directory: RunDir) -> int:
    """Write the page of one run."""
    path = reporting.write_run_report(directory, out)
    return _say(out, path, {"report": str(path)})


def _say(out: Output, path: Path, result: dict[str, object]) -> int:
    out.say(f"Wrote {path} ({bytes_text(path.stat().st_size)}): open it in a browser, it needs no network")
    out.result(result)
    return EXIT_OK
