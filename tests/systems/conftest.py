"""What `surefit check` says of a file, as a set of codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.facts import hardware, stack
from surefit.facts.setup import Setup
from surefit.lint.engine import run_rules
from surefit.lint.rule import LintContext

Check = Callable[..., set[str]]


def conversation(number: int) -> dict[str, str]:
    """One of many rows that are all different."""
    return {"prompt": f"What is {number} and {number + 3}?", "completion": f"It is {2 * number + 3}."}


def jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """check(text, name="run.yaml", **files) → the codes of all findings, but for SCH011: these rows are few.

    `rows.jsonl` with 1,000 sound rows lies beside the file; `files` adds others. No GPU, no network, no token.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(hardware, "detect_gpus", list)
    Path("rows.jsonl").write_text(jsonl([conversation(n) for n in range(1_000)]), encoding="utf-8")

    def run(text: str, name: str = "run.yaml", **files: str) -> set[str]:
        Path(name).write_text(text, encoding="utf-8")
        for stem, content in files.items():
            Path(stem.replace("__", ".")).write_text(content, encoding="utf-8")
        result = CliRunner().invoke(app, ["check", name, "--json"])
        answer = json.loads(result.stdout.strip().splitlines()[-1])
        if "findings" not in answer:  # the file itself is not usable
            assert result.exit_code == 2, answer
            return {f"{answer['error']}: {answer['field']}: {answer['message']}"}
        assert "INT001" not in {finding["code"] for finding in answer["findings"]}
        return {finding["code"] for finding in answer["findings"]} - {"SCH011"}

    return run


@pytest.fixture
def audit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """audit(name, text) → the codes of `surefit audit` for a file of rows."""
    monkeypatch.chdir(tmp_path)

    def run(name: str, text: str) -> set[str]:
        Path(name).write_text(text, encoding="utf-8")
        result = CliRunner().invoke(app, ["audit", name, "--workers", "1", "--json"])
        answer = json.loads(result.stdout.strip().splitlines()[-1])
        return {finding["code"] for finding in answer["findings"]} - {"SCH011"}

    return run


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """installed({"numpy": "2.1.0"}, {"tensorboard": ["protobuf<3.20"]}): these packages, and what they ask for."""

    def pretend(versions: dict[str, str], requires: dict[str, list[str]] | None = None) -> None:
        asked = {name: tuple(texts) for name, texts in (requires or {}).items()}
        found = stack.StackFacts(python="3.11.7", versions=versions, requires=asked)
        monkeypatch.setattr(stack, "stack_facts", lambda: found)

    return pretend


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., set[str]]:
    """judge(tool=…, parallel=…): the codes for settings that reach a run from several places, by `Setup`'s names.

    With `gpu` (or "cpu") the hardware is known, with `cpu_flags` the installed packages are.
    """

    def run(gpu: str | None = None, cpu_flags: set[str] | None = None, **settings: object) -> set[str]:
        versions = {settings["tool"]: "1.16.0", "bitsandbytes": "0.50.2", "torch": "2.13.0+cpu"}
        context = LintContext(
            None,
            tmp_path / "run.yaml",
            setup=Setup(**settings),
            hardware=hardware.hardware_facts(gpu) if gpu else None,
            stack=stack.StackFacts(versions=versions, cpu_flags=cpu_flags) if cpu_flags is not None else None,
        )
        return {finding.code for finding in run_rules(context).findings}

    return run
