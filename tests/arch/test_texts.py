"""Two classes of fault, looked for in the whole source: switches that went through text, and commands that a shell
would read as something else."""

from __future__ import annotations

import ast
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from surefit.config.schema import SureFitConfig

SRC = Path(__file__).parents[2] / "src/surefit"
ASKED = re.compile(r'\b(value|is_on)\(\s*"([\w.]+)"\s*\)')
"""Of a run's resolved.yaml, in Python and in templates alike: `Artefacts.value` gives a text, and "false" is true."""


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, object]]:
    for name, field in model.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from fields(inner, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", inner


def may_be_switch(annotation: object) -> bool:
    return annotation is bool or any(may_be_switch(part) for part in typing.get_args(annotation))


def asked() -> list[tuple[str, str, str]]:
    """(file, function, key) wherever a page or a card asks for a resolved value."""
    files = [file for file in sorted((SRC / "report").iterdir()) if file.suffix in (".py", ".j2", ".html")]
    return [(file.name, *pair) for file in files for pair in ASKED.findall(file.read_text(encoding="utf-8"))]


def test_switches_of_resolved_yaml_are_never_read_as_texts() -> None:
    known = dict(fields(SureFitConfig))
    calls = asked()
    assert {"model.quantization", "lora.use_dora"} <= {key for _, _, key in calls}
    assert [call for call in calls if call[2] not in known] == []
    assert [call for call in calls if may_be_switch(known[call[2]]) != (call[1] == "is_on")] == []


QUOTING = re.compile(r"(shell_quote|shlex\.quote|shlex\.join)\(")


def shown_commands(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, expression) of each value that stands unquoted in a command that a text shows: what follows
    "surefit VERB" up to the end of the line or of the backticks."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            values = [part for part in node.values if isinstance(part, ast.FormattedValue)]
            parts = iter(range(len(values)))
            text = "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"\x00{next(parts)}\x00" for part in node.values
            )
            for command in re.findall(r"\bsurefit (?:[a-z-]+|\x00\d+\x00)((?: [^`\n,;:]*)?)", text):
                for number in map(int, re.findall(r"\x00(\d+)\x00", command)):
                    expression = ast.unparse(values[number].value)
                    if not QUOTING.match(expression):
                        yield node.lineno, expression


ARE_WORDS = {("train/preflight.py", "finding.code"), ("cli/slurm_jobs.py", "stage")}
QUOTED_BEFORE = {("report/reproduce.py", name) for name in ("run", "again", "resolved")}


def test_every_command_that_is_shown_is_one_that_a_shell_reads_as_it_was_meant() -> None:
    found = [
        (str(file.relative_to(SRC)), expression)
        for file in sorted(SRC.rglob("*.py"))
        for _, expression in shown_commands(ast.parse(file.read_text(encoding="utf-8")))
    ]
    assert set(found) == ARE_WORDS | QUOTED_BEFORE


@pytest.mark.parametrize(
    ("source", "unquoted"),
    [
        ('f"`surefit merge {path}` comes first"', ["path"]),
        ('f"surefit {verb} {shell_quote(path)} --resume"', []),
        ('f"surefit train {shell_quote(a)}, then {b}"', []),
        ('f"surefit evaluate {run.path} --variant {name}"', ["run.path", "name"]),
    ],
)
def test_what_counts_as_unquoted(source: str, unquoted: list[str]) -> None:
    assert [expression for _, expression in shown_commands(ast.parse(source))] == unquoted
