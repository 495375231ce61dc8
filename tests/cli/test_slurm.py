"""`surefit slurm`: dry by default, checked before anything is written, submitted from the run directory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
        (["--set", "lora.start_from=nowhere"], 1, "ADP005"),
        (["--nodes", 0], 2, "E1710"),
        (["--gpus-per-node", 0], 2, "--gpus-per-node 0 is for --stage merge"),
        (["--stage", "merge", "--gpus-per-node", 2], 2, "a merge is one process"),
        (["--stage", "merge", "--nodes", 2], 2, "a merge is one process"),
        (["--stage", "evaluate", "--evaluate"], 2, "--stage, --evaluate and --prepare cannot be combined"),
        (["--stage", "evaluate", "--set", "slurm.time=soon"], 2, "'soon' is not a time limit for sbatch"),
        (["--stage", "run", "-o", "run.yaml"], 2, "is a file; three scripts need a folder"),
        (["--stage", "run", "--submit"], 3, "no sbatch on this machine"),
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
        (["--array", "4"], "--array needs --evaluate"),
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


def stage(surefit: Surefit, config: Path, name: str, *more: object) -> Answer:
    return surefit("slurm", config, "--stage", name, "--set", "hardware.gpu=h100", *more)


def directives(script: str) -> list[str]:
    return [line.removeprefix("#SBATCH --") for line in script.splitlines() if line.startswith("#SBATCH --")]


def test_a_merge_takes_one_gpu_or_none(surefit: Surefit, config: Path) -> None:
    answer = stage(surefit, config, "merge", "--json")
    assert answer.code == 0, answer.text
    script = answer.json["script"]
    assert {"job-name=one-merge", "nodes=1", "gpus-per-node=1"} <= set(directives(script))
    assert f"    python \\\n    -m surefit merge {config} --set hardware.gpu=h100 &\n" in script
    without = stage(surefit, config, "merge", "--gpus-per-node", 0, "--json").json["script"]
    assert "gpus" not in " ".join(directives(without))
    assert "--set hardware.gpu=cpu &\n" in without


@pytest.mark.parametrize(("arguments", "processes"), [([], 1), (["--gpus-per-node", 4], 4)])
def test_scoring_takes_one_gpu_or_as_many_as_are_asked_for(
    surefit: Surefit, config: Path, arguments: list[object], processes: int
) -> None:
    with config.open("a", encoding="utf-8") as file:
        file.write("hardware: {gpu: h100, nodes: 2, count: 2}\n")
    answer = surefit("slurm", config, "--stage", "evaluate", *arguments, "--json")
    assert answer.code == 0, answer.text
    script = answer.json["script"]
    assert {"job-name=one-evaluate", "nodes=1", f"gpus-per-node={processes}"} <= set(directives(script))
    assert f"-m surefit evaluate {config} &\n" in script
    assert ("torchrun" in script) is (processes > 1)


@pytest.mark.usefixtures("programs")
def test_all_stages_are_queued_one_after_the_other(surefit: Surefit, config: Path, programs: Path) -> None:
    (programs / "sbatch").write_text(
        f'#!/bin/sh\necho "$@" >>{programs}/asked\nwc -l <{programs}/asked\n', encoding="utf-8"
    )
    answer = stage(surefit, config, "run", "--nodes", 2, "--gpus-per-node", 2, "--submit", "--json")
    assert answer.code == 0, answer.text
    jobs = answer.json["jobs"]
    assert [(job["stage"], job["job_id"], job["after"], job["processes"]) for job in jobs] == [
        ("train", "1", None, 4), ("merge", "2", "1", 1), ("evaluate", "3", "2", 1),
    ]  # fmt: skip
    root = RUN.path.absolute()
    assert (programs / "asked").read_text(encoding="utf-8").splitlines() == [
        f"--parsable {root / 'job.sbatch'}",
        f"--parsable --dependency=afterok:1 --kill-on-invalid-dep=yes {root / 'merge.sbatch'}",
        f"--parsable --dependency=afterok:2 --kill-on-invalid-dep=yes {root / 'evaluate.sbatch'}",
    ]
    assert [read_json(RUN.stage_job(name))["job_id"] for name in ("train", "merge", "evaluate")] == ["1", "2", "3"]
    (programs / "squeue").write_text("#!/bin/sh\nprintf '1|COMPLETED\\n2|RUNNING\\n3|PENDING\\n'\n", encoding="utf-8")
    (shown,) = surefit("runs", "--json").json["runs"]
    assert shown["merge_job"] == {"job_id": "2", "state": "RUNNING"}
    assert shown["job_text"] == "1 COMPLETED; merge 2 RUNNING; evaluate 3 PENDING"
    # A stage that is submitted by itself waits for the nearest one before it that is not over.
    assert stage(surefit, config, "evaluate", "--json").json["after"] == "2"
    assert stage(surefit, config, "merge", "--json").json["after"] is None
    answer = stage(surefit, config, "evaluate", "--submit")
    assert "job 2 comes before" in answer.stderr
    last = (programs / "asked").read_text(encoding="utf-8").splitlines()[-1]
    assert last.startswith("--parsable --dependency=afterok:2 ")
    # Neither the run nor its checkpoints are cleared away beneath a stage that waits.
    assert "its SLURM job is RUNNING" in surefit("runs", "prune", root).text


@pytest.mark.usefixtures("programs")
def test_what_is_queued_is_told_where_sbatch_refuses_the_rest(surefit: Surefit, config: Path, programs: Path) -> None:
    (programs / "sbatch").write_text(
        "#!/bin/sh\ncase \"$*\" in *merge*) echo 'sbatch: error: over the limit' >&2; exit 1;; esac\necho 8\n",
        encoding="utf-8",
    )
    answer = stage(surefit, config, "run", "--submit")
    assert answer.code == 3
    assert "over the limit" in answer.text
    assert "scancel 8" in answer.text
    assert "--stage merge --submit" in answer.text
    assert read_json(RUN.slurm)["job_id"] == "8"
    assert not RUN.stage_job("merge").exists()


@pytest.mark.usefixtures("programs")
def test_the_scripts_of_all_stages_may_be_written_and_submitted_by_hand(
    surefit: Surefit, config: Path, programs: Path, tmp_path: Path
) -> None:
    answer = stage(surefit, config, "run", "-o", "my jobs")
    assert answer.code == 0, answer.text
    for name in ("train", "merge", "evaluate"):
        assert surefit("check", f"my jobs/{name}.sbatch", "--json").json["findings"] == []
    lines = [line for line in answer.stdout.splitlines() if line.startswith("job=$(")]
    (programs / "sbatch").write_text(
        f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\necho "$(wc -l <{tmp_path}/asked);cluster"\n', encoding="utf-8"
    )
    subprocess.run(["sh", "-e", "-c", "\n".join(lines)], check=True)
    asked = (tmp_path / "asked").read_text(encoding="utf-8").splitlines()
    assert [line.split("--")[2] for line in asked[1:]] == ["dependency=afterok:1 ", "dependency=afterok:2 "]
    assert asked[0].endswith("my jobs/train.sbatch")


def test_sbatch_judges_a_written_script_where_it_is_installed(surefit: Surefit, config: Path, programs: Path) -> None:
    (programs / "sbatch").write_text('#!/bin/sh\necho "asked: $*" >&2\nexit 1\n', encoding="utf-8")
    answer = two_nodes(surefit, config, "-o", "job.sbatch")
    assert answer.code == 0, "the script may be meant for another cluster"
    assert "asked: --test-only job.sbatch" in answer.stderr
    (programs / "sbatch").unlink()
    assert "asked" not in two_nodes(surefit, config).stderr


def test_all_scripts_are_printed_where_nothing_is_to_be_written(surefit: Surefit, config: Path) -> None:
    answer = stage(surefit, config, "run")
    assert answer.code == 0, answer.text
    assert answer.stdout.count("#!/usr/bin/env bash\n") == 3
    assert "nothing was written" in answer.stderr
    assert not Path("runs").exists()


@pytest.mark.slow
def test_an_array_job_makes_the_shards(surefit: Surefit, config: Path, tmp_path: Path) -> None:
    """The script's own command lines, run as SLURM would run its tasks, leave data that can be trained on."""
    assert surefit("slurm", config, "--prepare").code == 2  # data.tokenized is not set
    shards = "--set", "data.tokenized=shards"
    answer = surefit("slurm", config, "--prepare", "--array", "3%2", *shards, "--json")
    assert answer.code == 0, answer.text
    script = answer.json["script"]
    assert "#SBATCH --array=0-2%2\n" in script
    assert "gpus-per-node" not in script
    assert "#SBATCH --job-name=one-prepare\n" in script
    assert '--shard "$((SLURM_ARRAY_TASK_ID + 1))/3"' in script
    assert not Path("shards").exists()
    fake = tmp_path / "fake"
    fake.mkdir()
    # What comes before the program is srun's; one worker, to spare the cores.
    (fake / "srun").write_text('#!/bin/bash\nwhile [[ $1 != python ]]; do shift; done\nexec "${@/#8/1}"\n')
    (fake / "srun").chmod(0o755)
    lines = [line for line in script.splitlines() if not line.startswith("source ")]
    for task in (2, 0, 1):
        environment = {**os.environ, "PATH": f"{fake}:{Path(sys.executable).parent}:/usr/bin:/bin"}
        environment |= {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_CPUS_PER_TASK": "8", "SLURM_JOB_ID": "1"}
        done = subprocess.run(["bash", "-c", "\n".join(lines)], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stderr
    assert surefit("check", config, *shards).code == 0


def test_one_array_job_at_a_time(surefit: Surefit, config: Path) -> None:
    assert surefit("slurm", config, "--prepare", "--evaluate").code == 2
    assert surefit("slurm", config, "--prepare", "--stage", "merge").code == 2
