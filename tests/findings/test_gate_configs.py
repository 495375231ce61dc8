"""Gates that name nothing or cannot fail, and few rows to decide on: found by `check`, before anything is trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app

RUN = """recipe: chat
model: {name_or_path: surefit/nano}
data: {train: rows.jsonl, eval: test.jsonl, max_length: 128}
train: {global_batch_size: 8}
evaluate: {}
hardware: {gpu: cpu}
output_dir: run
"""


def write_rows(path: str, number: int, start: int = 0) -> None:
    rows = [{"prompt": f"Say the number {n}.", "completion": f"It is {n}."} for n in range(start, start + number)]
    Path(path).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def check(evaluate: str, rows: int = 200, *more: str) -> set[tuple[str, str, str]]:
    """The findings of a config with this section `evaluate` and so many held-out rows in a file."""
    Path("run.yaml").write_text(RUN.replace("evaluate: {}", f"evaluate: {evaluate}"), encoding="utf-8")
    write_rows("rows.jsonl", 40)
    write_rows("test.jsonl", rows, 1000)
    result = CliRunner().invoke(app, ["check", "run.yaml", *more, "--json"])
    report: dict[str, Any] = json.loads(result.stdout)
    found = {(one["code"], one["severity"], one["field"]) for one in report["findings"]}
    return {one for one in found if one[0].startswith(("EVL", "DAT006"))}


REFERENCE = ("EVL033", "error", "evaluate.gate.not_worse_than")
MIN, MARGIN = (("EVL034", "warning", f"evaluate.gate.{key}") for key in ("min", "margin"))
SMALL, FEW = ("DAT006", "warning", "data.eval"), ("EVL004", "warning", "data.eval")


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        pytest.param("{not_worse_than: bse}", {REFERENCE}, id="N15-bse"),
        pytest.param("{not_worse_than: Base}", {REFERENCE}, id="N15-Base"),
        pytest.param("{not_worse_than: runs/older}", {REFERENCE}, id="N15-no-such-run"),
        pytest.param("{not_worse_than: rows.jsonl}", {REFERENCE}, id="N15-a-file"),
        pytest.param("{not_worse_than: base}", set(), id="N15-base"),
        pytest.param("{not_worse_than: .}", set(), id="N15-a-directory"),
        pytest.param("{not_worse_than: '.:merged'}", set(), id="N15-a-variant"),
        pytest.param("{not_worse_than: base, margin: 1}", {MARGIN}, id="N15-margin-1"),
        pytest.param("{not_worse_than: base, margin: 0.5}", {MARGIN}, id="N15-margin-half"),
        pytest.param("{not_worse_than: base, margin: 0.1}", set(), id="N15-margin-10-points"),
        pytest.param("{min: 0.03}", {MIN}, id="N15-min-under-margin"),
        pytest.param("{min: 0.03, margin: 0.01}", set(), id="N15-min-over-its-margin"),
        pytest.param("{min: 0.6, margin: 1}", {MIN}, id="N15-min-margin-1"),
        pytest.param("{min: 0.6}", set(), id="N15-min"),
        pytest.param("{metric: exact_match}", set(), id="N15-no-condition-is-CFG002"),
    ],
)
def test_the_gate(gate: str, expected: set[tuple[str, str, str]]) -> None:
    assert check(f"{{gate: {gate}}}") == expected


def test_a_misspelt_reference_is_named() -> None:
    check("{gate: {not_worse_than: bse}}")
    result = CliRunner().invoke(app, ["check", "run.yaml", "--json"])
    assert "'base'" in json.loads(result.stdout)["findings"][0]["message"]
    assert result.exit_code == 1


@pytest.mark.parametrize(
    ("evaluate", "rows", "expected"),
    [
        pytest.param("{}", 5, {SMALL}, id="K1-file-of-five"),
        pytest.param("{}", 9, {SMALL}, id="K1-nine"),
        pytest.param("{}", 10, set(), id="K1-ten"),
        pytest.param("{gate: {min: 0.6}}", 5, {SMALL, FEW}, id="K1-gate-on-five"),
        pytest.param("{gate: {not_worse_than: base}}", 40, {FEW}, id="K1-ties-cannot-tell"),
        pytest.param("{gate: {not_worse_than: base}}", 60, set(), id="K1-ties-can"),
        pytest.param(
            "{gate: {min: 0.6}, max_examples: 5}", 60, {("EVL004", "warning", "evaluate.max_examples")}, id="K1-max"
        ),
        pytest.param(
            "{extra_sets: {old: rows.jsonl, few: few.jsonl}}",
            60,
            {("DAT006", "warning", "evaluate.extra_sets.few")},
            id="K1-extra",
        ),
    ],
)  # fmt: skip
def test_few_rows_in_a_file(evaluate: str, rows: int, expected: set[tuple[str, str, str]]) -> None:
    write_rows("few.jsonl", 3, 500)
    assert check(evaluate, rows) == expected
