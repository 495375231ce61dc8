"""The verb `runs list`: the runs below a directory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.cli.runs.summary import find_runs, summarize_runs
from surefit.core.errors import EXIT_OK


@verb
def list_(
    out: Output,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to look for run directories.")] = Path("runs"),
) -> int:
    """List the runs below a directory: state, steps, scores, size. `surefit runs DIR` does the same."""
    rows = summarize_runs(find_runs(directory))
    keys = ["run", "recipe", "model", "state_text", "steps_text", "score_text", "size_text", "changed_text"]
    if any(row["job_text"] != "-" for row in rows):
        keys.insert(keys.index("state_text") + 1, "job_text")
    if rows:
        names = [key.removesuffix("_text") for key in keys]
        out.table(f"Runs in {directory}", names, [[row[key] for key in keys] for row in rows])
    else:
        out.say(f"No runs in {directory}{'' if directory.is_dir() else ': there is no such directory'}")
    out.next_step(["runs", "show", rows[0]["run"]] if rows else ["init", "--list"])
    out.result({"runs": rows})
    return EXIT_OK
