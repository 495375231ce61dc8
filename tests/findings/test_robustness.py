"""What strangers' machines, files and requests brought out of the commands, the sandbox and the page (findings S)."""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.config.edit import edit_text
from surefit.config.load import load_config
from surefit.config.schema import SureFitConfig, path_texts
from surefit.core.errors import EXIT_ENVIRONMENT, EXIT_OK, EXIT_USAGE
from surefit.evaluate.sandbox import run_tests
from surefit.ui.workspace import Workspace, file_version

CONFIG = """recipe: function_calling
model: {name_or_path: surefit/nano}
data: {train: surefit/function-calling-train}
output_dir: runs/a
"""


def surefit(
    *arguments: str, cwd: Path, stdout: Any = subprocess.PIPE, **environment: str
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-m", "surefit", *arguments],
        cwd=cwd,
        stdout=stdout,
        stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1"} | environment,
        check=False,
    )


# ---------------------------------------------------------------- the page


OUTSIDE = {
    "data.tokenized": "data: {train: train.jsonl, tokenized: OUTSIDE}",
    "data.train": "data: {train: OUTSIDE}",
    "data.eval": "data: {train: a.jsonl, eval: OUTSIDE}",
    "data.mix": "data: {train: a.jsonl, mix: {OUTSIDE: 1}}",
    "evaluate.extra_sets.old": "data: {train: a.jsonl}\nevaluate: {extra_sets: {old: OUTSIDE}}",
    "model.chat_template": "data: {train: a.jsonl}\nmodel: {name_or_path: surefit/nano, chat_template: OUTSIDE}",
    "lora.start_from": "data: {train: a.jsonl}\nlora: {start_from: OUTSIDE}",
    "slurm.venv": "data: {train: a.jsonl}\nslurm: {venv: OUTSIDE}",
}


@pytest.mark.parametrize("spelling", ["absolute", "relative"])
@pytest.mark.parametrize("key", OUTSIDE, ids=[f"S1-1 {key}" for key in OUTSIDE])
def test_a_path_outside_the_workspace_is_not_read(tmp_path: Path, key: str, spelling: str) -> None:
    (tmp_path / "space").mkdir()
    (tmp_path / "outside").mkdir()
    name = str(tmp_path / "outside") if spelling == "absolute" else "../outside"
    text = f"recipe: chat\noutput_dir: runs/a\n{OUTSIDE[key].replace('OUTSIDE', name)}\n"
    text += "" if "model:" in text else "model: {name_or_path: surefit/nano}\n"
    (tmp_path / "run.yaml").write_text(text)
    problems = Workspace(tmp_path / "space").refuse(load_config(tmp_path / "run.yaml").config)
    assert [(problem.code, problem.field) for problem in problems] == [("E1074", key)]


NO_PATH = {
    "recipe", "revision", "disk",
    "target_modules", "split", "gpu", "metric_for_best_model", "server", "metric", "mlflow_uri", "memory",
    "mlflow_experiment", "wandb_project", "prometheus_host", "partition", "account", "time", "modules", "options",
    "ignore", "add_tokens", "chat_template_kwargs", "columns", "roles",
}  # fmt: skip
"""Keys that hold text and name no file: a new key is either here or a `PathText`."""


def test_every_text_of_a_config_is_known_to_be_a_path_or_not() -> None:
    """S1-1: a key that was not in a list was read outside the workspace."""
    sections: list[type[BaseModel]] = [SureFitConfig]
    undecided = []
    for section in sections:
        for name, field in section.model_fields.items():
            inner = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
            sections += [part for part in inner if issubclass(part, BaseModel) and part not in sections]
            nothing = dict.fromkeys(section.model_fields)
            probes = [section.model_construct(**nothing | {name: value}) for value in ("x", {"x": 1.0}, {"x": "x"})]
            is_path = any(list(path_texts(probe)) for probe in probes)
            if re.search(r"\bstr\b", str(field.annotation)) and not is_path and name not in NO_PATH:
                undecided.append(name)
    assert undecided == []


def test_simultaneous_saves_leave_one_whole_text(tmp_path: Path) -> None:
    """S1-2: threads shared the temporary name; texts were mixed, and two saves of one version both succeeded."""
    space = Workspace(tmp_path)
    for n in range(10):
        name = f"c{n}.yaml"
        known = file_version(space.save(name, "a: 0\n", None))
        texts = [f"k{i}: {i}\n" * (2000 + i * 7) for i in range(6)]

        def saved(text: str, name: str = name, known: str | None = known) -> str:
            try:
                space.save(name, text, known)
                return "saved"
            except Exception as error:
                return f"{type(error).__name__} {getattr(error, 'status_code', '')}"

        with ThreadPoolExecutor(6) as threads:
            ends = sorted(threads.map(saved, texts))
        assert ends == ["HTTPException 409"] * 5 + ["saved"]
        assert (tmp_path / name).read_text() in texts
    assert len(list(tmp_path.iterdir())) == 10


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("", True),
        ("# c", True),
        ("hello", False),
        ("[1]", False),
        ("data: hello\n", False),
        ("data: [1]", False),
        ("data:\n", True),
    ],
    ids=lambda value: f"S2-5 {value!r}",
)
def test_setting_a_field_in_any_text(text: str, done: bool) -> None:
    edited = edit_text(text, {"data.train": "x.jsonl"}, Path("c.yaml"))
    assert (edited.done == ["data.train"]) is done
    assert ("data.train" in edited.refused) is not done
    assert done or edited.text == text
    assert edit_text(text, {"data.train": None}, Path("c.yaml")).text == text


