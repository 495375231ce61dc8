"""A directory full of somebody else's modules, and a `.env` that leads to them: no process of SureFit runs any."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.cli.conftest import row

from surefit.cli.ui import build_stage_functions
from surefit.core.processes import own_command

NAMES = (
    "yaml", "json", "signal", "numpy", "torch", "surefit", "pydantic", "tokenizers", "multiprocessing", "typer",
    "sitecustomize", "usercustomize", "transformers", "rich", "asyncio", "dotenv",
)  # fmt: skip
SRC = Path(__file__).parents[2] / "src"


@pytest.fixture
def beside(tmp_path: Path) -> Path:
    """A config and its data between modules that leave a file `ran` when somebody imports them."""
    for name in NAMES:
        trap = f"open({str(tmp_path / 'ran')!r}, 'a').write({name + ' '!r})\nraise SystemExit(99)\n"
        (tmp_path / f"{name}.py").write_text(trap)
    (tmp_path / ".env").write_text(f"PYTHONPATH={tmp_path}\nHF_ENDPOINT=http://127.0.0.1:9\nSUREFIT_API_KEY=sk\n")
    rows = [row(f"person {number}") for number in range(40)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows), encoding="utf-8")
    (tmp_path / "run.yaml").write_text(
        "recipe: function_calling\nmodel: {name_or_path: surefit/nano}\n"
        "data: {train: rows.jsonl, eval: 0.5, max_length: 256}\n"
        "train: {max_steps: 2, global_batch_size: 4}\nhardware: {gpu: cpu}\n"
        "evaluate: {max_new_tokens: 8, max_examples: 4}\noutput_dir: run\n"
    )
    return tmp_path


def run(folder: Path, command: list[str], seconds: float = 240) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    environment |= {"SUREFIT_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    environment |= {"GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=seconds
    )


def ran(folder: Path) -> str:
    file = folder / "ran"
    return file.read_text() if file.exists() else ""


def test_the_trap_works(beside: Path) -> None:
    """What follows would show what it is to show: this is how Python starts a module if nobody says otherwise."""
    run(beside, [sys.executable, "-m", "surefit", "--version"])
    assert ran(beside) != ""


def test_a_command_of_our_own_is_this_package_and_nothing_beside(beside: Path) -> None:
    done = run(beside, own_command("init", "--list"))
    assert (done.returncode, ran(beside)) == (0, ""), done.stderr
    assert ".env here sets SUREFIT_API_KEY; it may not set PYTHONPATH, HF_ENDPOINT" in done.stderr
    plan = build_stage_functions().plan(beside / "run.yaml")
    assert plan == own_command("plan", str(beside / "run.yaml"), "--json")


WORKERS = """
import sys
sys.path.insert(0, SRC)
from surefit.core import env
env.load_dotenv()
from surefit.metrics.many import map_in_processes
if __name__ == "__main__":
    print(map_in_processes(abs, [-1, -2, -3], 0, processes=2))
"""


def test_worker_processes_import_nothing_from_here(beside: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Of `audit`, `score` and `evaluate`: multiprocessing's own start looks into the working directory."""
    script = tmp_path_factory.mktemp("elsewhere") / "workers.py"
    script.write_text(WORKERS.replace("SRC", repr(str(SRC))))
    done = run(beside, [sys.executable, str(script)])
    assert (done.stdout, ran(beside)) == ("[1, 2, 3]\n", ""), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["doctor"],
        ["audit", "run.yaml", "--workers", "2"],
        ["slurm", "run.yaml", "--gpus-per-node", "2"],
        ["train", "run.yaml", "--gpus", "2"],
        ["run", "run.yaml", "--gpus", "2"],
        ["predict", "run.yaml", "rows.jsonl", "--base", "--gpus", "2", "-o", "out.jsonl"],
        ["evaluate", "run.yaml", "--variant", "base", "--gpus", "2"],
        ["plan", "run.yaml", "--json"],
        ["merge", "run.yaml"],
        [
            "score",
            "--recipe",
            "code_generation",
            "--predictions",
            "programs.jsonl",
            "--references",
            "tasks.jsonl",
            "--json",
        ],
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_verb_that_starts_processes_runs_nothing_from_here(beside: Path, arguments: list[str]) -> None:
    if arguments[0] in ("predict", "evaluate", "merge"):
        assert run(beside, own_command("train", "run.yaml")).returncode == 0
    if arguments[0] == "score":  # a program that is run, and imports what has a namesake here
        check = "def check(f):\n    assert f() == '[1]'\n"
        task = {"task_id": "a/1", "prompt": "def f():\n", "test": check, "entry_point": "f"}
        program = "def f():\n    import json\n    return json.dumps([1])\n"
        (beside / "tasks.jsonl").write_text(json.dumps(task) + "\n")
        (beside / "programs.jsonl").write_text(json.dumps({"task_id": "a/1", "prediction": program}) + "\n")
    done = run(beside, own_command(*arguments))
    assert done.returncode in (0, 1), done.stderr
    assert ran(beside) == ""
    if arguments[0] == "score":
        assert json.loads(done.stdout)["metrics"]["pass@1"]["mean"] == 1


@pytest.mark.slow
def test_the_demo_runs_nothing_from_here(beside: Path) -> None:
    """Up to its first steps: what follows are the stages above."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONSAFEPATH", "PYTHONPATH")}
    environment |= {"SUREFIT_CACHE": str(beside / "cache"), "OMP_NUM_THREADS": "1"}
    demo = subprocess.Popen(own_command("demo"), cwd=beside, env=environment, stdout=subprocess.DEVNULL)
    try:
        metrics, deadline = beside / "runs/demo/metrics.jsonl", time.monotonic() + 240
        while not metrics.exists():
            assert demo.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        demo.terminate()
        demo.wait(60)
    assert ran(beside) == ""
