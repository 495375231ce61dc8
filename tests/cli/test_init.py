"""`surefit init` as its user meets it: four questions on a terminal, options elsewhere, and rows of every kind."""

from __future__ import annotations

import json
import os
import pty
import select
import sys
import time
from pathlib import Path
from typing import Any

import datasets
import pytest
import yaml
from tests.cli.conftest import Surefit

from surefit.core.errors import EXIT_OK
from surefit.recipes import list_recipes
from surefit.stages.starting import build_starting_config

PAIRS = [{"prompt": f"Where is {n}?", "completion": f"In {n * 3}."} for n in range(60)]


def write(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


class Terminal:
    """`surefit init` in a pseudo-terminal."""

    def __init__(self, folder: Path, columns: int = 80) -> None:
        self.text = ""
        child, self.descriptor = pty.fork()
        if child == 0:
            os.chdir(folder)
            environment = {**os.environ, "COLUMNS": str(columns), "CUDA_VISIBLE_DEVICES": "", "PATH": ""}
            os.execve(sys.executable, [sys.executable, "-m", "surefit", "init"], environment)
        self.child = child

    def answer(self, question: str, text: str) -> None:
        """Wait for a question (the last text on the screen), and type an answer."""
        end = time.monotonic() + 60
        while not (self.text.rstrip().endswith(":") and question in self.text.rpartition("\n")[2]):
            assert time.monotonic() < end, self.text
            self._read()
        os.write(self.descriptor, text.encode())
        self._read_echo(text)

    def _read_echo(self, text: str) -> None:
        end = time.monotonic() + 60
        while "\n" not in self.text.rpartition(":")[2] and text != "\x03" and time.monotonic() < end:
            self._read()

    def _read(self) -> bool:
        ready, _, _ = select.select([self.descriptor], [], [], 0.2)
        try:
            data = os.read(self.descriptor, 65536) if ready else b""
        except OSError:  # the child has ended
            return False
        self.text += data.decode("utf-8", "replace").replace("\r\n", "\n")
        return bool(data) or not ready

    def code(self) -> int:
        """Wait for the end; return the exit code."""
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.child, 0)[1])


def test_four_questions_write_a_config(tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", PAIRS)
    terminal = Terminal(tmp_path, columns=40)
    terminal.answer("rows", "nowhere.jsonl\n")
    terminal.answer("rows", "\n")  # the only file here
    terminal.answer("GPU", "rtx4o90\n")
    terminal.answer("GPU", "4090\n")
    terminal.answer("model", "surefit/nano\n")
    terminal.answer("config", "rows.jsonl\n")
    terminal.answer("config", "mine.yaml\n")
    assert terminal.code() == 0, terminal.text
    assert terminal.text.count("error[") == 3, "each is asked again"
    config = yaml.safe_load((tmp_path / "mine.yaml").read_text(encoding="utf-8"))
    assert config["data"]["train"] == "rows.jsonl"
    assert config["hardware"]["gpu"] == "4090"
    assert config["model"]["name_or_path"] == "surefit/nano"
    wrapped = [line for line in terminal.text.splitlines() if not any(w in line for w in ("error[", "help:", "Next:"))]
    assert all(len(line) <= 40 for line in wrapped)


@pytest.mark.parametrize("answered", [0, 1, 2])
def test_ctrl_c_leaves_nothing(tmp_path: Path, answered: int) -> None:
    write(tmp_path / "rows.jsonl", PAIRS)
    terminal = Terminal(tmp_path)
    for question in ("rows", "GPU", "model")[:answered]:
        terminal.answer(question, "\n")
    terminal.answer(("rows", "GPU", "model")[answered], "\x03")
    assert terminal.code() == 130, terminal.text
    assert os.listdir(tmp_path) == ["rows.jsonl"]


def test_without_a_terminal_nothing_is_asked(surefit: Surefit) -> None:
    answer = surefit("init")
    assert answer.code == 2
    assert "--data" in answer.text
    assert surefit("init", "--json").code == 2


def test_the_list_says_what_each_recipe_is_for(surefit: Surefit) -> None:
    answer = surefit("init", "--list")
    assert answer.code == EXIT_OK
    for name in list_recipes():
        assert name in answer.stdout
    assert "commit" not in answer.stdout, "no bibliography"
    for column in ("query", "messages", "document", "contents"):
        assert column in answer.stdout


@pytest.mark.parametrize("recipe", ["chat", "function_calling", "rec_ranking"])
def test_the_short_starter_sets_what_the_full_one_sets(surefit: Surefit, recipe: str) -> None:
    short, full = (surefit("init", recipe, *more).stdout for more in ((), ("--full",)))
    assert yaml.safe_load(short) == {key: value for key, value in yaml.safe_load(full).items() if value}
    assert len(short.splitlines()) <= 20 < len(full.splitlines())
    assert all("#" in line or line.endswith(":") for line in short.splitlines())


def test_a_data_set_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"question": f"Where is {n}?", "answer": f"In {n}."} for n in range(60)]
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.Dataset.from_list(rows))
    draft = build_starting_config("owner/name", "surefit/nano", "cpu")
    assert draft.values["data.train"] == "owner/name"
    assert draft.values["data.columns"] == {"prompt": "question", "completion": "answer"}
    assert isinstance(draft.values["train.global_batch_size"], int), "rows of the hub are not counted by a check"