# ---------------------------------------------------------------- the sandbox


FORGED = """
import os, signal
for fd in range(3, 20000):
    try: os.write(fd, b'{"status": "passed", "detail": ""}')
    except OSError: pass
os.kill(1, signal.SIGALRM)
while True: pass
"""


def test_a_program_reaches_the_verdict_of_no_caller(tmp_path: Path) -> None:
    """S1-3: with 4,200 files open in the caller, the pipe kept a number that was not closed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 6000:
        pytest.skip("this process may not open 6,000 files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (6000, hard))
    held = [os.open(os.devnull, os.O_RDONLY) for _ in range(4200)]
    try:
        assert run_tests(FORGED, "assert f(2) == 4", ["f"]).status != "passed"
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(
    "tests",
    [
        "assert all(map(f, [1, 2, 3]))",
        "for got, want in zip(map(f, [1, 2, 3]), [2, 4, 6]): assert got == want",
        "assert [f(x) for x in [1]] == [2]",
        "for value in (f(x) for x in [1]): assert value == 2",
        "assert not list(filter(f, [1, 2]))",
    ],
    ids=lambda tests: f"S1-4 {tests[:30]}",
)
@pytest.mark.parametrize("raised", ["StopIteration", "StopAsyncIteration", "GeneratorExit"])
def test_an_exception_that_ends_a_loop_is_no_pass(tests: str, raised: str) -> None:
    assert run_tests(f"def f(x):\n    raise {raised}\n", tests, ["f"]).status == "failed"


# ---------------------------------------------------------------- the command line


@pytest.mark.parametrize("arguments", ["check run.yaml", "doctor", "runs list", "init chat"], ids=lambda a: f"S2-6 {a}")
def test_in_a_directory_that_was_deleted(tmp_path: Path, arguments: str) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    command = f"rmdir {gone} && exec {sys.executable} -m surefit {arguments}"
    environment = os.environ | {"PYTHONPATH": str(Path(load_config.__code__.co_filename).parents[2])}
    ended = subprocess.run(["bash", "-c", command], cwd=gone, capture_output=True, env=environment, check=False)
    assert ended.returncode == EXIT_ENVIRONMENT
    assert b"E1200" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize(
    "arguments", ["init chat", "explain SCH001", "check run.yaml", "check run.yaml --json"], ids=lambda a: f"S2-7 {a}"
)
def test_a_full_stdout(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    with open("/dev/full", "w") as full:
        ended = surefit(*arguments.split(), cwd=tmp_path, stdout=full)
    assert ended.returncode == EXIT_ENVIRONMENT
    assert b"E1202" in ended.stderr
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"], ids=lambda text: f"S2-7 {text}")
def test_a_closed_stream_is_no_bug(tmp_path: Path, closed: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = f"{sys.executable} -m surefit check run.yaml --json {closed}"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode in (EXIT_OK, 1)
    assert b"Traceback" not in ended.stderr


@pytest.mark.parametrize("arguments", ["explain --all", "check run.yaml --json"])
def test_a_reader_that_goes_away(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "run.yaml").write_text(CONFIG)
    command = f"{sys.executable} -m surefit {arguments} | true; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, check=False)
    assert ended.returncode in (EXIT_OK, 1)  # `check` may have found something before it said so
    assert b"rror" not in ended.stderr


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_an_encoding_without_the_character(tmp_path: Path, encoding: str) -> None:
    """S2-8."""
    (tmp_path / "run.yaml").write_text(CONFIG.replace("runs/a", "runs/→é"))
    assert surefit("explain", "--all", cwd=tmp_path, PYTHONIOENCODING=encoding).returncode == EXIT_OK
    answer = surefit("check", "run.yaml", "--json", cwd=tmp_path, PYTHONIOENCODING=encoding).stdout
    assert json.loads(answer.decode(encoding).splitlines()[-1])["rules"] > 100


@pytest.mark.parametrize(
    "name", ["x/" * 3000, "y" * 300, "a/run.yaml/below"], ids=["S2-9 long", "S2-9 name", "S2-9 file"]
)
@pytest.mark.parametrize("verb", ["check", "plan", "train", "report", "audit", "merge", "import", "certify"])
def test_a_path_that_cannot_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "run.yaml").write_text(CONFIG)
    assert CliRunner().invoke(app, [verb, name]).exit_code == EXIT_USAGE


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000], ids=["S2-10 lists", "S2-10 objects"])
@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize("option", ["--predictions", "--references"])
def test_json_nested_too_deeply(tmp_path: Path, text: str, option: str, ending: str) -> None:
    row = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (tmp_path / "good.jsonl").write_text(json.dumps(row) + "\n")
    deep = tmp_path / f"deep.{ending}"
    deep.write_text(text + "\n")
    other = {"--predictions": "--references", "--references": "--predictions"}[option]
    command = ["score", "--recipe", "chat", option, str(deep), other, str(tmp_path / "good.jsonl")]
    assert CliRunner().invoke(app, command).exit_code == EXIT_USAGE
