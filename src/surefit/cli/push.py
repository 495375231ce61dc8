"""The verb `push`: upload an export to the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError
from surefit.core.rundir import RunDir
from surefit.core.units import bytes_text, plural, shell_quote


@verb
def push(
    out: Output,
    target: Annotated[Path, typer.Argument(metavar="RUN|EXPORT", help="An export; of a run, its export/hub.")],
    repo_id: Annotated[str, typer.Argument(metavar="OWNER/NAME", help="The repository on the hub.")],
    public: Annotated[
        bool, typer.Option("--public/--private", help="Create the repository as public (only if it does not exist).")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the files and sizes; send nothing.")] = False,
) -> int:
    """Upload an export to the hub: private by default, and nothing but what the export lists."""
    from surefit.merge.export_manifest import HUB, MANIFEST
    from surefit.merge.push import prepare_push, push_to_hub

    directory = target if (target / MANIFEST).is_file() else RunDir(target).exports / HUB
    if not directory.is_dir():
        help_text = f"`surefit export {shell_quote(target)}` makes one"
        raise ConfigError(
            "no export is here, and no run with one in export/hub", code="E1016", path=target, help=help_text
        )
    upload_plan = prepare_push(directory, repo_id, private=not public)
    rows = [[name, bytes_text(size)] for name, size in upload_plan.files.items()]
    kind = "public" if public else "private"
    out.table(f"{directory} → {repo_id} ({kind} where it is made now)", ["file", "size"], rows)
    if upload_plan.left_behind:
        out.note(f"stays here, as it is no part of the export: {', '.join(upload_plan.left_behind)}")
    result = {"repo_id": repo_id, "private": not public, "files": upload_plan.files, "bytes": upload_plan.bytes}
    if dry_run:
        out.say(f"{plural(len(rows), 'file')}, {bytes_text(upload_plan.bytes)}; nothing was sent")
        out.result(result | {"dry_run": True, "url": None})
        return EXIT_OK
    with out.progress("pushing") as on_progress:
        address = push_to_hub(upload_plan, on_progress)
    out.say(f"Pushed {plural(len(rows), 'file')}, {bytes_text(upload_plan.bytes)} → {address}", "green")
    out.result(result | {"dry_run": False, "url": address})
    return EXIT_OK
