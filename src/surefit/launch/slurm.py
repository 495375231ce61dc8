"""SLURM batch scripts for a run: rendering, arithmetic of processes and batch, submission, job states. Torch-free.

The script survives its time limit: shortly before it SLURM sends SIGUSR1, the script forwards it to every process of
the run, the run saves a checkpoint and exits, and the script requeues the job, which starts again with `--resume`. It
is requeued only if it got the signal *and* the run has recorded that it was interrupted with its work saved: a run that
is finished, that failed or that a user canceled is never restarted.

See https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefit import __version__
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_data_ranks, count_processes, require_shareable
from surefit.core.env import redact
from surefit.core.errors import ConfigError, MachineError
from surefit.core.units import duration_text, plural, shell_quote
from surefit.facts.job_script import minutes_of

LOG = "slurm-%j.out"
"""The output of a job, in the run directory; %j is the job's number, which a requeued job keeps."""
ARRAY_LOG = "slurm-%A_%a.out"
"""The output of an array job's tasks: %A is the job's number, %a the task's."""
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "TIMEOUT")
"""States of a job that will not run again by itself."""
ANSWER_SECONDS = 20
"""Timeout of SLURM's own commands: a busy controller is slow, a dead one never answers."""
_PLAIN = re.compile(r"[\w@+:,./=-]+")

JobStage = Literal["train", "merge", "evaluate", "checkpoints", "prepare"]
"""What a job does: a stage of the run, the scores of every checkpoint, or the shards of `data.tokenized`."""


@dataclass(frozen=True)
class BatchJob:
    """One run as a job.

    Attributes:
        config: of the run, with its devices and parallel mode decided.
        config_file: the config argument of `surefit train`.
        run: the run directory.
        directory: where relative paths of the config start.
        overrides: the `--set` arguments of `surefit train`.
        python: the interpreter of the environment that the script uses if `slurm.venv` is not set.
        interface: the network interface for communication, if the libraries' own choice is wrong.
        missing: requirements of the job that this environment lacks, in sentences.
    """

    config: SureFitConfig
    config_file: Path
    run: Path
    directory: Path
    overrides: Sequence[str] = ()
    python: Path = Path(sys.executable)
    interface: str | None = None
    missing: tuple[str, ...] = ()

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return self.config.hardware.nodes

    @property
    def per_node(self) -> int:
        """Number of processes per node, one per GPU."""
        return self.processes // self.nodes

    @property
    def processes(self) -> int:
        """Number of processes on all nodes."""
        return count_processes(self.config)

    @property
    def places(self) -> dict[str, int]:
        """Fields of `--json` about its processes."""
        return {"nodes": self.nodes, "processes_per_node": self.per_node, "processes": self.processes}

    @property
    def world(self) -> str:
        """Nodes × processes per node = processes, in words."""
        count = "1 process" if self.processes == 1 else f"{self.processes:,} processes"
        return f"{plural(self.nodes, 'node')} × {self.per_node} = {count}"

    @property
    def on_gpus(self) -> bool:
        """Return whether the job requests GPUs."""
        return self.config.hardware.gpu != "cpu"


def check_arithmetic(job: BatchJob) -> None:
    """Check that nodes, processes, their parallel mode and the global batch divide evenly.

    Raises:
        ConfigError: they do not, with the numbers.
    """
    require_shareable(job.config)
    _require_time(job)
    batch, data_ranks = job.config.train.global_batch_size, count_data_ranks(job.config)
    if isinstance(batch, int) and batch % data_ranks:
        raise ConfigError(
            f"a global batch of {batch} cannot be cut into {data_ranks} equal parts ({job.world})",
            code="E5013",
            path=job.config_file,
            field="train.global_batch_size",
            help=f"write a multiple of {data_ranks}, such as {-(-batch // data_ranks) * data_ranks}",
        )


