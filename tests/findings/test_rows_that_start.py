"""Rows and directories that a run must start with, or say before the start that it cannot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.core.errors import DataError
from surefit.data.read.load import load_rows
from surefit.data.read.sources import list_source_files, resolve_source

TOOLS = json.dumps([{"name": "ring", "description": "Call", "parameters": {"who": {"type": "string"}}}])
RUN = """recipe: chat
model: {name_or_path: surefit/nano, dtype: float32}
data: {train: rows.jsonl, eval: 0.2, max_length: 256}
train: {max_steps: 1, global_batch_size: 4}
hardware: {gpu: cpu}
output_dir: run
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    (tmp_path / "run.yaml").write_text(RUN)
    return tmp_path


def surefit(*arguments: str) -> tuple[int, dict[str, Any]]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    return result.exit_code, json.loads(result.stdout.strip().splitlines()[-1])


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def errors(document: dict[str, Any]) -> list[tuple[str, str]]:
    return [(found["code"], found["field"]) for found in document["findings"] if found["severity"] == "error"]


def called(n: int, **more: Any) -> dict[str, Any]:
    call = json.dumps({"name": "ring", "arguments": {"who": f"person {n}"}})
    turns = [{"from": "human", "value": f"Ring person {n}"}, {"from": "function_call", "value": call}]
    return {"conversations": turns, "tools": TOOLS} | more


def answered(n: int, speaker: str = "gpt") -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": f"Say {n}"}, {"from": speaker, "value": f"It is {n}."}]}


@pytest.mark.parametrize(
    "rows",
    [
        [called(n) for n in range(60)],
        [called(n) if n % 2 else answered(n) | {"tools": TOOLS} for n in range(60)],
        [answered(n, "chatgpt") for n in range(60)],
    ],
    ids=["D10-all", "D10-half", "D10-chatgpt"],
)
def test_sharegpt_calls_are_answers(place: Path, rows: list[dict[str, Any]]) -> None:
    write(place / "rows.jsonl", rows)
    code, document = surefit("check", "run.yaml")
    assert (errors(document), code) == ([], 0)


def test_sharegpt_calls_without_a_call_are_none(place: Path) -> None:
    """What is mended hides nothing: rows that end with a question have no answer."""
    write(place / "rows.jsonl", [{"conversations": answered(n)["conversations"][:1]} for n in range(60)])
    assert "DAT001" in {code for code, _ in errors(surefit("check", "run.yaml")[1])}


@pytest.mark.parametrize(
    "names",
    [
        ("alpaca_train.jsonl", "alpaca_test.jsonl"),
        ("alpaca_train.jsonl", "alpaca_eval.jsonl"),
        ("train-alpaca.jsonl", "test-alpaca.jsonl"),
        ("alpacaTrain.jsonl", "alpacaTest.jsonl"),
        ("my.train.jsonl", "my.dev.jsonl"),
        ("trainset.jsonl", "testset.jsonl"),
        ("training_data.jsonl", "validation_data.jsonl"),
        ("QA_TRAIN.jsonl", "QA_HELDOUT.jsonl"),
        ("qa_train.jsonl", "qa_held_out.jsonl"),
        ("alpaca.jsonl", "alpaca_test.jsonl"),
        ("alpaca.jsonl", "alpaca-eval.jsonl"),
        ("train.jsonl", "development.jsonl"),
    ],
    ids=lambda names: f"D11-{names[1]}",
)
def test_files_of_different_splits_are_not_read_together(place: Path, names: tuple[str, str]) -> None:
    for name in names:
        write(place / "rows" / name, [{"prompt": "a", "completion": "b"}])
    for source in ("rows", "rows/*.jsonl"):
        with pytest.raises(DataError) as raised:
            list_source_files(resolve_source(source))
        assert raised.value.code == "E4125"
        assert all(name in raised.value.message for name in names)


