"""Rows that are continued and not answered, from the check to the report: nothing is left to fail after training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.cli.conftest import Surefit

ANSWERED = [{"prompt": f"Say the number {n}.", "completion": str(n)} for n in range(12)]
CONTINUED = [{"text": f"Chapter {n} begins where the last one ended, and goes on."} for n in range(40)]
RUN = """recipe: chat
model: {name_or_path: surefit/nano, dtype: float32}
data: {train: train.jsonl, eval: eval.jsonl, max_length: 64}
train: {max_steps: 2, global_batch_size: 2}
output_dir: run
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    write(tmp_path / "train.jsonl", CONTINUED)
    write(tmp_path / "eval.jsonl", [{"text": row["text"].replace("Chapter", "Part")} for row in CONTINUED[:20]])
    return path


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def found(surefit: Surefit, config: Path) -> list[tuple[str, str]]:
    findings = surefit("check", config, "--json").json["findings"]
    return [(each["code"], each["message"]) for each in findings if each["code"] in ("EVL009", "EVL010")]


def test_a_run_on_text_ends_with_its_report(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    ((code, message),) = found(surefit, config)
    assert (code, "only the loss is measured" in message) == ("EVL010", True)
    planned = surefit("plan", config, "--json").json
    assert (planned["answering"], planned["scoring"]) == (None, None)
    answer = surefit("run", config)
    assert answer.code == 0, answer.text
    assert "left out: no held-out row has an answer to compare with" in answer.text
    assert (tmp_path / "run/report.html").exists()
    refused = surefit("evaluate", config)
    assert (refused.code, "no row with a gold answer" in refused.text) == (2, True)


def test_scores_that_are_asked_for_need_answers(surefit: Surefit, config: Path) -> None:
    config.write_text(RUN + "evaluate: {gate: {min: 0.5}}\n")
    said = "none of the 20 sampled rows has a gold answer, and evaluate.gate needs scores"
    assert found(surefit, config) == [("EVL009", said)]
    stopped = surefit("run", config)
    assert (stopped.code, "error[EVL009]" in stopped.text) == (1, True)
    assert not Path("run/adapter").exists()


def test_rows_that_end_with_a_bare_call_are_left_out_of_the_scores(
    surefit: Surefit, config: Path, tmp_path: Path
) -> None:
    call = {"type": "function", "function": {"name": "ring", "arguments": {"who": "Ada"}}}
    turns = [{"role": "user", "content": "Ring Ada"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    said = [{"role": "user", "content": "Say a number."}, {"role": "assistant", "content": "4"}]
    write(tmp_path / "train.jsonl", [{"messages": [{"role": "user", "content": "Say one."}, said[1]]}] * 9)
    write(tmp_path / "eval.jsonl", [{"messages": turns}, {"messages": said}, {"messages": turns}, {"messages": said}])
    assert found(surefit, config) == [("EVL010", "2 of 4 sampled rows have no gold answer and are not scored")]
    config.write_text(RUN + "evaluate: {max_new_tokens: 4}\n")
    assert surefit("train", config).code == 0
    answer = surefit("evaluate", config, "--variant", "base", "--variant", "adapter")
    assert answer.code == 0, answer.text
    assert "eval: 2 rows, exact_match with 95 % intervals; 2 more have no answer" in answer.text.replace("\n", " ")
    scores = json.loads((tmp_path / "run/eval/summary.json").read_text())["sets"]["eval"]
    assert (scores["n"], scores["unanswered"]) == (2, 2)
    assert surefit("report", "run").code == 0
    assert "2 more of its rows have no gold answer" in (tmp_path / "run/report.html").read_text()


def test_a_second_set_without_answers_is_refused(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", ANSWERED)
    write(tmp_path / "eval.jsonl", [{"prompt": f"And {n}?", "completion": str(n)} for n in range(6)])
    assert found(surefit, config) == []
    config.write_text(RUN + "evaluate: {extra_sets: {notes: notes.jsonl}}\n")
    write(tmp_path / "notes.jsonl", CONTINUED[:8])
    assert found(surefit, config) == [("EVL009", "none of the 8 sampled rows has a gold answer")]
