"""The verb that looks at data, as typer reads it: audit."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import finish
from surefit.cli.options import Json, Overrides
from surefit.core.errors import ConfigError


def audit(
    target: Annotated[str, typer.Argument(metavar="CONFIG|DATA", help="A config or run directory, or bare data.")],
    overrides: Overrides = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the passport here.")] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Look at this many rows, spread evenly.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of processes; default: one per core.")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a copy without empty, too long, leaked and duplicate rows.")
    ] = False,
    copy: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="Where --fix writes the copy.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix, only say what would be left out.")] = False,
    as_json: Json = False,
) -> None:
    """Look at every row: lengths, duplicates, leaks, damage; write the data set's passport."""

    def verb(out: Any) -> int:
        from surefit.cli import auditing

        if not fix and (copy or dry_run):
            raise ConfigError("--out and --dry-run need --fix", code="E1012", help="surefit audit DATA --fix --dry-run")
        options = auditing.Fix(copy, dry_run) if fix else None
        return auditing.audit(out, target, overrides, output=output, max_rows=max_rows, workers=workers, fix=options)

    finish(as_json, verb)
