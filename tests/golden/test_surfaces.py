"""What the terminal and the report page say, in words: one file per command in `expected/`.

A reworded message changes a file here, and nothing else. `pytest tests/golden --update-golden` writes the files anew;
their diff is read in review. Numbers, times, sizes and paths are replaced: other tests assert those, and codes.
"""

from __future__ import annotations

import html
import json
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import typer
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.facts.hardware import processor_name

EXPECTED = Path(__file__).parent / "expected"


class DiskUsage(NamedTuple):
    """The result of `shutil.disk_usage`."""

    total: int
    used: int
    free: int


TOOLS = '[{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]'
CONFIG = """recipe: function_calling
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: 0.5, max_length: 256}
train: {max_steps: 3, global_batch_size: 4, learning_rate: 5e-3}
checkpoint: {save_steps: 1}
evaluate: {max_new_tokens: 24}
output_dir: runs/one
"""
FILES = {
    "run.yaml": CONFIG,
    "misspelled.yaml": CONFIG.replace("max_steps", "max_step").replace("5e-3", "fast"),
    "renamed.yaml": CONFIG + "adapter: {kind: lora, alpha: 32}\n",
    "doubtful.yaml": CONFIG.replace("5e-3", "5.0").replace("max_length: 256", "max_length: 32"),
    "no-rows.yaml": CONFIG.replace("rows.jsonl", "row.jsonl"),
    "axolotl.yaml": "base_model: surefit/nano\ndatasets:\n  - path: chats.jsonl\n    type: chat_template\n"
    "adapter: lora\nlora_r: 8\nlora_alpha: 16\nlora_target_linear: true\nmicro_batch_size: 2\n"
    "gradient_accumulation_steps: 4\nnum_epochs: 1\nlearning_rate: 0.0002\nsequence_len: 512\nflash_attention: true\n",
    "chats.jsonl": "".join(
        json.dumps(
            {"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"I say {n}."}]}
        )
        + "\n"
        for n in range(30)
    ),
    "rows.jsonl": "".join(
        json.dumps(
            {
                "query": f"Ring person {n}",
                "tools": TOOLS,
                "answers": json.dumps([{"name": "ring", "arguments": {"who": f"person {n}"}}]),
            }
        )
        + "\n"
        for n in range(40)
    ),
}
COMMANDS = {
    "init": "init amr_parsing --output started.yaml",
    "check": "check run.yaml",
    "check-misspelled": "check misspelled.yaml",
    "check-renamed": "check renamed.yaml",
    "check-doubtful": "check doubtful.yaml",
    "check-no-rows": "check no-rows.yaml",
    "check-axolotl": "check axolotl.yaml",
    "import-axolotl": "import axolotl.yaml",
    "audit": "audit chats.jsonl",
    "plan": "plan run.yaml --gpu t4",
    "explain": "explain SCH001",
    "train-dry-run": "train run.yaml --dry-run",
    "merge-too-early": "merge run.yaml",
    "train": "train run.yaml",
    "train-again": "train run.yaml",
    "merge": "merge run.yaml",
    "evaluate": "evaluate run.yaml",
    "report": "report run.yaml",
    "runs": "runs list runs",
    "runs-show": "runs show runs/one",
    "slurm": "slurm run.yaml",
    "export": "export run.yaml",
}
"""Name of the file → the command, in the order in which they run in one directory."""


def words(text: str, directory: Path) -> str:
    """Return a text with its numbers as #, its paths shortened, and without what a terminal's width decides.

    >>> words("  3 steps of E1002 in 1.25 s, 0.5 GiB   ━━━ 12:30", Path("/tmp"))
    '# steps of E1002 in #, # ━ #'
    """
    text = re.sub(r"\x1b\[[0-9;]*m", "", text).replace(str(directory), "DIR").replace(sys.prefix, "VENV")
    text = text.replace((processor_name() or "no name").split(",")[0], "PROCESSOR")
    # Progress is a line every ten seconds: how many there are is how slow the machine was.
    text = re.sub(r"^.*\d+/\d+ ETA .*\n", "", text, flags=re.MULTILINE)
    # transformers' bar is there where another test of this process imported it first.
    text = re.sub(r"\r?Loading weights:[^\r\n\]]*\](\r?\n)?", "", text)
    text = re.sub(r"\b[0-9a-f]{8,}\b", "HASH", text)
    text = re.sub(r"[+−±]?(?<!\w)\d[\d,.:]*(e-?\d+)?([kM]\b)?( ?(ms|s|min|h|B|KiB|MiB|GiB|KB|MB|GB|%)\b)?", "#", text)
    text = re.sub(r"([─━═╌┄█])\1+", r"\1", text)
    text = re.sub(r"\[([A-Z])[A-Z]*\]", "[bar]", text)
    lines = (" ".join(line.split()) for line in text.splitlines())
    return "\n".join(line for line in lines if line and set(line) - set("# –%"))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with configs and rows as typed."""
    path = tmp_path_factory.mktemp("surfaces")
    for name, text in FILES.items():
        (path / name).write_text(text, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def outputs(directory: Path) -> dict[str, str]:
    """What every command says, all run in order in one directory, as a user's are: no test needs another test."""
    said = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(directory)
        patch.setenv("SUREFIT_CACHE", str(directory / "cache"))
        patch.setenv("COLUMNS", "120")
        # How much is free, and whether it changes while the run trains, is the machine's: the page draws it if it does.
        patch.setattr("shutil.disk_usage", lambda path: DiskUsage(2**41, 2**40, 2**40))
        for name, command in COMMANDS.items():
            result = CliRunner().invoke(app, command.split())
            said[name] = f"$ surefit {command}\n{words(result.output, directory)}\nexit code {result.exit_code}"
    return said


def compare(name: str, said: str, update: bool) -> None:
    file = EXPECTED / f"{name}.txt"
    if update:
        file.write_text(said + "\n", encoding="utf-8")
    assert said + "\n" == file.read_text(encoding="utf-8"), "pytest tests/golden --update-golden, and read the diff"


@pytest.mark.parametrize("name", COMMANDS)
def test_command(name: str, outputs: dict[str, str], request: pytest.FixtureRequest) -> None:
    compare(name, outputs[name], request.config.getoption("--update-golden"))


def test_next_commands(outputs: dict[str, str], directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command that a verb ends with is one that the command line takes as it is printed."""
    monkeypatch.chdir(directory)
    named = {name: next_commands(said) for name, said in outputs.items()}
    lacking = {name for name, commands in named.items() if not commands}
    assert lacking == {"explain", "check-misspelled", "check-renamed", "merge-too-early", "train-again", "slurm",
                       "runs-show"}  # fmt: skip
    for command in {shlex.join(words) for commands in named.values() for words in commands}:
        require_parsed(shlex.split(command))


def next_commands(said: str) -> list[list[str]]:
    """The words of each command in the last line with `Next: `."""
    lines = re.findall(r"Next: (surefit .*)", said)
    return [shlex.split(part)[1:] for part in lines[-1].split(", or ")] if lines else []


def require_parsed(words: Sequence[str]) -> None:
    """Parse a command without running it: typer raises for a verb or an option that there is not."""
    group, args = typer.main.get_command(app), list(words)
    with group.make_context("surefit", args, resilient_parsing=False) as ctx:
        while hasattr(group, "commands"):
            name, group, args = group.resolve_command(ctx, [*ctx._protected_args, *ctx.args])
            ctx = group.make_context(name, args, parent=ctx)


@pytest.mark.usefixtures("outputs")
def test_report_page(directory: Path, request: pytest.FixtureRequest) -> None:
    """The page that `report` wrote, without its markup and plots, the model's answers and what names the machine."""
    page = (directory / "runs/one/report.html").read_text(encoding="utf-8")
    page = re.sub(r"<(style|script|svg)\b.*?</\1>", "", page, flags=re.DOTALL)
    page = re.sub(r'<section aria-labelledby="(examples|environment)"[^>]*>.*?</section>', "", page, flags=re.DOTALL)
    # Whether the RAM grows from phase to phase depends on what this process did before.
    page = re.sub(r"<h3>Memory by phase</h3>.*?(?=<h3>Dry pass)", "", page, flags=re.DOTALL)
    said = words(html.unescape(re.sub(r"<[^>]+>", "\n", page)), directory)
    compare("report-page", said, request.config.getoption("--update-golden"))


def test_help(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    verbs = ["", *sorted(command.name or command.callback.__name__.rstrip("_") for command in app.registered_commands)]
    said = "\n\n".join(
        f"$ surefit {verb} --help\n{words(CliRunner().invoke(app, [*verb.split(), '--help']).output, Path('/nowhere'))}"
        for verb in verbs
    )
    compare("help", said, request.config.getoption("--update-golden"))
