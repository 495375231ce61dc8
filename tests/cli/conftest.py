"""The command line as its user meets it: configs on disk, output, exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app


@dataclass
class Answer:
    """What a verb said."""

    code: int
    stdout: str
    stderr: str

    @property
    def json(self) -> dict[str, Any]:
        """The object on the last line of stdout."""
        value: dict[str, Any] = json.loads(self.stdout.strip().splitlines()[-1])
        return value

    @property
    def text(self) -> str:
        return self.stdout + self.stderr


Surefit = Callable[..., Answer]


def call(*arguments: object) -> Answer:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return Answer(result.exit_code, result.stdout, result.stderr)


@pytest.fixture
def surefit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Surefit:
    """`surefit(...)` run in an empty directory with a cache of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    return call


TOOLS = '[{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]'


def row(who: str) -> dict[str, str]:
    """One xLAM row."""
    answers = json.dumps([{"name": "ring", "arguments": {"who": who}}])
    return {"query": f"Ring {who}", "tools": TOOLS, "answers": answers}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A config of a run that takes seconds, and its data."""
    rows = [row(f"person {number}") for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    path = tmp_path / "run.yaml"
    path.write_text(
        "recipe: function_calling\n"
        "model: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: 0.5, max_length: 256}\n"
        "train: {max_steps: 3, global_batch_size: 4, learning_rate: 5e-3}\n"
        "checkpoint: {save_steps: 1}\n"
        "evaluate: {max_new_tokens: 24}\n"
        "output_dir: runs/one\n",
        encoding="utf-8",
    )
    return path
