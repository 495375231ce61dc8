"""Batch scripts: what #SBATCH asks for, what is launched, and that no text makes the reader fail."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from surefit.core.errors import ConfigError
from surefit.core.gc_pause import pause_gc
from surefit.facts.job_script import JobScript, read_job_script, setup_of_job
from surefit.facts.shell import arithmetic, split_commands

HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=1\n#SBATCH --gres=gpu:a100:4\n"


@pytest.fixture
def script(tmp_path: Path):
    def write(text: str) -> JobScript:
        path = tmp_path / "job.sbatch"
        path.write_bytes(text.encode())
        return read_job_script(path)

    return write


def test_options_in_all_spellings(script) -> None:
    job = script(
        "#!/bin/bash\n#SBATCH -N2 -n 8\n#SBATCH -c=16\n#SBATCH --gpus-per-node=h100:4\n#SBATCH -t 1-12:00:00 # long\n"
        '#SBATCH --signal="B:USR1@120"\n#SBATCH --requeue\n##SBATCH --nodes=9\n# SBATCH --nodes=9\n'
    )
    assert (job.nodes, job.tasks_per_node, job.gpus_per_node, job.cpus_per_node) == (2, 4, 4, 64)
    assert job.minutes == 36 * 60
    assert job.options["signal"] == "B:USR1@120"
    assert job.options["requeue"] == ""
    assert job.lines["gpus-per-node"] == 4


@pytest.mark.parametrize(
    ("options", "gpus"),
    [
        ("--gres=gpu:4", 4),
        ("--gres=gpu", 1),
        ("--gres=gpu:a100", 1),
        ("--gres=lscratch:100,gpu:v100:2(S:0)", 2),
        ("--gres=lscratch:100", None),
        ("--gres=gpu:3g.20gb:1", 1),
        ("--gpus=8 --nodes=2", 4),
        ("--gpus=7 --nodes=2", None),
        ("--gpus-per-task=2 --ntasks-per-node=2", 4),
        ("--gpus-per-node=$N", None),
    ],
)
def test_gpus_of_a_node(script, options: str, gpus: int | None) -> None:
    assert script(f"#!/bin/bash\n#SBATCH {options}\n").gpus_per_node == gpus


def test_what_the_cluster_decides_is_not_known(script) -> None:
    job = script("#!/bin/bash\n#SBATCH --nodes=2-4\n#SBATCH --time=UNLIMITED\n")
    assert (job.nodes, job.minutes) == (None, None)
    assert script("#!/bin/bash\n#SBATCH --ntasks=8\n").nodes is None
    assert script("#!/bin/bash\n#SBATCH --ntasks=8 --ntasks-per-node=4\n").nodes == 2


def test_torchrun_with_variables_and_arithmetic(script) -> None:
    job = script(
        HEAD + "GPUS=$(nvidia-smi -L | wc -l)\nexport WORLD=$((GPUS * SLURM_NNODES))\n"
        "srun torchrun --nnodes=$SLURM_NNODES --nproc-per-node ${GPUS:-1} \\\n"
        '  --rdzv_endpoint "$HOST:29500" train.py --nproc_per_node 77\n'
    )
    assert job.launch is not None
    assert (job.launch.tool, job.launch.machines, job.launch.processes_per_machine) == ("torchrun", 2, 4)
    assert job.launch.lines["rdzv_endpoint"] == 8
    assert job.variables["WORLD"] == ("8", 6)
    assert setup_of_job(job).world_size == 8


def test_accelerate_inside_a_quoted_command(script) -> None:
    job = script(
        HEAD + 'srun bash -c "accelerate launch --config_file fsdp.yaml --num_processes 2 --num_machines 2 '
        '--machine_rank \\$SLURM_NODEID train.py"\n'
    )
    setup = setup_of_job(job)
    assert (setup.processes, setup.machines, setup.processes_per_machine, setup.gpus) == (2, 2, 1, 4)
    assert setup.name("processes") == "--num_processes"
    assert setup.places["processes"].line == 5


def test_a_launcher_kept_in_a_variable(script) -> None:
    job = script(HEAD + 'LAUNCH="torchrun --nnodes 2 --nproc_per_node 4"\nsrun --nodes=2 $LAUNCH train.py\n')
    assert [(each.tool, each.line, each.srun, each.per_node) for each in job.launches] == [("torchrun", 6, True, 4)]


@pytest.mark.parametrize(
    ("command", "tool", "per_node"),
    [
        ("torchrun train.py", "torchrun", 1),
        ("torchrun --nproc_per_node=gpu train.py", "torchrun", 4),
        ("torchrun --nproc_per_node=$N train.py", "torchrun", None),
        ("python -m torch.distributed.run --nproc_per_node 3 train.py", "torchrun", 3),
        ("CUDA_VISIBLE_DEVICES=0,1 accelerate launch --num_processes 2 -m axolotl.cli.train a.yml", "accelerate", 2),
        ("accelerate launch --config_file ddp.yaml train.py", "accelerate", None),
        ("cd run && exec deepspeed --num_gpus 4 train.py --deepspeed ds.json", "deepspeed", 4),
        ("srun --ntasks-per-node=4 python train.py", "python", 4),
    ],
)
def test_launches(script, command: str, tool: str, per_node: int | None) -> None:
    launch = script(HEAD + command + "\n").launch
    assert launch is not None
    assert (launch.tool, launch.per_node) == (tool, per_node)


@pytest.mark.parametrize(
    "command", ["echo torchrun train.py", "pip install accelerate", "python --version", "nvidia-smi"]
)
def test_what_launches_nothing(script, command: str) -> None:
    assert script(HEAD + command + "\n").launch is None


def test_a_script_before_training_is_not_the_launch(script) -> None:
    job = script(HEAD + "python prepare.py\nsrun torchrun --nproc_per_node=4 train.py\n")
    assert job.launch is not None
    assert job.launch.script == "train.py"
    plain = script(HEAD + "python prepare.py\npython finetune.py\n").launch
    assert plain is not None
    assert plain.script == "finetune.py"


def test_a_variable_with_two_values_is_not_known(script) -> None:
    job = script(HEAD + "N=4\nif big; then\nN=8\nfi\ntorchrun --nproc_per_node=$N train.py\n")
    assert job.launch is not None
    assert job.launch.per_node is None
    assert "N" not in job.variables


def test_broken_continuations(script) -> None:
    job = script(
        HEAD + "torchrun \\ \n --nproc_per_node=4 \\\t\n --nnodes=2 \\ # both\n train.py\nIFS=\\ \necho a\\ b\n"
    )
    assert job.broken_continuations == (5, 6, 7)
    assert job.launch is not None
    assert job.launch.machines == 2


def test_a_here_document_is_another_programs_text(script) -> None:
    job = script(
        HEAD + "cat > run.sh <<'EOF'\ntorchrun \\ \n train.py\nEOF\nsrun torchrun --nproc_per_node 4 train.py\n"
    )
    assert job.broken_continuations == ()
    assert [each.line for each in job.launches] == [9]


def test_late_options_and_dos_line_breaks(script) -> None:
    assert script(HEAD + "set -e\n#SBATCH --time=1:00:00\n").late_options == (6,)
    assert script(HEAD.replace("\n", "\r\n") + "torchrun train.py\r\n").dos_line_breaks


def test_several_launchers_on_a_node_leave_the_processes_out(script) -> None:
    job = script(HEAD.replace("per-node=1", "per-node=4") + "srun torchrun --nnodes=2 --nproc_per_node=4 train.py\n")
    assert job.launch is not None
    assert job.launch.multiplied
    assert job.launch.per_node == 16
    assert setup_of_job(job).processes_per_machine is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job_script(tmp_path / "none.sbatch")


def test_no_text_makes_it_fail(script) -> None:
    rng = random.Random(0)
    words = ["#SBATCH", "--nodes", "=", "srun", "torchrun", "--nproc_per_node", "$((", "))", "$(", ")", "${A", "}",
             "A=", "$A", "'", '"', "\\", "\\ ", "\n", " ", "<<EOF", "EOF", "python", "-m", "x.py", "99999999999", "\0",
             "é", "accelerate launch", "`", "|", "&&", ";", "-N", "gpu:", "--", "-"]  # fmt: skip
    for _ in range(300):
        job = script("#!/bin/bash\n" + "".join(rng.choice(words) + rng.choice(["", " "]) for _ in range(60)))
        setup_of_job(job)


@pytest.mark.parametrize("piece", ["A=$A$A\n", "$(", "nvidia-smi -L", "\\ ", "X=1;", "$((1+", "A=$B;B=$A$A$C\n"])
def test_a_long_script_is_read_in_time(script, piece: str) -> None:
    """In time that grows with its length: four times the text in at most eight times the time, if not in 2 s."""
    text = "#!/bin/bash\nN=" + piece * (200_000 // len(piece))

    def seconds(text: str) -> float:
        start = time.process_time()
        with pause_gc():  # a search for garbage goes through all that other tests have loaded
            script(text)
        return time.process_time() - start

    for _ in range(3):  # beside other work a single measurement may be several times too long
        taken = seconds(text)
        if taken < 2 or taken < 8 * seconds(text[: len(text) // 4]):
            return
    raise AssertionError(f"{taken:.1f} s")


def test_arithmetic_only_of_whole_numbers() -> None:
    assert arithmetic("8 / (4 - 2)") == 4
    assert arithmetic("2 ** 99") is None
    assert arithmetic("__import__('os')") is None
    assert arithmetic("1" * 200) is None


def test_commands_are_split_outside_of_substitutions() -> None:
    commands, _ = split_commands("A=$(a | b; c) && torchrun x.py; echo $((1 + (2 * 3)))\n")
    assert [each.text for each in commands] == ["A=$(a | b; c)", "torchrun x.py", "echo $((1 + (2 * 3)))"]


def test_nul_bytes_are_dropped_as_the_shell_does(tmp_path: Path) -> None:
    path = tmp_path / "job.sh"
    path.write_bytes(b"#!/bin/bash\n#SBATCH --nodes=2\nsrun\x00 torchrun --nnodes\x002\x00 t.py $(date \x007\x00)\n")
    assert read_job_script(path).nodes == 2