def _require_time(job: BatchJob) -> None:
    """Raise unless sbatch can read the time limit, and the limit is longer than the time between signal and end."""
    limit, notice = job.config.slurm.time, job.config.slurm.signal_seconds
    minutes = minutes_of(limit)
    if minutes is None and limit.upper() not in ("UNLIMITED", "INFINITE"):
        raise ConfigError(
            f"{limit!r} is not a time limit for sbatch",
            code="E5014",
            path=job.config_file,
            field="slurm.time",
            help='write "8:00:00" (hours:minutes:seconds), "2-12" (days-hours), or minutes as "90"',
        )
    if minutes and minutes * 60 <= notice:
        raise ConfigError(
            f"a job of {limit} ({duration_text(minutes * 60)}) would have to save at once, {notice} s before its end",
            code="E5015",
            path=job.config_file,
            field="slurm.signal_seconds",
            help="raise slurm.time, or lower slurm.signal_seconds",
        )


def render_script(
    job: BatchJob,
    stage: JobStage = "train",
    *,
    tasks: int | None = None,
    at_once: int | None = None,
    after: str | None = None,
) -> str:
    """Return the batch script of a stage.

    A merge cannot be continued: near the end of its time the job prints that and does not requeue itself. The tasks of
    `checkpoints` are not assigned checkpoints: each scores the next one that no task has scored or is scoring, until
    none is left. So any number of tasks works, and a checkpoint that is written while they wait is scored as well. The
    task of `prepare` that ends last writes the manifest.

    Args:
        job: the run; for an array job, one task. Its processes share the rows; a merge has one process, and a task of
            `prepare` one without a GPU, whose workers have `slurm.cpus_per_gpu` cores.
        tasks: number of tasks of an array job.
        at_once: maximum number of tasks that run together.
        after: the training job; the tasks start when it has ended.

    Raises:
        ConfigError: the numbers do not divide evenly, the time limit is not usable, the virtual environment does not
            exist, or a secret would be in the script.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    if stage == "train":
        check_arithmetic(job)
    _require_time(job)
    config = str(job.config_file)
    command = {
        "train": ["train", config, "--resume"],
        "merge": ["merge", config],
        "evaluate": ["evaluate", config],
        "checkpoints": ["evaluate", config, "--all-checkpoints"],
        "prepare": ["prepare", config, "--workers", str(job.config.slurm.cpus_per_gpu)],
    }[stage]
    verb = "" if stage == "train" else f"-{command[0]}"
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "plural": plural,
        "line": _one_line,
        "option": _option,
        "word": shell_quote,
        "words": shlex.join,
    }
    script = environment.get_template("job.sbatch.j2").render(
        version=__version__,
        job=job,
        slurm=job.config.slurm,
        environment=_virtual_environment(job),
        stage=stage,
        name=job.run.name + verb,
        log=str(job.run).replace("%", "%%") + f"/{ARRAY_LOG if tasks else LOG}",
        command=[*command, *(word for override in job.overrides for word in ("--set", override))],
        tasks=tasks,
        at_once=at_once,
        after=after,
    )
    if redact(script) != script:
        raise ConfigError(
            "a token or password would be in the batch script, where everyone can read it",
            code="E5016",
            path=job.config_file,
            help="put it into the environment or a .env file; SLURM passes the environment on",
        )
    return script


def _virtual_environment(job: BatchJob) -> Path:
    """Return the folder of the virtual environment whose Python the script uses."""
    venv = job.config.slurm.venv
    home = Path(venv).expanduser().absolute() if venv else job.python.absolute().parent.parent
    if venv and not any((home / "bin" / name).exists() for name in ("activate", "python")):
        raise ConfigError(
            f"{home} is not a virtual environment: it has neither bin/activate nor bin/python",
            code="E5017",
            path=job.config_file,
            field="slurm.venv",
            help="name the folder of a virtual environment that the nodes can see",
        )
    return home


def _option(value: object) -> str:
    """Return a value in sbatch's syntax: double quotes keep spaces together, and a quote itself cannot be written."""
    text = _one_line(value)
    if '"' in text:
        raise ConfigError(
            f"sbatch cannot read {text}: it contains a quote", code="E5018", help="choose a name without quotes"
        )
    return text if _PLAIN.fullmatch(text) or not re.search(r"[\s#]", text) else f'"{text}"'


