"""#SBATCH lines by sbatch's own syntax: what it takes, what it refuses, and what it does not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefit.facts.job_script import read_job_script
from surefit.facts.sbatch_syntax import find_syntax_faults, variables_in

HEAD = "#!/bin/bash\n"


@pytest.mark.parametrize(
    "line",
    [
        "--time=24:00:00", "--time=90", "--time=1-12", "--time=7-00:00:00", "-t 2:00:00", "--time=UNLIMITED",
        "--mem=64G", "--mem=0", "--mem 512000M", "--mem=16g", "--nodes=2", "--nodes=1-4", "-N2", "--gres=gpu:4",
        "--gres=gpu:a100:2,nvme:1", "--gres=gpu", "--gpus-per-node=h100:8", "-G 4", "--ntasks-per-node=1 # tasks",
        "--signal=B:USR1@300", "--array=0-9%2", "--array=1,3,5", "-D .", "--output=%x-%j.out", "--requeue",
        "--exclusive", '--job-name="my job"', "--exclude=n[1-3]", "--cpus-per-task=16 --mem=8G",
        "--mail-type=END,FAIL", "--constraint=a100|h100", "--ntasks-per-n=2",
    ],
)  # fmt: skip
def test_what_sbatch_takes(line: str) -> None:
    assert [slip.message for slip in find_syntax_faults(f"{HEAD}#SBATCH {line}\nsrun hostname\n")] == []


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("#SBATCH --time=24h", "a time is minutes"),
        ("#SBATCH --time=1:30:75", "go up to 59"),
        ("#SBATCH --time= 24:00:00", "has no value"),
        ("#SBATCH --mem=64 GB", "follows the value"),
        ("#SBATCH --mem=lots", "memory is a number"),
        ("#SBATCH --nodes=two", "a number of nodes"),
        ("#SBATCH --nodes=0", "a number of nodes"),
        ("#SBATCH --ntasks-per-node=one", "a whole number above 0"),
        ("#SBATCH --ntask-per-nodes=1", "no option --ntask-per-nodes"),
        ("#SBATCH --gres=gpu=4", "name:count"),
        ("#SBATCH --gpus=four", "a number of GPUs"),
        ("#SBATCH -output=a", "has one dash"),
        ("#SBATCH requeue", "write --requeue"),
        ("#SBATCH", "has no option"),
        ("# SBATCH --nodes=2", "is a comment to sbatch"),
        ("#SBATCH--nodes=2", "put a space"),
        ("#SBACTH --nodes=2", "is a comment to sbatch"),
    ],
)
def test_what_sbatch_refuses_or_does_not_read(line: str, said: str) -> None:
    (slip,) = find_syntax_faults(f"{HEAD}{line}\nsrun hostname\n")
    assert slip.line == 2
    assert said in slip.message + slip.help


@pytest.mark.parametrize("first", ["", "# job", "#SBATCH --nodes=1", "#!bash"])
def test_a_script_without_a_shebang(first: str) -> None:
    (slip,) = find_syntax_faults(f"{first}\n#SBATCH --nodes=2\n")
    assert slip.line == 1


def test_a_directive_that_was_taken_out_is_a_comment() -> None:
    assert list(find_syntax_faults(f"{HEAD}##SBATCH --nodes=2\n# SBATCH lines follow\n")) == []


def test_variables_stay_as_they_are() -> None:
    text = f"{HEAD}#SBATCH --nodes=$N\n#SBATCH --output=%j.out  # not $HOME\n#SBATCH --time=${{T}}\n"
    assert list(variables_in(text)) == [(2, "$N"), (4, "${T}")]


def job(tmp_path: Path, body: str, head: str = "#SBATCH --nodes=2\n"):
    path = tmp_path / "job.sh"
    path.write_text(HEAD + head + body)
    return read_job_script(path)


def test_ranks_that_the_batch_shell_sets(tmp_path: Path) -> None:
    assert job(tmp_path, "export NODE_RANK=$SLURM_NODEID\nsrun torchrun train.py\n").ranks == (("NODE_RANK", 3),)
    assert job(tmp_path, "srun accelerate launch \\\n  --machine_rank $SLURM_PROCID train.py\n").ranks == (
        ("--machine_rank $SLURM_PROCID", 4),
    )
    for fine in (
        "srun bash -c 'NODE_RANK=$SLURM_NODEID torchrun train.py'\n",
        "srun bash -c 'accelerate launch --machine_rank $SLURM_PROCID train.py'\n",
        'srun bash -c "accelerate launch --machine_rank \\$SLURM_PROCID train.py"\n',
        "export WORLD_SIZE=8\nsrun python train.py\n",
    ):
        assert job(tmp_path, fine).ranks == (), fine


def test_a_python_behind_a_launcher(tmp_path: Path) -> None:
    assert job(tmp_path, "torchrun --nproc_per_node=4 \\\n  python train.py\n").stray == (("python", 4),)
    assert job(tmp_path, "accelerate launch python3 train.py\n").stray == (("python3", 3),)
    for fine in (
        "torchrun train.py --python python\n",
        "srun python train.py\n",
        "torchrun --no-python python train.py\n",
    ):
        assert job(tmp_path, fine).stray == (), fine


def test_where_bf16_is_asked_for(tmp_path: Path) -> None:
    assert job(tmp_path, "accelerate launch \\\n  --mixed_precision=bf16 train.py\n").bf16_line == 4
    assert job(tmp_path, "torchrun train.py --bf16\n").bf16_line == 3
    for fine in ("torchrun train.py --bf16 false\n", "echo --bf16\n", "torchrun train.py --bf16_full_eval\n"):
        assert job(tmp_path, fine).bf16_line is None, fine
