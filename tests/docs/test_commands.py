"""Every `surefit …` command and `make …` target that the pages show exists, with the options they show."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.main import get_command

from surefit.cli.app import app

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^\s*```(?:console|sh|shell|bash)[^\n]*\n(.*?)^\s*```", re.MULTILINE | re.DOTALL)
ENDS = {"|", "||", "&&", ";", ">", ">>", "2>", "<", "&"}
CLI = get_command(app)


def command_lines(text: str) -> list[list[str]]:
    """The words of every command in a page's shell blocks, prompts, comments and what follows a pipe left out."""
    lines = "\n".join(BLOCK.findall(text)).replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        try:
            words = shlex.split(line.strip().removeprefix("$ "), comments=True)
        except ValueError:  # output, not a command
            continue
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words = words[1:]
        found.append(words[: next((i for i, word in enumerate(words) if word in ENDS), len(words))])
    return [words for words in found if words]


def commands(program: str) -> list[tuple[str, list[str]]]:
    return [
        (str(page.relative_to(ROOT)), words[1:])
        for page in PAGES
        for words in command_lines(page.read_text(encoding="utf-8"))
        if words[0].rpartition("/")[2] == program
    ]


def problems(arguments: list[str]) -> list[str]:
    """What the parser would not know, and configs that are not there; nothing is run."""
    options = {word.partition("=")[0] for word in arguments if re.match(r"--?[a-zA-Z]", word)}
    verb = next((word for word in arguments if not word.startswith("-")), None)
    if verb is not None and verb not in CLI.commands:
        return [verb]
    params = CLI.params if verb is None else CLI.commands[verb].params
    known = {"-h", "--help"}.union(*(param.opts for param in params), *(param.secondary_opts for param in params))
    files = {word for word in arguments if word.startswith("configs/") and not (ROOT / word).exists()}
    return sorted((options - known) | files)


@pytest.mark.parametrize(("page", "arguments"), commands("surefit"), ids=repr)
def test_surefit_understands_what_the_pages_show(page: str, arguments: list[str]) -> None:
    assert problems(arguments) == [], page


@pytest.mark.parametrize(("page", "arguments"), commands("make"), ids=repr)
def test_make_knows_the_targets_that_the_pages_show(page: str, arguments: list[str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert {word for word in arguments if "=" not in word} <= targets, page


def test_what_is_wrong_is_seen() -> None:
    text = "```console\n$ HF_TOKEN=x surefit trian a.yaml | cat\nsome output it's\n```\nsurefit prose\n"
    assert command_lines(text) == [["surefit", "trian", "a.yaml"]]
    assert problems(["trian", "a.yaml"]) == ["trian"]
    assert problems(["train", "configs/none.yaml", "--resum", "--set", "a.b=c"]) == ["--resum", "configs/none.yaml"]
    assert problems(["train", "a.yaml", "--resume"]) == []