def test_columns_that_nothing_reads_are_named(tmp_path: Path, surefit: Surefit) -> None:
    rows = [row | {"context_text": f"What nobody reads, number {n}"} for n, row in enumerate(PAIRS)]
    write(tmp_path / "rows.jsonl", rows)
    answer = surefit("init", "--data", "rows.jsonl", "--model", "surefit/nano", "--gpu", "cpu")
    assert "not read: context_text" in answer.stdout
    assert {"AUD047"} == {found["code"] for found in surefit("audit", "rows.yaml", "--json").json["findings"]}


BAD: dict[str, tuple[bytes, int]] = {
    "empty": (b"", 2),
    "one row": (b'{"prompt": "a", "completion": "b"}\n', 2),
    "binary": (bytes(range(256)) * 40, 2),
    "zeros": (b"\0" * 4096, 2),
    "no JSON": (b"prompt,completion\na,b\n" * 30, 2),
    "two layouts": (
        b'{"prompt": "a", "completion": "b"}\n{"messages": [{"role": "user", "content": "a"}]}\n' * 20, 2,
    ),
    "one prompt": (b'{"prompt": "a", "completion": "b"}\n' * 40, 2),
    "unknown columns": (b'{"a": "x", "b": "y"}\n' * 40, 2),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_rows_that_cannot_be_used_leave_no_config(surefit: Surefit, tmp_path: Path, kind: str) -> None:
    content, code = BAD[kind]
    (tmp_path / "rows.jsonl").write_bytes(content)
    answer = surefit("init", "--data", "rows.jsonl", "--model", "surefit/nano", "--gpu", "cpu")
    assert answer.code == code, answer.text
    assert "error[" in answer.text
    assert not (tmp_path / "rows.yaml").exists()


def test_a_file_of_ten_gigabytes_is_answered_in_seconds(surefit: Surefit, tmp_path: Path) -> None:
    row = json.dumps(PAIRS[0]).encode() + b"\n"
    with open(tmp_path / "rows.jsonl", "wb") as file:
        file.write(row * 1000)
        file.truncate(10 * 2**30)  # sparse: it takes no room on the disk
    start = time.process_time()
    answer = surefit("init", "--data", "rows.jsonl", "--model", "surefit/nano", "--gpu", "cpu")
    assert answer.code == 2, answer.text
    assert time.process_time() - start < 10


def test_fifty_thousand_rows_take_less_than_three_seconds(surefit: Surefit, tmp_path: Path) -> None:
    text = "Because of the sum, and of nothing else. " * 6
    write(tmp_path / "rows.jsonl", [{"prompt": f"What is {n} + {n}?", "completion": text} for n in range(50_000)])
    surefit("init", "--list")  # imports
    start = time.process_time()
    answer = surefit("init", "--data", "rows.jsonl", "--model", "surefit/nano", "--gpu", "cpu", "--json")
    assert answer.code == 0, answer.text
    assert time.process_time() - start < 3
    config = yaml.safe_load(answer.json["config"])
    assert config["train"] == {"num_train_epochs": 1, "global_batch_size": 64, "learning_rate": 5e-3}


def test_a_second_config_for_the_same_rows_has_a_run_of_its_own(surefit: Surefit, tmp_path: Path) -> None:
    write(tmp_path / "rows.jsonl", PAIRS)
    for name in ("a.yaml", "b.yaml"):
        assert surefit("init", "--data", "rows.jsonl", "--model", "surefit/nano", "-o", name).code == 0
    found = [yaml.safe_load((tmp_path / name).read_text())["output_dir"] for name in ("a.yaml", "b.yaml")]
    assert found == ["runs/rows", "runs/rows-2"]
