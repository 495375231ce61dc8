"""The verb `explain`: one rule's page, the list of rules, or what an error that another program printed means."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from surefit.cli.exits import verb
from surefit.cli.render import Output
from surefit.core.errors import EXIT_FINDINGS, EXIT_OK, ConfigError

LOG_BYTES = 2**23
"""Bytes at the end of a log that are searched."""
PATH_LIKE = re.compile(r"\S+\.(log|out|err|txt|gz)|\S*/\S*")


@verb
def explain(
    out: Output,
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT", help="A rule's code (SCH001), the text of an error, a log file, or - for stdin."
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="List every rule.")] = False,
) -> int:
    """Explain a rule, or the error that another program printed: what it means and what to do."""
    if not every if what is None else not what.strip():
        raise ConfigError(
            "explain what?",
            code="E1024",
            help='`surefit explain SCH001`, `surefit explain "CUDA out of memory"`, `surefit explain train.log`, or '
            "`surefit explain --all` for the list of rules",
        )
    if what is not None and re.fullmatch(r"\s*[Ee][0-9]{4}\s*", what):
        return _explain_error_code(out, what.strip().upper())
    if what is not None and not re.fullmatch(r"\s*[A-Za-z]{1,4}[0-9]{2,5}\s*", what):
        return _explain_text(out, what)
    from surefit.lint.engine import all_rules, explain_rule, find_rule

    rules = all_rules() if what is None else (find_rule(what),)
    if what is None:
        out.table("Rules", ["code", "severity", "what it finds"], [[r.code, r.severity, r.summary] for r in rules])
    else:
        out.say(explain_rule(what).rstrip("\n"))
    keys = ("code", "name", "severity", "summary")
    out.result({"rules": [{key: getattr(r, key) for key in keys} | {"evidence": r.section("Evidence")} for r in rules]})
    return EXIT_OK


def _explain_error_code(out: Output, code: str) -> int:
    out.say(f"{code} is the code of an error message of SureFit, not of a rule: the help line below the message says")
    out.say("what to do. docs/reference/errors.md has every message by its code.")
    out.result({"error_code": code})
    return EXIT_OK


def _explain_text(out: Output, what: str) -> int:
    from surefit.facts.error_texts import find_known_errors

    text, source, before = _read(what)
    if not text.strip():
        raise ConfigError(
            "there is no text to explain",
            code="E1890",
            path=source or "stdin",
            help="give it the error, or a log with it",
        )
    places = [place._replace(line=place.line + before) for place in find_known_errors(text)]
    for number, (error, line, times) in enumerate(places):
        if number:
            out.say("")
        where = f"{source}:{line}: " if source else ""
        out.say(f"{where}{error.tool}: {error.title}" + (f" ({times} times)" if times > 1 else ""), "bold")
        out.say(f"  {error.cause}")
        for step in error.fix:
            out.say(f"  - {step}")
        if error.rule:
            out.say(f"  `surefit check` finds one of the causes before the run: {error.rule}")
    out.result({"errors": [_as_json(place.error, place.line, place.times) for place in places]})
    if places:
        return EXIT_OK
    out.say(
        "This text is none of the errors that SureFit knows. The first error in a log is usually the cause of the rest;"
    )
    out.say("`surefit doctor` checks the machine, `surefit check CONFIG` the run.")
    return EXIT_FINDINGS


def _as_json(error: Any, line: int, times: int) -> dict[str, Any]:
    return {
        "id": error.id, "tool": error.tool, "line": line, "times": times, "cause": error.cause,
        "fix": list(error.fix), "rule": error.rule,
    }  # fmt: skip


def _read(what: str) -> tuple[str, str, int]:
    """Return the text to search, the name of the file that it is from ("" for none), and the lines left out before it.

    Raises:
        ConfigError: the file cannot be read, or what looks like a file is not there.
    """
    if what == "-":
        return sys.stdin.read(), "", 0
    path = Path(what)
    if os.path.isdir(what):  # unlike Path.is_dir, false for a text that is too long to be a name
        raise ConfigError("this is a directory", code="E1891", path=path, help="name a log in it")
    if os.path.isfile(what):
        try:
            return _end_of(path)
        except OSError as error:
            raise ConfigError(f"{what} cannot be read: {error.strerror}", code="E1960", path=path) from error
    if PATH_LIKE.fullmatch(what) and "://" not in what:
        raise ConfigError(
            "no such file", code="E1961", path=path, help="name a log, or write the error's text in quotation marks"
        )
    return what, "", 0


def _end_of(path: Path) -> tuple[str, str, int]:
    """Return the last `LOG_BYTES` of a log, its name, and the number of lines before them."""
    with path.open("rb") as file:
        left_out = max(0, file.seek(0, os.SEEK_END) - LOG_BYTES)
        file.seek(0)
        lines, rest = 0, left_out
        while rest and (chunk := file.read(min(rest, LOG_BYTES))):
            lines, rest = lines + chunk.count(b"\n"), rest - len(chunk)
        file.seek(left_out)
        return file.read().decode("utf-8", "replace"), str(path), lines
