"""benchmarks/real.py: rows without leaks, stages that are not run twice, tables from its lines; in `long`, itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import load_config
from surefit.core.errors import SureFitError
from surefit.core.rundir import read_jsonl

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))

import real  # noqa: E402
import real_report  # noqa: E402
import real_tasks  # noqa: E402


@pytest.fixture
def data() -> Path:
    """The shared data, where this checkout has them beside it."""
    path = ROOT.parent / "shared/data"
    if not (path / "function_calling").exists():
        pytest.skip(f"{path} is not there")
    return path


def tool(name: str) -> dict[str, Any]:
    return {"name": name, "description": "", "parameters": {"x": {"type": "int", "description": ""}}}


def row(number: int, query: str, *names: str) -> dict[str, str]:
    answers = [{"name": names[0], "arguments": {"x": number}}]
    tools = json.dumps([tool(name) for name in names])
    return {"id": f"simple_python_{number}", "query": query, "tools": tools, "answers": json.dumps(answers)}


def traits(rows: Any) -> set[str]:
    names = {tool["name"] for row in rows for tool in json.loads(row["tools"])}
    return names | {" ".join(row["query"].lower().split()) for row in rows}


def test_rows_hang_together_by_a_tool_or_a_question() -> None:
    rows = [
        row(0, "How tall?", "a"), row(1, "how  tall?", "b"), row(2, "How wide?", "b", "c"),
        row(3, "Why?", "d"), row(4, "When?", "e"), row(5, "Who?", "e"),
    ]  # fmt: skip
    assert [sorted(int(r["id"][-1]) for r in group) for group in real_tasks.groups(rows)] == [[0, 1, 2], [4, 5], [3]]


def test_no_question_and_no_tool_is_in_both_parts() -> None:
    rows = [row(n, f"Question {n // 3}", f"tool_{n // 2}", f"tool_{n % 7}") for n in range(30)]
    rows += [row(n, f"Question {n}", f"own_{n}") for n in range(100, 160)]
    train, held = real_tasks.split_calls(rows)
    assert len(train) + len(held) == 90
    assert held
    assert not traits(train) & traits(held)


def test_the_shared_rows_do_not_leak(data: Path) -> None:
    sets = real_tasks.prepare_calls(data, Path(), quick=False)
    assert len(sets["train"]) == 200
    assert len(sets["eval"]) >= 60
    assert len(sets["users"]) == 32
    assert not traits(sets["train"]) & (traits(sets["eval"]) | traits(sets["users"]))
    contracts = real_tasks.prepare_summaries(data, Path(), quick=False)
    assert not {r["doc"] for r in contracts["train"]} & {r["doc"] for r in contracts["eval"]}
    tasks = real_tasks.prepare_code(data, Path(), quick=False)
    assert not any("\r" in r["code"] or "\t" in r["code"] for r in tasks["train"])


def test_the_leaderboards_verdicts_by_category(data: Path, tmp_path: Path) -> None:
    """Gold answers where there is a call; a base that writes prose, which is right exactly where no tool fits."""
    sets = real_tasks.prepare_calls(data, tmp_path, quick=True)
    for name in ("eval", "users"):
        for variant in ("base", "merged"):
            lines = [
                {"index": place, "text": row["answers"] if variant == "merged" else "Sure!"}
                for place, row in enumerate(sets[name])
            ]
            folder = tmp_path / "eval" / name
            folder.mkdir(parents=True, exist_ok=True)
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (folder / f"{variant}.predictions.jsonl").write_text(text)
    found = real_tasks.judged_by_leaderboard(data)(sets, tmp_path)
    assert {name: (line["base"], line["tuned"]) for name, line in found.items()} == {
        **{f"BFCL {name}": (0, 1) for name in ("simple_python", "multiple", "parallel", "parallel_multiple")},
        **{f"BFCL {name}": (0, 1) for name in ("live_simple", "rows with a call")},
        **{f"BFCL {name}": (1, 1) for name in ("irrelevance", "rows without")},
        "BFCL all rows": (1 / 6, 1),
    }


@pytest.mark.parametrize("name", list(real_tasks.tasks(Path())))
def test_every_config_can_be_read(name: str, tmp_path: Path) -> None:
    paths = {part: tmp_path / f"{part}.jsonl" for part in ("train", "eval", "more")}
    task = real_tasks.tasks(Path())[name]
    for quick in (False, True):
        config = real.config_of(task, paths, "surefit/nano", tmp_path / "run", quick)
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        loaded = load_config(tmp_path / "config.yaml").config
        assert loaded.recipe == name
        assert loaded.evaluate.extra_sets == {"more": str(paths["more"])}
        assert (loaded.train.max_steps == 2) is quick


@pytest.fixture
def arguments(tmp_path: Path) -> Namespace:
    return Namespace(data=tmp_path, out=tmp_path / "out", model="surefit/nano", quick=True, again=False)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, list[str]]:
    """A task of two stages that append their names to a file; `fail` in its folder makes the second one fail."""
    task = real_tasks.Task("sft", (), lambda *_: {"train": [{"text": "x"}], "eval": [{"text": "y"}]}, {}, "")
    ran = tmp_path / "ran"
    script = (
        f"import sys, pathlib; open({str(ran)!r}, 'a').write(sys.argv[1] + chr(10)); print('noise'); print('{{}}'); "
    )
    fail = f"sys.exit(pathlib.Path({str(tmp_path / 'fail')!r}).exists())"
    both = {"train": [sys.executable, "-c", script, "train"], "text": [sys.executable, "-c", script + fail, "text"]}
    monkeypatch.setattr(real, "commands", lambda place, _: both)
    monkeypatch.setattr(
        real, "result", lambda task, sets, place, _: {"task": task.name, "fingerprint": place.fingerprint}
    )
    monkeypatch.setattr(real, "tasks", lambda data: {"sft": task})
    return {"ran": [str(ran)], "fail": [str(tmp_path / "fail")]}


def test_a_task_that_failed_goes_on_and_a_done_one_is_not_run_again(
    stages: dict[str, list[str]], arguments: Namespace
) -> None:
    task = real.tasks(arguments.data)["sft"]
    ran, fail = Path(stages["ran"][0]), Path(stages["fail"][0])
    fail.touch()
    with pytest.raises(real.StageFailed, match="ended with 1"):
        real.run_task(task, arguments)
    assert not (arguments.out / "results.jsonl").exists()
    fail.unlink()
    assert real.run_task(task, arguments).startswith("done in")
    assert ran.read_text().split() == ["train", "text", "text"]
    assert real.run_task(task, arguments) == "done before"
    assert len(read_jsonl(arguments.out / "results.jsonl")) == 1
    arguments.again = True
    real.run_task(task, arguments)
    assert ran.read_text().split() == ["train", "text", "text", "train", "text"]
    assert len(read_jsonl(arguments.out / "results.jsonl")) == 1


def test_another_model_is_another_task(stages: dict[str, list[str]], arguments: Namespace) -> None:
    task = real.tasks(arguments.data)["sft"]
    real.run_task(task, arguments)
    arguments.model = "surefit/other"
    real.run_task(task, arguments)
    assert Path(stages["ran"][0]).read_text().split() == ["train", "text"] * 2
    assert len(read_jsonl(arguments.out / "results.jsonl")) == 2


def test_a_task_without_its_data_is_left_out(arguments: Namespace) -> None:
    task = real_tasks.tasks(arguments.data)["math_reasoning"]
    assert real.run_task(task, arguments) == f"left out: {arguments.data}/math_code/gsm8k is not there"


def test_time_memory_and_result_of_a_command(tmp_path: Path) -> None:
    found = real.timed([sys.executable, "-c", "x = b'1' * 2**27; print('a'); print('{\"b\": 2}')"], tmp_path / "log")
    assert found["result"] == {"b": 2}
    assert found["peak_rss_bytes"] > 2**27
    with pytest.raises(real.StageFailed, match="ended with 3"):
        real.timed([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log")


LINE: dict[str, Any] = {
    "task": "function_calling", "limits": "", "train_rows": 200, "steps": 25, "tokens": 43_210, "train_seconds": 432.1,
    "tokens_per_second": 100.0, "certificate": True, "memory_plan": {"low": 2**31, "high": 3 * 2**31, "actual": 2**32},
    "against": {
        "seconds in all steps": {"planned": 475.31, "actual": 432.1, "error": 0.1},
        "adapter on disk": {"planned": 200, "actual": 200, "error": 0.0},
        "one checkpoint": {"planned": 330, "actual": 300, "error": 0.1},
    },
    "rss_bytes": {"train": 2**32, "merge": 2**30}, "stage_seconds": {"train": 500.0, "merge": 20.0},
    "stage_cpu_seconds": {"train": 400.0, "merge": 20.0},
    "text_loss": {"base": 3.2, "tuned": 3.25, "tokens": 4000},
    "sets": {
        "eval": {
            "metric": "exact_match", "base": 0.0, "tuned": 0.5, "difference": 0.5, "ci95": [0.38, 0.61], "n": 62,
            "wins": 31, "losses": 0,
        },
        "BFCL simple_python": {
            "metric": "AST", "base": 0.05, "tuned": 0.6, "difference": 0.55, "ci95": [0.3, 0.7], "n": 20,
            "wins": 11, "losses": 0,
        },
    },
}  # fmt: skip


def test_the_tables_say_what_the_newest_lines_say(tmp_path: Path) -> None:
    text = real_report.report([{**LINE, "steps": 1}, LINE])
    gained, took = text.strip().split("\n\n")
    assert (
        "| function_calling | held out | exact_match | 0.0 % | 50.0 % | +50.0 (+38.0 to +61.0) | 62 | 31 : 0 |"
        in gained
    )
    assert "|  | BFCL simple python | AST | 5.0 % | 60.0 % | +55.0 (+30.0 to +70.0) | 20 | 11 : 0 |" in gained
    assert "| function_calling | 200 | 25 | 43,210 | 100 | 8 min 40 s | 7 min 00 s | 7 min 12 s | 4.00 GiB |" in took
    assert "2.00 GiB to 6.00 GiB | 4.00 GiB | +10.0 % | +6.0 % | passed |" in took
    page = tmp_path / "real.md"
    page.write_text(f"before\n{real_report.MARKS[0]}\nold\n{real_report.MARKS[1]}\nafter\n")
    real_report.write_into(page, text)
    assert page.read_text() == f"before\n{real_report.MARKS[0]}\n\n{text}\n{real_report.MARKS[1]}\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="has no"):
        real_report.write_into(page, text)


def quick(task: str, model: str, out: Path, data: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "benchmarks/real.py"), "--task", task, "--quick", "--model", model]
    command += ["--out", str(out), "--data", str(data)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert task in done.stdout
    (line,) = read_jsonl(out / "results.jsonl")
    return line


@pytest.mark.long
def test_quick_on_the_built_in_model(data: Path, tmp_path: Path) -> None:
    line = quick("function_calling", "surefit/nano", tmp_path, data)
    assert line["certificate"]
    assert line["steps"] == 2
    assert {"eval", "users", "BFCL simple_python", "BFCL all rows", "BFCL rows with a call"} <= set(line["sets"])
    assert line["text_loss"]["tokens"] > 100
    assert line["rss_bytes"]["train"] > 2**27


@pytest.mark.long
def test_quick_on_the_real_model(data: Path, tmp_path: Path) -> None:
    from surefit.model.tokenizer import model_path

    try:
        model_path(real.MODEL)
    except SureFitError as error:
        pytest.skip(f"the real model is not installed: {error}")
    line = quick("function_calling", real.MODEL, tmp_path, data)
    assert line["certificate"]
    assert line["tokens_per_second"] > 0
    assert 1 < line["text_loss"]["base"] < 5
