"""Findings D3 and D15 of 2026-11-25: what of rows that cannot be used is said, and what `data.bad_rows: skip` does."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest
from tests.cli.conftest import call as surefit
from tests.findings.conftest import write_rows

from surefit import nano

CONFIG = """recipe: chat
model: {name_or_path: model, dtype: float32}
data: {train: rows.jsonl, eval: 0.3, max_length: 256, bad_rows: skip, tokenized: tokens}
train: {max_steps: 1, global_batch_size: 4}
evaluate: {max_new_tokens: 2, extra_sets: {more: more.jsonl}}
hardware: {gpu: cpu}
output_dir: run
"""
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


def table(delimiter: str) -> str:
    file = io.StringIO()
    rows = [("prompt", "completion"), *((f"Where is café {n}, in Huế?".replace("ế", "é"), "there") for n in range(9))]
    csv.writer(file, delimiter=delimiter).writerows(rows)
    return file.getvalue()


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(table(";").encode(), id="D15-semicolons"),
        pytest.param(table("\t").encode(), id="D15-tabs"),
        pytest.param(table(",").encode("cp1252"), id="D15-cp1252"),
        pytest.param(table(",").encode("utf-16"), id="D15-utf-16"),
    ],
)
def test_d15_show_of_an_unreadable_table_says_why(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows.csv").write_bytes(content)
    (tmp_path / "run.yaml").write_text(
        "model: {name_or_path: surefit/nano}\ndata: {train: rows.csv, eval: 0.2}\noutput_dir: out\n"
    )
    plain = surefit("check", "run.yaml", "--json").json["findings"]
    (found,) = [one for one in plain if one["severity"] == "error"]
    shown = surefit("check", "run.yaml", "--show", "1", "--json")
    assert shown.code != 0
    error = shown.json
    assert error["code"] == found["error"] != "E1010"
    assert error["message"] == found["message"]
    assert Path(error["path"]).name == "rows.csv"


def rows_of(count: int, ask: str) -> list[dict[str, object]]:
    """Rows of which every fourth has a system message."""
    rows: list[dict[str, object]] = []
    for n in range(count):
        system = [{"role": "system", "content": "Be terse."}] if n % 4 == 0 else []
        turns = [{"role": "user", "content": f"{ask} {n}+1?"}, {"role": "assistant", "content": str(n + 1)}]
        rows.append({"messages": [*system, *turns]})
    return rows


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run on a model whose template takes no system message."""
    (tmp_path / "model").mkdir()
    for file in nano.PATH.iterdir():
        if file.suffix in (".json", ".safetensors", ".jinja"):
            (tmp_path / "model" / file.name).write_bytes(file.read_bytes())
    template = tmp_path / "model" / "chat_template.jinja"
    template.write_text(NO_SYSTEM + template.read_text())
    write_rows(tmp_path / "rows.jsonl", rows_of(40, "What is"))
    write_rows(tmp_path / "more.jsonl", rows_of(8, "Say what is"))
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


@pytest.mark.slow
def test_d3_prepare_leaves_refused_rows_out(run: Path) -> None:
    answer = surefit("prepare", "run.yaml", "--json")
    assert answer.code == 0, answer.text
    made = answer.json
    held_out = [json.loads(line) for line in (run / "tokens" / "heldout.jsonl").read_text().splitlines()]
    refused = sum("Be terse." in json.dumps(row) for row in held_out)
    assert made["held_out"] == len(held_out)
    assert made["rows"] + len(held_out) - refused == 30
    manifest = json.loads((run / "tokens" / "manifest.json").read_text())
    assert manifest["stats"]["skipped"] == 10 - refused


@pytest.mark.slow
def test_d3_evaluate_leaves_refused_rows_out(run: Path) -> None:
    answer = surefit("evaluate", "run.yaml", "--variant", "base", "--set", "data.tokenized=null", "--json")
    assert answer.code == 0, answer.text
    assert answer.json["sets"]["more"]["n"] == 6
    for name in ("eval", "more"):
        lines = (run / "run" / "eval" / name / "base.predictions.jsonl").read_text().splitlines()
        assert len(lines) == answer.json["sets"][name]["n"]
        assert "Be terse." not in "".join(lines)


@pytest.mark.slow
def test_d3_prepare_names_refused_rows(run: Path) -> None:
    answer = surefit("prepare", "run.yaml", "--set", "data.bad_rows=error", "--json")
    assert answer.code != 0
    assert [one["code"] for one in answer.json["also"]] == ["E4136"] * 5
    assert "6 of 25" in answer.json["message"]  # the other four are held out
    assert not (run / "tokens" / "manifest.json").exists()
