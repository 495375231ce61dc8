"""Writes the pages of the manual that the code knows best: docs/reference/cli.md from the command line itself, and
docs/migrate/ from the importers' tables, each with a file that is converted while the page is written.

python scripts/manual.py          (or `make reference`; a test compares the pages with the code)
"""

from __future__ import annotations

import inspect
import os
import runpy
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from typer.main import get_command
from typer.testing import CliRunner

from surefit import api
from surefit.cli.app import app
from surefit.core.rundir import write_atomic

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SECTIONS = ("Args:", "Attributes:", "Raises:", "Returns:")
KEYS = runpy.run_path(str(ROOT / "scripts" / "keys_here.py"))
ROWS = '{"messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]}\n' * 40


TOOLS: dict[str, dict[str, Any]] = yaml.safe_load((ROOT / "scripts" / "migrate.yaml").read_text(encoding="utf-8"))


def migrate_page(name: str) -> str:
    """Return the page for those who come from a tool: check and import, one converted file, the keys."""
    tool = TOOLS[name]
    file, schema = tool["file"], tool["schema"]
    lines = [
        f"# From {tool['name']}",
        "",
        f"SureFit checks your {'config' if schema else 'job'} in its own terms, and makes a SureFit config of it:",
        *("", "```bash"),
        *(f"surefit check {file}", f"surefit import {file} -o run.yaml", "surefit run run.yaml"),
        *("```", ""),
        "No value is replaced silently: a key without an equivalent becomes a comment with its value and the reason.",
        *("", "## Example", "", f"```{Path(file).suffix.lstrip('.').replace('yml', 'yaml')}"),
        *(tool["text"].rstrip(), "```", "", "becomes", "", "```yaml", converted(file, tool["text"]).rstrip(), "```"),
        *("", "## Differences", ""),
        *(f"- {note}" for note in tool["notes"]),
    ]
    if schema:
        lines += ["", "## Keys", "", f"| {tool['name']} | SureFit |", "|---|---|", *key_rows(schema), ""]
        lines += ["Most other keys become comments: [what has no place](../other-tools.md#what-has-no-place)."]
    return "\n".join(lines) + "\n"


def converted(file: str, text: str) -> str:
    """Return what `surefit import` prints for a file of another tool, with rows beside it."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, file).write_text(text, encoding="utf-8")
        Path(folder, "rows.jsonl").write_text(ROWS, encoding="utf-8")
        os.chdir(folder)
        try:
            done = CliRunner().invoke(app, ["import", file], catch_exceptions=False)
        finally:
            os.chdir(before)
    assert done.exit_code == 0, done.output
    return done.stdout


def key_rows(schema: str) -> Iterator[str]:
    """Yield a row for each key that has a place in SureFit's config."""
    for key, entry in KEYS["keys_of"](schema):
        if len(entry) == 2 and not key.startswith("_"):
            target, words = entry
            values = ", ".join(f"`{theirs}` → `{ours}`" for theirs, ours in words.items())
            yield f"| `{key}` | `{target.partition(', ')[0]}`{_rest(target)}{f' ({values})' if values else ''} |"


def _rest(target: str) -> str:
    _, comma, rest = target.partition(", ")
    return f"{comma}{rest}"


def cli_page() -> str:
    """Return every command with its arguments and options, as `--help` says them."""
    lines = [
        "# Command line",
        "",
        "`surefit VERB --help` prints the same. Every verb takes `--json`: one object on the last line of standard",
        "output. [Exit codes](../how-a-run-works.md#exit-codes).",
        "",
    ]
    for name, command in verbs(get_command(app)):
        lines += [f"## {name}", "", " ".join((command.help or "").split()), ""]
        lines += ["```text", usage(name, command), "```", ""]
        # By its own word for it: typer has a click of its own, whose classes are not click's.
        options = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
        if options:
            rows = [option_row(option) for option in options if option.name != "help"]
            lines += ["| option | |", "|---|---|", *rows, ""]
    return "\n".join(lines).rstrip() + "\n"


def verbs(group: Any, before: str = "surefit") -> Iterator[tuple[str, Any]]:
    """Yield every command that is not hidden, those of groups too, by its whole name."""
    for name, command in getattr(group, "commands", {}).items():
        if command.hidden:
            continue
        if hasattr(command, "commands"):
            yield from verbs(command, f"{before} {name}")
        else:
            yield f"{before} {name}", command


def usage(name: str, command: Any) -> str:
    """Return the line of use: arguments in their order."""
    arguments = [parameter for parameter in command.params if parameter.param_type_name == "argument"]
    words = [
        f"{'' if argument.required else '['}{(argument.metavar or argument.name or '').upper().strip('[]')}"
        f"{'...' if argument.nargs != 1 else ''}{'' if argument.required else ']'}"
        for argument in arguments
    ]
    return " ".join([name, "[OPTIONS]", *words])


def option_row(option: Any) -> str:
    """Return an option's row: its names, what it takes, what it does."""
    names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
    takes = "" if option.is_flag else f" {option.metavar or str(option.name).upper()}"
    text = " ".join((option.help or "").split()).replace("|", "\\|").replace("<", "&lt;")
    return f"| {names}{takes.replace('|', '&#124;')} | {text} |"


def python_page() -> str:
    """Every function and class of `surefit`, with its signature and docstring."""
    lines = ["# Python API", "", "`import surefit`. [From Python](../python.md) shows them at work.", ""]
    for name in sorted(api.__all__, key=lambda name: (inspect.isclass(getattr(api, name)), name)):
        thing = getattr(api, name)
        lines += [f"## {name}", "", "```python", signature(name, thing), "```", "", *docstring(thing), ""]
    return "\n".join(lines).rstrip() + "\n"


def signature(name: str, thing: Any) -> str:
    """Return how a function is called, and of a class its name: instances are returned, not made."""
    if inspect.isclass(thing):
        return f"class {name}"
    parts: list[str] = []
    parameters = inspect.signature(thing).parameters.values()
    for n, one in enumerate(parameters):
        if one.kind is inspect.Parameter.KEYWORD_ONLY and (n == 0 or parts[-1] != "*") and "*" not in parts:
            parts.append("*")
        default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}"
        parts.append(f"{one.name}: {one.annotation}{default}")
    return f"{name}({', '.join(parts)}) -> {inspect.signature(thing).return_annotation}"


def docstring(thing: Any) -> list[str]:
    """Return a docstring in Markdown: its sections (Args, Attributes, Raises) as lists."""
    lines: list[str] = []
    for line in (inspect.getdoc(thing) or "").splitlines():
        if line.rstrip() in SECTIONS:
            lines += [f"**{line.strip().rstrip(':')}**", ""]
        elif line.startswith("    ") and not line.startswith("     ") and ": " in line:
            names, _, text = line.strip().partition(": ")
            lines.append(f"- `{names}`: {text}")
        else:
            lines.append(f"  {line.strip()}" if line.startswith("    ") else line)
    return lines


PAGES: Mapping[str, Any] = {
    "reference/cli.md": cli_page,
    "reference/python.md": python_page,
    **{f"migrate/{name}.md": (lambda name=name: migrate_page(name)) for name in TOOLS},
}
"""Page → what writes it."""


if __name__ == "__main__":
    for page, write in PAGES.items():
        write_atomic(DOCS / page, write())
        print(DOCS / page)
