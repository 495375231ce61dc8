"""The batch script: what it asks for and starts, that bash and SureFit's own rules accept it, what is refused."""

from __future__ import annotations

import shutil
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefit.cli.other_tools import build_lint_context
from surefit.config.schema import SureFitConfig
from surefit.core.errors import ConfigError, MachineError
from surefit.facts.job_script import read_job_script
from surefit.importers import read_tool_config
from surefit.launch.slurm import (
    BatchJob,
    JobStage,
    job_states,
    render_script,
    submit,
    task_states,
)
from surefit.lint.engine import run_rules

SNAPSHOT = Path(__file__).parent / "two_nodes_of_four.sbatch"
ENVIRONMENT = Path("/opt/surefit")
CASES: dict[str, dict[str, Any]] = {
    "two nodes of four": {},
    "one process": {"nodes": 1, "per_node": 1},
    "one node of eight": {"nodes": 1, "per_node": 8},
    "an interface": {"interface": "ib0"},
    "on processors": {"hardware": {"gpu": "cpu"}},
    "odd paths": {"run": Path("/data/my runs/50 % of 'all' $HOME; rm -rf #1")},
    "an odd override": {"overrides": ["output_dir=a b'c$(d)`e`"]},
    "modules": {"slurm": {"modules": ["cuda/12.8", "gcc"], "account": "a17", "partition": "gpu", "memory": "200G"}},
}


def job(
    nodes: int = 2,
    per_node: int = 4,
    run: Path = Path("/data/runs/one"),
    overrides: tuple[str, ...] | list[str] = ("hardware.nodes=2", "hardware.count=4"),
    interface: str | None = None,
    **sections: dict[str, Any],
) -> BatchJob:
    mode = {"mode": "single" if nodes * per_node == 1 else "ddp"}
    hardware = {"gpu": "h100", "nodes": nodes, "count": per_node}
    config = {"model": {"name_or_path": "m"}, "data": {"train": "d"}, "output_dir": str(run)} | sections
    config |= {"hardware": hardware | config.get("hardware", {}), "parallel": mode | config.get("parallel", {})}
    return BatchJob(
        SureFitConfig.model_validate(config), Path("/home/me/run.yaml"), run, Path("/home/me"), overrides,
        ENVIRONMENT / "bin" / "python", interface,
    )  # fmt: skip


