"""The verb `explain`: one rule's page, or the list of rules."""

from __future__ import annotations

from typing import Annotated

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_OK, ConfigError


@verb
def explain(
    out: Output,
    code: Annotated[str | None, typer.Argument(help="A rule's code, e.g. SCH001.")] = None,
    every: Annotated[bool, typer.Option("--all", help="List every rule.")] = False,
) -> int:
    """Explain a rule: what it looks for, why that is bad, how to fix it, where it was seen."""
    from surefit.lint.engine import all_rules, explain_rule, find_rule

    if code is None and not every:
        raise ConfigError(
            "which rule?", code="E1024", help="`surefit explain SCH001`, or `surefit explain --all` for the list"
        )
    rules = all_rules() if code is None else (find_rule(code),)
    if code is None:
        out.table("Rules", ["code", "severity", "what it finds"], [[r.code, r.severity, r.summary] for r in rules])
    else:
        out.say(explain_rule(code).rstrip("\n"))
    keys = ("code", "name", "severity", "summary")
    out.result({"rules": [{key: getattr(r, key) for key in keys} | {"evidence": r.section("Evidence")} for r in rules]})
    return EXIT_OK
