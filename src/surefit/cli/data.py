"""The verb `audit` for typer: its options."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import run_verb
from surefit.cli.options import Json, Overrides
from surefit.core.errors import ConfigError


def audit(
    target: Annotated[str, typer.Argument(metavar="CONFIG|DATA", help="A config or run directory, or bare data.")],
    overrides: Overrides = None,
    passport: Annotated[
        Path | None, typer.Option("--passport", metavar="FILE", help="Write the passport to this .json file.")
    ] = None,
    max_rows: Annotated[int | None, typer.Option(min=1, help="Look at this many rows, spread evenly.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of processes; default: one per core.")
    ] = None,
    fix: Annotated[
        bool, typer.Option("--fix", help="Write a copy without empty, too long, leaked and duplicate rows.")
    ] = False,
    clean_copy: Annotated[
        Path | None,
        typer.Option("--clean-copy", metavar="FILE", help="With --fix, write the copy here (.jsonl)."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="With --fix, replace an earlier copy.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="With --fix, only say what would be left out.")] = False,
    output: Annotated[Path | None, typer.Option("--output", "-o", hidden=True)] = None,
    out_file: Annotated[Path | None, typer.Option("--out", hidden=True)] = None,
    as_json: Json = False,
) -> None:
    """Look at every row: lengths, duplicates, leaks, damage; write the data set's passport."""

    def verb(out: Any) -> int:
        from surefit.cli import auditing

        if output or out_file:
            old_option, new_option = ("--output (-o)", "--passport") if output else ("--out", "--clean-copy")
            help_text = "--passport FILE writes what was found, --fix --clean-copy FILE the rows that remain"
            raise ConfigError(f"is now {new_option}", code="E1601", field=old_option, help=help_text)
        if not fix and (clean_copy or dry_run or overwrite):
            problem = "--clean-copy, --dry-run and --overwrite need --fix"
            raise ConfigError(problem, code="E1012", help="surefit audit DATA --fix --dry-run")
        options = auditing.CleanCopyOptions(clean_copy, dry_run, overwrite) if fix else None
        return auditing.audit_command(
            out, target, overrides, passport=passport, max_rows=max_rows, workers=workers, fix=options
        )

    run_verb(as_json, verb)
