"""The verbs of `surefit runs`, one file each."""

from __future__ import annotations

from typing import Any

import typer

from surefit.cli.command_line import Verb, Verbs
from surefit.cli.runs.diff import diff
from surefit.cli.runs.list import list_
from surefit.cli.runs.prune import prune
from surefit.cli.runs.reproduce import reproduce
from surefit.cli.runs.show import show


class _ListsByDefault(Verbs):
    """Command group in which `surefit runs DIR` means `surefit runs list DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or args[0] not in (*self.commands, *ctx.help_option_names):
            args = ["list", *args]
        return super().parse_args(ctx, args)


runs = typer.Typer(cls=_ListsByDefault, help="List, look into, compare, prune and reproduce runs.")
for command in (list_, show, diff, prune, reproduce):
    runs.command(command.__name__.strip("_"), cls=Verb)(command)
