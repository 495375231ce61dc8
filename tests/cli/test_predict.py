"""`surefit predict` as its user meets it: answers that survive a kill, files that are not mixed up, bad rows."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit, row

SMALL = ("--base", "--set", "evaluate.batch_size=1", "--set", "evaluate.max_new_tokens=4")


def lines_of(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.slow
def test_killed_with_kill_9_it_goes_on(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    small = (*SMALL[:-1], "evaluate.max_new_tokens=16")
    path = tmp_path / "answers.jsonl"
    command = [sys.executable, "-m", "surefit", "predict", str(config), "rows.jsonl", "-o", str(path), *small]
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ)
    try:
        deadline = time.monotonic() + 120
        while b"\n" not in (path.read_bytes() if path.exists() else b""):
            assert child.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.005)
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    done = path.read_bytes().count(b"\n")
    assert 0 < done < 40, "killed between the first answers and the last"
    kept = path.read_bytes()[: path.read_bytes().rfind(b"\n") + 1]
    path.write_bytes(kept + b'{"index": 99, "text": "cut sho')
    answer = surefit("predict", config, "rows.jsonl", "-o", path, *small, "--json")
    assert answer.code == 0, answer.text
    assert f"{done} answers of 40 are there already" in answer.stderr
    lines = lines_of(path)
    assert [line["index"] for line in lines] == list(range(40))
    assert path.read_bytes().startswith(kept)
    whole = tmp_path / "whole.jsonl"
    assert surefit("predict", config, "rows.jsonl", "-o", whole, *small).code == 0
    assert whole.read_bytes() == path.read_bytes()


def test_answers_of_other_rows_or_settings_are_not_mixed(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    def ask(*more: str) -> object:
        return surefit("predict", config, "few.jsonl", "-o", "out.jsonl", *SMALL, *more)

    few = tmp_path / "few.jsonl"
    few.write_text("".join(json.dumps(row(name)) + "\n" for name in ("Ann", "Bo")), encoding="utf-8")
    assert ask().code == 0
    (first, second) = lines_of(tmp_path / "out.jsonl")
    assert list(first) == ["index", "where", "prompt", "gold", "text", "truncated", "parsed", "scores"]
    assert "Ring Ann" in str(first["prompt"])
    assert second["where"] == "few.jsonl:2"
    written = (tmp_path / "out.jsonl").read_bytes()
    assert ask().code == 0, "nothing is left to do"
    assert (tmp_path / "out.jsonl").read_bytes() == written
    longer = ask("--set", "evaluate.max_new_tokens=5")
    assert longer.code == 2
    assert "] holds answers with another decoding" in longer.text
    assert "--overwrite" in longer.text
    assert ask("--set", "evaluate.max_new_tokens=5", "--overwrite").code == 0
    few.write_text(json.dumps(row("Cy")) + "\n", encoding="utf-8")
    assert "another rows sha256" in ask().text
    (tmp_path / "out.jsonl.about").unlink()
    assert "nothing says whose answers it holds" in ask().text


def test_bad_rows(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    rows = [row("Ann"), {"query": "no tools"}, row("Bo"), {"query": ""}]
    (tmp_path / "some.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    refused = surefit("predict", config, "some.jsonl", *SMALL)
    assert refused.code == 2
    assert "2 of 4 rows cannot be used" in refused.text
    left = surefit("predict", config, "some.jsonl", *SMALL, "--set", "data.bad_rows=skip", "--json")
    assert left.code == 0, left.text
    assert [line["where"] for line in left.json["answers"]] == ["some.jsonl:1", "some.jsonl:3"]
    assert "2 bad rows left out" in left.stderr
    (tmp_path / "none.jsonl").write_text(json.dumps({"query": ""}) + "\n", encoding="utf-8")
    assert surefit("predict", config, "none.jsonl", *SMALL, "--set", "data.bad_rows=skip").code == 2
    assert "no such file" in surefit("predict", config, "nowhere.jsonl", *SMALL).text


def test_one_model_answers(surefit: Surefit, config: Path) -> None:
    both = surefit("predict", config, "-p", "Hi", "--base", "--merged")
    assert both.code == 2
    assert "one model answers, not base and merged" in " ".join(both.text.split())
    missing = surefit("predict", config, "-p", "Hi", "--adapter")
    assert missing.code == 2
    assert "this run has no adapter/ yet" in missing.text


def test_one_prompt_under_the_grammar(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    pytest.importorskip("xgrammar")
    (tmp_path / "one.jsonl").write_text(json.dumps(row("Ann")) + "\n", encoding="utf-8")
    held = surefit("predict", config, "one.jsonl", "--base", "--constrained", "--json")
    assert held.code == 0, held.text
    assert held.json["variant"] == "base+grammar"
    (answer,) = held.json["answers"]
    assert answer["truncated"] or isinstance(answer["parsed"], list)


def test_check_finds_settings_that_exclude_each_other(surefit: Surefit, config: Path) -> None:
    found = surefit("check", config, "--set", "evaluate.samples=4", "--json")
    assert found.code == 1
    assert {finding["field"] for finding in found.json["findings"]} >= {"evaluate.samples"}
    drawn = surefit("check", config, "--set", "evaluate.temperature=0.7", "--json")
    assert "EVL001" in {finding["code"] for finding in drawn.json["findings"]}
