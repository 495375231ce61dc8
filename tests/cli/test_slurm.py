"""`surefit slurm`: dry by default, checked before anything is written, submitted from the run directory."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.cli.conftest import Answer, Surefit

from surefit.core.rundir import RunDir, read_json

RUN = RunDir(Path("runs/one"))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cluster's programs that answer without a cluster: job 4711 waits in the queue."""
    directory = tmp_path / "bin"
    directory.mkdir()
    for name, answer in {"sbatch": "4711", "squeue": "4711|PENDING"}.items():
        (directory / name).write_text(f"#!/bin/sh\necho '{answer}'\n", encoding="utf-8")
        (directory / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:/usr/bin:/bin")
    return directory


def two_nodes(surefit: Surefit, config: Path, *more: object) -> Answer:
    return surefit("slurm", config, "--nodes", 2, "--gpus-per-node", 2, "--set", "hardware.gpu=h100", *more)


def test_it_only_prints_the_script(surefit: Surefit, config: Path) -> None:
    answer = two_nodes(surefit, config)
    assert answer.code == 0, answer.text
    assert answer.stdout.startswith("#!/usr/bin/env bash\n")
    assert f"train {config} --resume --set hardware.gpu=h100 --set hardware.nodes=2" in answer.stdout
    assert "nothing was written" in answer.stderr
    assert not Path("runs").exists()


def test_it_writes_where_it_is_told_and_our_check_has_no_objection(surefit: Surefit, config: Path) -> None:
    assert two_nodes(surefit, config, "-o", "job.sbatch").code == 0
    assert RUN.path.is_dir()
    assert surefit("check", "job.sbatch", "--json").json["findings"] == []


@pytest.mark.usefixtures("programs")
def test_a_submitted_job_is_remembered_and_shown(surefit: Surefit, config: Path) -> None:
    answer = two_nodes(surefit, config, "--submit", "--json")
    assert answer.code == 0, answer.text
    assert (answer.json["job_id"], answer.json["processes"]) == ("4711", 4)
    assert RUN.job_script.read_text(encoding="utf-8") == answer.json["script"]
    kept = read_json(RUN.slurm)
    assert kept["output"] == str(RUN.path.absolute() / "slurm-4711.out")
    assert "4711 PENDING" in surefit("runs").stdout
    (shown,) = surefit("runs", "--json").json["runs"]
    assert shown["job"] == {"job_id": "4711", "state": "PENDING"}
    assert shown["state_text"] == "not started"


def test_a_job_that_slurm_has_forgotten(surefit: Surefit, config: Path, programs: Path) -> None:
    assert two_nodes(surefit, config, "--submit").code == 0
    (programs / "squeue").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    assert "4711 not known to SLURM" in surefit("runs").stdout
    RUN.slurm.write_text("[]", encoding="utf-8")
    assert surefit("runs").code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--nodes", 3, "--gpus-per-node", 1], 2, "a global batch of 4 cannot be cut into 3 equal parts"),
        (["--set", "data.train=gone.jsonl"], 1, "no such file"),
        (["--set", "adapter.start_from=nowhere"], 1, "ADP005"),
        (["--nodes", 0], 2, "Invalid value"),
        (["--submit", "-o", "x"], 2, "--submit writes job.sbatch into the run directory"),
        (["--submit"], 3, "no sbatch on this machine"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_work_is_told_before_anything_is_submitted(
    surefit: Surefit, config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], code: int, told: str
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("COLUMNS", "200")
    answer = surefit("slurm", config, *arguments)
    assert answer.code == code, answer.text
    assert told in answer.text
    assert not RUN.slurm.exists()


def test_the_numbers_of_the_config_are_enough(surefit: Surefit, config: Path) -> None:
    with config.open("a", encoding="utf-8") as file:
        file.write("hardware: {gpu: h100, nodes: 2, count: 2}\nslurm: {partition: gpu}\n")
    answer = surefit("slurm", config, "--json")
    assert answer.code == 0, answer.text
    script = answer.json["script"]
    assert "#SBATCH --nodes=2\n" in script
    assert "#SBATCH --partition=gpu\n" in script
    assert " --set " not in script
    assert json.dumps(answer.json)


def array(surefit: Surefit, config: Path, *more: object) -> Answer:
    return surefit("slurm", config, "--evaluate", "--set", "hardware.gpu=h100", *more)


def test_an_array_job_for_the_checkpoints_that_are_there(surefit: Surefit, config: Path) -> None:
    for step in (1, 2, 3):
        (RUN.checkpoints / f"step-{step}").mkdir(parents=True)
    answer = array(surefit, config, "--json")
    assert answer.code == 0, answer.text
    assert (answer.json["tasks"], answer.json["after"], answer.json["processes"]) == (3, None, 1)
    script = answer.json["script"]
    assert "#SBATCH --job-name=one-evaluate\n" in script
    assert "#SBATCH --array=0-2\n" in script
    assert "dependency" not in script
    assert f"#SBATCH --output={RUN.path.absolute()}/slurm-%A_%a.out\n" in script
    assert f"evaluate {config} --all-checkpoints --set hardware.gpu=h100 &\n" in script
    assert [line for line in script.splitlines() if line != line.rstrip()] == []
    assert not RUN.eval.exists()


@pytest.mark.usefixtures("programs")
def test_the_array_waits_for_the_training_job_that_we_submitted(surefit: Surefit, config: Path, programs: Path) -> None:
    assert two_nodes(surefit, config, "--submit").code == 0
    kept = "--set", "checkpoint.save_total_limit=5"
    answer = array(surefit, config, *kept, "--gpus-per-node", 2, "--array", "4%2", "--submit", "--json")
    assert answer.code == 0, answer.text
    assert "job 4711 trains this run" in answer.stderr
    assert "training keeps 5 checkpoints" in answer.stderr
    script = (RUN.eval / "job.sbatch").read_text(encoding="utf-8")
    assert script == answer.json["script"]
    assert "#SBATCH --array=0-3%2\n" in script
    assert "#SBATCH --dependency=afterany:4711\n" in script
    assert "--nproc-per-node=2" in script
    record = read_json(RUN.eval_array)
    assert (record["job_id"], record["tasks"], record["after"]) == ("4711", 4, "4711")
    assert read_json(RUN.slurm)["nodes"] == 2, "the record of the training job is as it was"
    (programs / "squeue").write_text(
        "#!/bin/sh\nprintf '4711|RUNNING\\n4711|PENDING\\n4711|PENDING\\n'\n", encoding="utf-8"
    )
    (shown,) = surefit("runs", "--json").json["runs"]
    assert shown["eval_job"] == {"job_id": "4711", "states": {"RUNNING": 1, "PENDING": 2}}
    assert "4711 RUNNING × 1, PENDING × 2" in surefit("runs").stdout.replace("\n", " ")
    (programs / "squeue").write_text("#!/bin/sh\necho '4711|COMPLETED'\n", encoding="utf-8")
    assert array(surefit, config, "--json", *kept).json["after"] is None
    assert array(surefit, config, "--json", *kept).json["tasks"] == 5, "what training will keep"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--evaluate", "--array", "0"], "neither how many tasks nor how many at once"),
        (["--evaluate", "--array", "1-4"], "neither how many tasks nor how many at once"),
        (["--array", "4"], "--array goes with --evaluate"),
    ],
    ids=str,
)
def test_odd_arrays(
    surefit: Surefit, config: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[object], told: str
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    answer = surefit("slurm", config, *arguments)
    assert answer.code == 2
    assert told in answer.text


def test_our_check_has_no_objection_to_the_array(surefit: Surefit, config: Path) -> None:
    assert array(surefit, config, "-o", "array.sbatch", "--array", "8").code == 0
    assert surefit("check", "array.sbatch", "--json").json["findings"] == []
    assert array(surefit, config, "-o", "more.sbatch", "--nodes", 2, "--gpus-per-node", 4).code == 0
    assert surefit("check", "more.sbatch", "--json").json["findings"] == []