def _one_line(value: object) -> str:
    text = str(value)
    if "\n" in text or "\r" in text:
        raise ConfigError(f"{text!r} contains a line break", code="E5019", help="choose a name without line breaks")
    return text.rstrip()


def dependency_options(after: str) -> list[str]:
    """Return sbatch's options for a job that starts when another has succeeded."""
    return [f"--dependency=afterok:{after}", "--kill-on-invalid-dep=yes"]


def submit(script: Path, after: str | None = None) -> str:
    """Submit a script with sbatch, and return the job's number.

    Args:
        after: the job that must have ended with exit code 0 first; if it ends otherwise, SLURM removes this one, which
            would otherwise wait forever.

    Raises:
        MachineError: there is no sbatch, or it reports an error.
    """
    answer = _run_slurm_program(["sbatch", "--parsable", *(dependency_options(after) if after else ()), str(script)])
    if answer is None:
        raise MachineError(
            "there is no sbatch on this machine",
            code="E5020",
            help=f"go to a login node of the cluster: sbatch {script}",
        )
    if answer.returncode:
        raise MachineError(
            f"sbatch rejected the job: {redact(answer.stderr.strip()) or 'without a message'}",
            code="E5021",
            path=script,
            help="nothing was submitted; the config's section slurm sets the resources",
        )
    return answer.stdout.strip().partition(";")[0]  # NUMBER, or NUMBER;CLUSTER


def check_submission(script: Path) -> str | None:
    """Return what `sbatch --test-only` says: when the job could start, or why it is rejected; None without sbatch."""
    answer = _run_slurm_program(["sbatch", "--test-only", str(script)])
    lines = (answer.stderr or answer.stdout).strip().splitlines() if answer else []
    return redact(lines[-1]) if lines else None


def job_states(numbers: Iterable[str]) -> dict[str, str]:
    """Return the state of each job in SLURM's words, such as RUNNING; unknown jobs are left out."""
    return {number: next(iter(states)) for number, states in task_states(numbers).items()}


def task_states(numbers: Iterable[str]) -> dict[str, Counter[str]]:
    """Count the tasks of each job by state; a job that is no array is one task.

    squeue lists waiting and running jobs, sacct (if the cluster keeps accounts) the others.
    """
    job_ids = sorted({number for number in numbers if number.isdecimal()})
    if not job_ids:
        return {}
    states_by_job = _states(["squeue", "--noheader", "--array", "--states=all", "--me", "--format=%F|%T"])
    missing = [number for number in job_ids if number not in states_by_job]
    if missing:
        accounts = ["sacct", "--noheader", "--allocations", "--parsable2", "--format=JobID,State"]
        states_by_job |= _states([*accounts, f"--jobs={','.join(missing)}"])
    return {number: states_by_job[number] for number in job_ids if number in states_by_job}


def _states(command: Sequence[str]) -> dict[str, Counter[str]]:
    """Count the states in `number|STATE` lines, one per task, or `number_task|STATE`.

    Empty if the command does not exist or does not answer.
    """
    answer = _run_slurm_program(command)
    lines = answer.stdout.splitlines() if answer is not None and answer.returncode == 0 else []
    states: dict[str, Counter[str]] = {}
    for pair in (line.strip().split("|") for line in lines):
        if len(pair) == 2 and pair[1]:
            states.setdefault(pair[0].partition("_")[0], Counter())[pair[1].split()[0]] += 1
    return states


def _run_slurm_program(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run one of SLURM's programs; return None if it is not installed."""
    program = shutil.which(command[0])
    if program is None:
        return None
    try:
        return subprocess.run([program, *command[1:]], capture_output=True, text=True, timeout=ANSWER_SECONDS)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer in {ANSWER_SECONDS} s")