@pytest.fixture(params=CASES.values(), ids=CASES)
def script(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text(render_script(job(**request.param)), encoding="utf-8")
    return path


def test_bash_can_read_it(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_shellcheck_finds_nothing(script: Path) -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed")
    done = subprocess.run(
        ["shellcheck", "--severity=warning", str(script)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def test_our_own_rules_find_nothing(script: Path) -> None:
    context, _ = build_lint_context(read_tool_config(script))
    found = [each.code for each in run_rules(context).findings]
    # Where a directory is called $HOME, SLM012 says truly that sbatch takes it for text.
    literal = {"SLM012"} if "$HOME; rm" in script.read_text(encoding="utf-8") else set()
    assert set(found) <= literal


def test_no_line_ends_in_blanks(script: Path) -> None:
    lines = script.read_text(encoding="utf-8").split("\n")
    assert [line for line in lines if line != line.rstrip()] == []
    assert lines[-1] == ""


def test_two_nodes_of_four_as_a_whole() -> None:
    """The file is there to be read; `SNAPSHOT.write_text(render(job()))` renews it."""
    assert render_script(job()) == SNAPSHOT.read_text(encoding="utf-8")


def test_it_starts_one_launcher_on_each_node(tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(render_script(job()), encoding="utf-8")
    read_back = read_job_script(path)
    launch = read_back.launch
    assert launch is not None
    assert (launch.tool, launch.srun, launch.tasks_per_node) == ("torchrun", True, 1)
    assert (launch.machines, launch.per_node) == (2, 4)
    assert (read_back.gpus_per_node, read_back.cpus_per_node, read_back.minutes) == (4, 32, 1440)
    assert read_back.options["signal"] == "B:USR1@120"


def run_as_slurm_would(
    tmp_path: Path, events: str = "", stage: JobStage = "train", begun: str = "true", **case: Any
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run a rendered script with stand-ins for SLURM's programs and for the run: `srun` writes its arguments down."""
    programs = tmp_path / "bin"
    programs.mkdir()
    stand_ins = {
        "srun": f'{begun}\ntrap "echo told >>{tmp_path}/signals; {events}; exit 75" USR1\n'
        f'printf "%s\\n" "$@" >{tmp_path}/arguments\nfor _ in 1 2 3 4 5 6; do sleep 0.1; done\nexit 3\n',
        "scontrol": f'echo "$@" >>{tmp_path}/scontrol\necho node7\n',
    }
    for name, text in stand_ins.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{text}", encoding="utf-8")
        (programs / name).chmod(0o755)
    text = render_script(job(**case), stage).replace(str(ENVIRONMENT), str(tmp_path / "none"))
    (tmp_path / "job.sbatch").write_text(text, encoding="utf-8")
    given = {"PATH": f"{programs}:/usr/bin:/bin", "SLURM_JOB_ID": "31007", "SLURM_NNODES": "2"}
    given |= {"SLURM_CPUS_PER_TASK": "32", "SLURM_JOB_NODELIST": "node[7-8]"}
    command = ["bash", str(tmp_path / "job.sbatch")]
    process = subprocess.Popen(command, env=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if events:
        while not (tmp_path / "arguments").exists():
            time.sleep(0.01)
        process.send_signal(10)
    stdout, stderr = process.communicate(timeout=120)
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr), tmp_path / "scontrol"


@pytest.mark.parametrize("name", ["plain", "with 'odd' $(names)"])
def test_words_arrive_as_they_were_meant(tmp_path: Path, name: str) -> None:
    done, _ = run_as_slurm_would(tmp_path, overrides=[f"output_dir={name}"])
    assert done.returncode == 3, done.stderr
    words = (tmp_path / "arguments").read_text(encoding="utf-8").splitlines()
    assert words[-3:] == ["--resume", "--set", f"output_dir={name}"]
    assert "--rdzv-endpoint=node7:21007" in words
    assert "--nnodes=2" in words


@pytest.mark.parametrize("saved", [True, False], ids=["saved", "not saved"])
def test_it_goes_back_into_the_queue_only_with_its_work_saved(tmp_path: Path, saved: bool) -> None:
    run = tmp_path / "a 'run'"
    run.mkdir()
    earlier = '{"time": 1.0, "stage": "train", "event": "interrupted"}\n'
    (run / "events.jsonl").write_text(earlier, encoding="utf-8")
    event = "interrupted" if saved else "failed"
    (tmp_path / "line").write_text(f'{{"time": 2.0, "stage": "train", "event": "{event}"}}\n', encoding="utf-8")
    done, scontrol = run_as_slurm_would(tmp_path, f"cat {tmp_path}/line >>{tmp_path}/a*/events.jsonl", run=run)
    assert (tmp_path / "signals").read_text() == "told\n"
    assert done.returncode == (0 if saved else 75), done.stderr
    assert ("requeue 31007" in scontrol.read_text()) is saved


@pytest.mark.parametrize("stage", ["merge", "evaluate"])
def test_a_stage_ends_with_the_exit_code_of_its_command(tmp_path: Path, stage: JobStage) -> None:
    done, scontrol = run_as_slurm_would(tmp_path, stage=stage, nodes=1, per_node=1)
    assert done.returncode == 3, done.stderr
    assert not scontrol.exists()
    words = (tmp_path / "arguments").read_text(encoding="utf-8").splitlines()
    assert words[-6:] == [stage, "/home/me/run.yaml", "--set", "hardware.nodes=2", "--set", "hardware.count=4"]
    path = tmp_path / "stage.sbatch"
    path.write_text(render_script(job(1, 1), stage), encoding="utf-8")
    assert run_rules(build_lint_context(read_tool_config(path))[0]).findings == []


@pytest.mark.parametrize("answered", [True, False], ids=["answered", "nothing answered"])
def test_scoring_goes_back_into_the_queue_only_where_it_got_further(tmp_path: Path, answered: bool) -> None:
    run = tmp_path / "a 'run'"
    (run / "eval" / "eval").mkdir(parents=True)
    row = f'echo row >"{run}/eval/eval/base.partial.jsonl"' if answered else "true"
    done, scontrol = run_as_slurm_would(tmp_path, "true", "evaluate", row, run=run)
    told = scontrol.read_text(encoding="utf-8")
    assert ("requeue 31007" in told) is answered, done.stderr
    assert done.returncode == 3, "it went on until the scheduler ends it"


def test_a_merge_near_the_end_of_its_time_says_so_and_goes_on(tmp_path: Path) -> None:
    done, scontrol = run_as_slurm_would(tmp_path, "true", "merge", nodes=1, per_node=1)
    assert (done.returncode, scontrol.exists()) == (3, False)
    assert "raise slurm.time" in done.stderr


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"parallel": {"mode": "single"}}, "parallel.mode is single, but there are 8 processes"),
        ({"parallel": {"mode": "cp", "cp": 3}}, "8 processes cannot be divided into groups of 3 (parallel.cp)"),
        ({"train": {"global_batch_size": 12}}, "cannot be cut into 8 equal parts (2 nodes × 4 = 8 processes)"),
        ({"nodes": 3, "train": {"global_batch_size": 64}}, "such as 72"),
        ({"slurm": {"time": "tomorrow"}}, "slurm.time: 'tomorrow' is not a time limit for sbatch"),
        ({"slurm": {"time": "2:00"}}, "a job of 2:00 (2 min 00 s) would have to save at once, 120 s before its end"),
        ({"slurm": {"venv": "/nowhere/at/all"}}, "neither bin/activate nor bin/python"),
        ({"run": Path('/data/a "run"')}, "it contains a quote"),
        ({"run": Path("/data/a\nrun")}, "line break"),
        ({"overrides": [f"telemetry.mlflow_uri=https://hf_{'x' * 30}@host"]}, "a token or password"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_work_is_refused(changes: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        render_script(job(**changes))
    assert told in str(caught.value)
    assert caught.value.help


BREAKS = ("\n", "\r", "\x0b", "\x0c", "\x85", "\u2028", "\0", "\x1b[2J")
TEXTS = [
    name for name, entry in SureFitConfig.model_fields["slurm"].annotation.model_fields.items() if "str" in str(entry)
]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", TEXTS)
def test_no_field_of_the_section_can_begin_a_line_of_the_script(name: str) -> None:
    """A second line would be a command of its own."""
    assert len(TEXTS) >= 7
    for character in BREAKS:
        value = f"--a=b{character}touch /tmp/injected"
        with pytest.raises(ValueError, match=r"line break or another control character|no NUL character"):
            job(slurm={name: [value] if name in ("options", "modules") else value})
    with pytest.raises(ValueError, match="is empty"):
        job(slurm={name: [" "] if name in ("options", "modules") else ""})


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("touch /tmp/injected", "not an sbatch option"),
        ("--export=ALL,WANDB_API_KEY=0123456789abcdef", "WANDB_API_KEY and its value would be in"),
        ("--export=aws_secret_access_key=x1", "everyone can read it"),
    ],
)
def test_an_option_is_one_and_holds_no_secret(option: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        job(slurm={"options": [option]})
    fine = ["--constraint=a100", "-C a100", "--export=TOKENIZERS_PARALLELISM=false", "--export=HF_TOKEN=$HF_TOKEN"]
    script = render_script(job(slurm={"options": fine}))
    assert all(f"#SBATCH {one}\n" in script for one in fine)


@pytest.mark.parametrize("limit", ["90", "2:01", "8:00:00", "2-12", "1-00:00", "UNLIMITED", "0"])
def test_every_time_limit_of_sbatch_is_taken(limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in render_script(job(slurm={"time": limit}))
    with pytest.raises(ConfigError, match="would have to save at once"):
        render_script(job(slurm={"time": "1:00"}), "checkpoints", tasks=2)


def test_nccl_says_why_it_fails_where_there_is_nccl() -> None:
    wanted = 'export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"\n'
    assert wanted in render_script(job())
    assert wanted in render_script(job(1, 4), "evaluate")
    assert wanted not in render_script(job(1, 1))
    assert wanted not in render_script(job(hardware={"gpu": "cpu"}))


def test_a_global_batch_is_shared_by_the_data_ranks_only() -> None:
    assert "global batch of 2." in render_script(job(parallel={"mode": "cp", "cp": 4}, train={"global_batch_size": 2}))


def test_the_environment_of_the_submitting_process_or_the_one_that_is_named(tmp_path: Path) -> None:
    assert f'export PATH={ENVIRONMENT}/bin:"$PATH"' in render_script(job())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "activate").touch()
    assert f"source {tmp_path}/bin/activate" in render_script(job(slurm={"venv": str(tmp_path)}))
    assert f"source {tmp_path}/bin/activate" in render_script(replace(job(), python=tmp_path / "bin" / "python3"))


def stand_in(directory: Path, name: str, text: str) -> None:
    (directory / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    (directory / name).chmod(0o755)


def test_sbatch_is_asked_and_its_refusal_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_in(tmp_path, "sbatch", "echo '4711;cluster'")
    assert submit(tmp_path / "job.sbatch") == "4711"
    stand_in(tmp_path, "sbatch", "echo 'sbatch: error: invalid partition specified: gpux' >&2; exit 1")
    with pytest.raises(MachineError, match="invalid partition specified: gpux"):
        submit(tmp_path / "job.sbatch")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineError, match="no sbatch on this machine"):
        submit(tmp_path / "job.sbatch")


def test_states_come_from_squeue_and_for_old_jobs_from_sacct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert job_states(["1"]) == {}
    stand_in(tmp_path, "squeue", "echo '7|RUNNING'; echo '8|PENDING'")
    assert job_states(["7", "9", "not a number"]) == {"7": "RUNNING"}
    stand_in(tmp_path, "sacct", "echo '9|CANCELLED by 0'")
    assert job_states(["7", "9"]) == {"7": "RUNNING", "9": "CANCELLED"}
    stand_in(tmp_path, "squeue", "echo 'squeue: error' >&2; exit 1")
    assert job_states(["7", "9"]) == {"9": "CANCELLED"}


def test_the_tasks_of_an_array_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_in(tmp_path, "squeue", "echo '7|RUNNING'; echo '7|PENDING'; echo '7|PENDING'; echo '8|RUNNING'")
    stand_in(tmp_path, "sacct", "echo '9_0|COMPLETED'; echo '9_1|FAILED'; echo '9_2|COMPLETED'")
    assert task_states(["7", "9"]) == {"7": {"RUNNING": 1, "PENDING": 2}, "9": {"COMPLETED": 2, "FAILED": 1}}


@pytest.mark.parametrize("processes", [(1, 1), (1, 4), (2, 4)])
def test_an_array_job(processes: tuple[int, int], tmp_path: Path) -> None:
    path = tmp_path / "array.sbatch"
    path.write_text(render_script(job(*processes), "checkpoints", tasks=12, at_once=3, after="4711"), encoding="utf-8")
    lines = path.read_text(encoding="utf-8").split("\n")
    assert "#SBATCH --array=0-11%3" in lines
    assert [line for line in lines if line != line.rstrip()] == []
    assert not any("global batch" in line for line in lines)
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    found = read_job_script(path)
    assert found.launch is not None
    assert (found.nodes, found.gpus_per_node, found.launch.per_node) == (*processes, processes[1])
    context, _ = build_lint_context(read_tool_config(path))
    assert run_rules(context).findings == []
    if shutil.which("shellcheck"):
        checked = subprocess.run(["shellcheck", "--severity=warning", str(path)], capture_output=True, check=False)
        assert checked.returncode == 0