@pytest.mark.parametrize(
    "names",
    [
        ("contest.jsonl", "train.jsonl"),
        ("latest.jsonl", "train.jsonl"),
        ("latest.jsonl", "contest.jsonl"),
        ("devices.jsonl", "retrieval.jsonl"),
        ("train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"),
        ("alpaca_train.jsonl", "dolly_train.jsonl"),
        ("unit_test_generation.jsonl", "refactoring.jsonl"),
        ("attest.jsonl", "valley.jsonl", "strain.jsonl"),
        ("part-1.jsonl", "part-2.jsonl"),
    ],
    ids=lambda names: f"D11-not-{names[0]}",
)
def test_words_inside_words_are_no_splits(place: Path, names: tuple[str, ...]) -> None:
    for name in names:
        write(place / "rows" / name, [{"prompt": "a", "completion": "b"}])
    assert [Path(file).name for file in list_source_files(resolve_source("rows"))] == sorted(names)
    assert len(list_source_files(resolve_source("rows/*.jsonl"))) == len(names)


def test_splits_in_directories_of_a_pattern(place: Path) -> None:
    for split in ("train", "test"):
        write(place / "test_data" / split / "rows.jsonl", [{"prompt": "a", "completion": "b"}])
    with pytest.raises(DataError) as raised:
        list_source_files(resolve_source("test_data/**/*.jsonl"))
    assert raised.value.code == "E4125"
    assert len(list_source_files(resolve_source("test_data/train/*.jsonl"))) == 1


CASES = Path(__file__).parents[3] / "shared/cases"


@pytest.mark.parametrize("name", ["m4", "multi", "multi2"], ids=["D11", "D11-dev", "D11-validation"])
def test_directories_as_users_have_them(name: str) -> None:
    directory = CASES / "rows" / name
    if not directory.is_dir():
        pytest.skip("the cases are not on this machine")
    with pytest.raises(DataError) as raised:
        load_rows(str(directory))
    assert raised.value.code == "E4125"


def test_a_directory_of_texts_says_how_to_read_it(place: Path) -> None:
    (place / "rows").mkdir()
    for n in (1, 2):
        (place / f"rows/train_amr_{n}.txt").write_text(f"Document {n}.\nAnother one, of {n} lines.\n")
    with pytest.raises(DataError) as raised:
        load_rows("rows")
    assert raised.value.code == "E4350"
    assert raised.value.help is not None
    pattern = raised.value.help.rpartition("write ")[2]
    assert pattern == "rows/*.txt"
    assert len(load_rows(pattern)) == 4


def same_prompt(n: int) -> dict[str, Any]:
    turns = [{"role": "system", "content": "You are a poet."}, {"role": "user", "content": "Write a tweet."}]
    return {"messages": [*turns, {"role": "assistant", "content": f"Line number {n}, and {n * n} more."}]}


@pytest.mark.parametrize(("rows", "share"), [(60, 0.2), (60, 0.9), (700, 0.2)], ids=["D14", "D14-most", "D14-sampled"])
def test_one_prompt_cannot_be_divided(place: Path, rows: int, share: float) -> None:
    """The check says so, and its advice works."""
    write(place / "rows.jsonl", [same_prompt(n) for n in range(rows)])
    (place / "run.yaml").write_text(RUN.replace("0.2", str(share)))
    code, document = surefit("check", "run.yaml")
    assert (code, errors(document)) == (1, [("DAT010", "data.eval")])
    code, document = surefit("train", "run.yaml")
    assert code != 0
    write(place / "held_out.jsonl", [same_prompt(n) for n in range(1000, 1012)])
    code, document = surefit("check", "run.yaml", "--set", "data.eval=held_out.jsonl")
    assert (code, errors(document)) == (0, [])


@pytest.mark.parametrize("share", [0.001, 0.999], ids=["D14-none", "D14-all"])
def test_the_check_divides_as_training_does(place: Path, share: float) -> None:
    """Two prompts: the number in the help is one with which both sides have rows."""
    rows = [{"prompt": f"Write tweet {n % 2}.", "completion": f"Line {n}, and {n * n} more."} for n in range(60)]
    write(place / "rows.jsonl", rows)
    (place / "run.yaml").write_text(RUN.replace("0.2", str(share)))
    _, document = surefit("check", "run.yaml")
    (found,) = [found for found in document["findings"] if found["severity"] == "error"]
    assert (found["field"], found["error"]) == ("data.eval", "E4027" if share < 0.5 else "E4028")
    number = found["help"].partition("data.eval to ")[2].split()[0]
    assert errors(surefit("check", "run.yaml", "--set", f"data.eval={number}")[1]) == []
