"""The verb `certify`: whether a merged model is base + adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.merge import say_certificate
from surefit.cli.options import Base, Into, Prompts, TrainedOn
from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS


@verb
def certify(
    out: Output,
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="The adapter's directory.")],
    merged: Annotated[Path, typer.Argument(metavar="MERGED", help="The merged model's directory, made by any tool.")],
    base: Base = None,
    into: Into = "auto",
    trained_on: TrainedOn = "none",
    prompts: Prompts = None,
) -> int:
    """Say whether a merged model is base + adapter: weight by weight, and by what it answers."""
    from surefit.stages.merging import AdapterOptions, certify_merge

    certificate = certify_merge(adapter, merged, out, into, AdapterOptions(base, None, trained_on, prompts))
    if not certificate["passed"]:
        out.say(f"Not certified: {certificate['reason']}", "red")
        out.result(certificate)
        return EXIT_FINDINGS
    code = say_certificate(out, certificate, merged)
    out.next_step(["serve-check", merged])
    return code
