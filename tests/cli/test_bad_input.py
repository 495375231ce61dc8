"""Whatever the user breaks: a message with the place and a way out, the documented exit code, nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import Surefit, row

from surefit.core.rundir import read_jsonl
from surefit.nano import PATH as NANO


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


BROKEN = {
    "no such file": (lambda text: None, "rows.jsonl", "no such file"),
    "empty file": (lambda text: "", "rows.jsonl", "empty"),
    "broken JSON on line 3": (lambda text: [*text[:2], text[2][:-5], *text[3:]], "rows.jsonl:3", "JSON"),
    "tools that do not parse": (
        lambda text: [*text[:6], json.dumps({**row("x"), "tools": "[{"}), *text[7:]],
        "rows.jsonl:7",
        "tools",
    ),
    "answer instead of answers": (
        lambda text: [line.replace('"answers"', '"answer"') for line in text],
        "rows.jsonl",
        "answers",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_data(surefit: Surefit, config: Path, tmp_path: Path, name: str) -> None:
    change, place, needle = BROKEN[name]
    data = tmp_path / "rows.jsonl"
    changed = change(lines(data))
    if changed is None:
        data.unlink()
    else:
        data.write_text("\n".join(changed), encoding="utf-8")
    for verb, code in (("check", 1), ("train", (1, 2))):
        answer = surefit(verb, config)
        assert answer.code in (code if isinstance(code, tuple) else (code,)), answer.text
        assert place in answer.text
        assert needle in answer.text
        assert "help:" in answer.text
        assert "Traceback" not in answer.text
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "key", "place", "needle"),
    [
        (None, "data.eval", "other.jsonl", "no such file"),
        (None, "evaluate.extra_sets.old", "other.jsonl", "no such file"),
        ('{"query": "Ring", "tools": "[{", "answers": "[]"}', "data.eval", "other.jsonl:1", "tools is not JSON"),
        ('{"query": "Ring"}', "evaluate.extra_sets.old", "other.jsonl", "needs the columns 'tools' and 'answers'"),
    ],
)
def test_broken_rows_to_be_scored_on(
    surefit: Surefit, config: Path, tmp_path: Path, text: str | None, key: str, place: str, needle: str
) -> None:
    if text is not None:
        (tmp_path / "other.jsonl").write_text(text + "\n", encoding="utf-8")
    checked = surefit("check", config, "--set", f"{key}=other.jsonl")
    assert checked.code == 1, checked.text
    assert place in checked.text
    assert needle in checked.text
    assert text is not None or key in checked.text


def test_training_rows_as_held_out_rows(surefit: Surefit, config: Path) -> None:
    checked = surefit("check", config, "--set", "data.eval=rows.jsonl")
    assert checked.code == 1
    assert "the same rows as data.train" in checked.text


@pytest.mark.parametrize(
    ("overrides", "place", "needle"),
    [
        (["data.max_length=[262144]"], "--set", "write 262144 without the brackets"),
        (["slurm.time=30"], "--set", 'write it in quotes: time: "30"'),
        (["train.learnig_rate=1"], "--set", "did you mean 'learning_rate'"),
        (["recipe=function_caling"], "recipe", "did you mean 'function_calling'"),
        (["model.name_or_path=./nowhere"], "nowhere", "no such"),
        (["hardware.gpu=h1000"], "hardware.gpu", "did you mean"),
    ],
)
def test_broken_config(surefit: Surefit, config: Path, overrides: list[str], place: str, needle: str) -> None:
    answer = surefit("train", config, *(part for text in overrides for part in ("--set", text)))
    assert answer.code == 2, answer.text
    assert place in answer.text
    assert needle in answer.text
    assert not Path("runs").exists()


def test_config_problems_as_json(surefit: Surefit, config: Path) -> None:
    config.write_text(config.read_text() + "trian: {}\n")
    answer = surefit("check", config, "--json")
    assert answer.code == 2
    assert (answer.json["line"], answer.json["field"]) == (8, "trian")


def test_a_model_directory_without_weights(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(NANO, bare, ignore=shutil.ignore_patterns("*.safetensors", "*.py", "__pycache__"))
    checked = surefit("check", config, "--set", f"model.name_or_path={bare}", "--json")
    assert checked.code == 1
    assert "MOD002" in {finding["code"] for finding in checked.json["findings"]}
    trained = surefit("train", config, "--set", f"model.name_or_path={bare}")
    assert trained.code == 1
    assert not Path("runs").exists()


def test_no_write_permission(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    answer = surefit("train", config, "--set", "output_dir=file/run")
    assert answer.code == 3, answer.text
    assert "cannot write" in answer.text
    assert "choose another output_dir" in answer.text


def test_not_a_run(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    for verb in ("merge", "evaluate"):
        answer = surefit(verb, config)
        assert answer.code == 2
        assert "surefit train" in answer.text
    assert surefit("report", tmp_path).code == 2
    unmade = surefit("report", config)
    assert (unmade.code, "E8021" in unmade.text, Path("runs").exists()) == (2, True, False)
    assert surefit("predict", config).code == 2
    for variant, needle in (("adaptor", "has no variant 'adaptor'"), ("adapter", "no adapter/ yet")):
        answer = surefit("predict", config, "-p", "hello", "--variant", variant)
        assert (answer.code, needle in answer.text) == (2, True), answer.text


def test_a_dotenv_that_is_not_text(surefit: Surefit, tmp_path: Path) -> None:
    (tmp_path / ".env").write_bytes(b"\xff\xfe")
    answer = surefit("explain", "SCH001")
    assert (answer.code, ".env: error[E1051] cannot be read" in answer.text) == (2, True), answer.text
    assert surefit("no-such-verb").code == 2


def test_a_chat_template_without_end_stops_check_and_training(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    """In `check` it took 40 s and 5 GB, and in `train` the process."""
    shutil.copytree(NANO, tmp_path / "base")
    (tmp_path / "base/chat_template.jinja").write_text(
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    )
    for verb in ("check", "train"):
        started = time.process_time()
        answer = surefit(verb, config, "--set", f"model.name_or_path={tmp_path / 'base'}")
        assert time.process_time() - started < 20
        assert answer.code == 1, answer.text
        assert "the chat template cannot be used: its loops run more than 500,000 turns" in answer.text
    assert not Path("runs/one/adapter").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_ctrl_c_saves_and_resume_finishes_as_if_nothing_had_happened(
    surefit: Surefit, config: Path, tmp_path: Path
) -> None:
    """A real process, a real SIGINT, and the weights of an uninterrupted run; in a directory whose name a shell would
    cut in two, by the very command that is shown."""
    arguments = ("train", "run.yaml", "--set", "train.max_steps=30")
    whole = surefit(*arguments, "--set", "output_dir=runs/whole")
    assert whole.code == 0, whole.text
    run = tmp_path / "runs/my one"
    command = [sys.executable, "-m", "surefit", "run", *arguments[1:], "--set", "output_dir=runs/my one"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    metrics = run / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(read_jsonl(metrics)) >= 2):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 75, said
    shown = re.search(r"surefit run .* --resume", said)
    assert shown, said
    again = shlex.split(shown[0])
    assert again == ["surefit", "run", "runs/my one", "--resume"]
    assert "Traceback" not in said
    assert not (run / "adapter").exists()
    resumed = surefit("train", *again[2:])
    assert resumed.code == 0, resumed.text
    name = "adapter/adapter_model.safetensors"
    assert (run / name).read_bytes() == (tmp_path / "runs/whole" / name).read_bytes()


def test_a_script_gets_the_findings_that_stop_a_training(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "?"}\n', encoding="utf-8")
    answer = surefit("train", config, "--json")
    assert answer.code == 1
    assert "DAT002: no column 'query' in" in answer.json["also"][0]["message"]
    assert answer.json["also"][0]["field"] == "data.train"


def test_a_mode_that_the_user_chose_is_not_replaced_for_the_number_of_gpus(surefit: Surefit, config: Path) -> None:
    answer = surefit("train", config, "--gpus", 2, "--set", "parallel.mode=single", "--dry-run")
    assert answer.code == 2
    assert "parallel.mode is single, but there are 2 processes" in answer.stderr
