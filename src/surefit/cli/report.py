"""The verb `report`: the page of one run, or the page that compares several."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text


@verb
def report(
    out: Output,
    targets: Annotated[list[Path], typer.Argument(metavar="TARGET...", help="Config files, or run directories.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the page that compares several runs here.")
    ] = None,
) -> int:
    """Write the page that explains the run, or one that compares several: one file, readable offline."""
    from surefit.stages.reporting import write_comparison_report
    from surefit.stages.run_context import find_run_directory

    runs = [find_run_directory(target) for target in targets]
    if len(runs) > 1:
        without_report = [run for run in runs if not run.report.exists()]
        path = write_comparison_report(runs, out, output)
        for run in without_report:
            out.note(f"wrote {run.report}")
        _say(out, path, {"report": str(path), "runs": [str(run.path) for run in runs]})
        out.next_step(["compare", runs[0].path, runs[1].path])
        return EXIT_OK
    if output is not None:
        problem = "--output is for the page that compares several runs"
        raise ConfigError(problem, code="E1038", help=f"the page of one run is {runs[0].report}")
    report_run_and_show(out, runs[0])
    certified = runs[0].certificate.exists()
    out.next_step(*([["chat", runs[0].path], ["export", runs[0].path]] if certified else [["merge", runs[0].path]]))
    return EXIT_OK


def report_run_and_show(out: Output, directory: RunDir) -> int:
    """Write the page of one run."""
    from surefit.stages.reporting import write_run_report

    path = write_run_report(directory, out)
    return _say(out, path, {"report": str(path)})


def _say(out: Output, path: Path, result: dict[str, object]) -> int:
    out.say(f"Wrote {path} ({bytes_text(path.stat().st_size)}): open it in a browser, it needs no network")
    out.result(result)
    return EXIT_OK
