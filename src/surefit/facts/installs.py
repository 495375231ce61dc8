"""Packages that a shell script installs: `pip install`, `uv pip install` and `conda install`, read but never run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from surefit.facts.shell import Command, Shell

_TOKEN = re.compile(r"""(?:"[^"]*"|'[^']*'|[^\s"'])+""")
_INSTALLS = re.compile(
    r"^(?:RUN\s+|sudo\s+|!|%)*(?:(?:\S*/)?python[\d.]*\s+-m\s+)?(?:uv\s+)?(pip[\d.]*|conda|mamba|micromamba)\s+install\s"
)
_UNQUOTED = re.compile(r"([A-Za-z0-9][\w.-]*(?:\[[\w,.-]+\])?)([<>])(=?\d\S*)")
_VALUED = frozenset({
    "-r", "--requirement", "-c", "--constraint", "-e", "--editable", "-f", "--find-links", "-i", "--index-url",
    "--extra-index-url", "-t", "--target", "--python", "-p", "-n", "--name", "--prefix", "--channel", "--timeout",
    "--retries", "--cache-dir", "--root", "--platform", "--log",
})  # fmt: skip
"""Options that a value follows."""
INDEXES = frozenset({"-f", "--find-links", "-i", "--index-url", "--extra-index-url"})


@dataclass(frozen=True)
class Install:
    """One package of one install command.

    Attributes:
        written: the requirement, or conda's `name=version`.
        line: line number, 1-based.
        conda: whether conda installs it.
        text: its text in the command.
        redirected: the part that the shell reads as a file name, `=0.43` of an unquoted `bitsandbytes>=0.43`.
        index: the command sets another index, or a page of files.
        isolated: the package is built in an environment of its own, pip's default.
    """

    written: str
    line: int
    text: str = ""
    conda: bool = False
    redirected: str = ""
    index: bool = False
    isolated: bool = True


def installs_in(commands: Iterable[Command], shell: Shell) -> Iterator[Install]:
    """Yield the packages of all install commands, in order, with variables put in where they are constants."""
    for command in commands:
        text = shell.substitute(command.text)
        match = _INSTALLS.match(text)
        if match:
            yield from _packages(command, _TOKEN.findall(text[match.end() :]), conda=not match[1].startswith("pip"))


def _packages(command: Command, tokens: list[str], conda: bool) -> Iterator[Install]:
    options = {token.partition("=")[0] for token in tokens if token.startswith("-")}
    index, isolated = bool(options & INDEXES), "--no-build-isolation" not in options
    skipped = False
    for token in tokens:
        if skipped or token.startswith("-") or re.match(r"\d?>|<|&", token):
            # The word behind an option with a value, or behind a redirection of its own.
            skipped = not skipped and (token in _VALUED or token in (">", ">>", "<") or (conda and token == "-c"))
            continue
        redirect = None if token[0] in "\"'" else _UNQUOTED.fullmatch(token)
        requirement = redirect[1] if redirect else re.sub(r"[\"']", "", token)
        if "$" in requirement or "`" in requirement or not requirement:
            continue
        line = next((command.line + i for i, piece in enumerate(command.pieces) if token in piece), command.line)
        yield Install(requirement, line, token, conda, redirect[3] if redirect else "", index, isolated)
