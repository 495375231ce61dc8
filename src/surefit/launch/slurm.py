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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surefit import __version__
from surefit.config.schema import SureFitConfig
from surefit.config.world import count_data_ranks, count_processes, require_shareable
from surefit.core.env import redact
from surefit.core.errors import ConfigError, MachineError
from surefit.core.units import duration_text, plural
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
    if batch % data_ranks:
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


def render_train(job: BatchJob) -> str:
    """Return the batch script of training.

    Raises:
        ConfigError: the numbers do not divide evenly; the virtual environment does not exist; a secret would be in it.
    """
    check_arithmetic(job)
    head = _head(job, f"{job.world}; a global batch of {job.config.train.global_batch_size}.", {})
    return _join_script(job, [head, _environment(job), _rendezvous(job), _start(job), _END])


def render_array(job: BatchJob, tasks: int, at_once: int | None = None, after: str | None = None) -> str:
    """Return the script of an array job that scores every checkpoint of a run, each task one at a time.

    Tasks are not assigned checkpoints: each scores the next one that no task has scored or is scoring, until none is
    left. So any number of tasks works, and a checkpoint that is written while they wait is scored as well.

    Args:
        job: one task; its config has the processes of a task, which share the rows.
        tasks: number of tasks; at_once: maximum number that run together.
        after: the training job; the tasks start when it has ended.

    Raises:
        ConfigError: the time limit is not usable; the virtual environment does not exist; a secret would be in it.
    """
    _require_time(job)
    options = {
        "job-name": f"{job.run.name}-evaluate",
        "array": f"0-{tasks - 1}" + (f"%{at_once}" if at_once else ""),
        "dependency": f"afterany:{after}" if after else None,
        "output": _in_run(job, ARRAY_LOG),
    }
    head = _head(job, f"{plural(tasks, 'task')}, each of {job.world}; they divide the checkpoints among them.", options)
    return _join_script(
        job, [head, _environment(job), _rendezvous(job), _evaluate(job, ["--all-checkpoints"], _SHARED_OUT)]
    )


def render_merge(job: BatchJob) -> str:
    """Return the script of the job that merges the trained weights: one process, on one node.

    A merge cannot be continued: near the end of its time the job prints that and does not requeue itself. If SLURM
    requeues it, after a lost node, it merges anew.

    Raises:
        ConfigError: as for `render_array`.
    """
    _require_time(job)
    head = _head(job, f"{job.world}, which merges the trained adapter.", {"job-name": f"{job.run.name}-merge"})
    command = _command(job, [], ["merge", str(job.config_file)])
    merge = f"""
# A merge cannot be continued: the job does not go back into the queue near the end of its time.
signals=0
trap 'signals=1; echo "job $SLURM_JOB_ID: its time is nearly over; if it is not enough, raise slurm.time" >&2' USR1

# Merge: from the beginning, if SLURM starts this job again.
{command} &
{_WAIT}"""
    return _join_script(job, [head, _environment(job), merge])


def render_evaluate(job: BatchJob) -> str:
    """Return the script of the job that scores base, adapter and merged model; its processes share the rows.

    Raises:
        ConfigError: as for `render_array`.
    """
    _require_time(job)
    head = _head(job, f"{job.world}; each answers a part of the rows.", {"job-name": f"{job.run.name}-evaluate"})
    about = "Score: base, adapter and merged model. Exit code 1: the gate fails; 5: there are too few rows to decide."
    return _join_script(job, [head, _environment(job), _rendezvous(job), _evaluate(job, [], about)])


def render_prepare(job: BatchJob, tasks: int, at_once: int | None = None) -> str:
    """Return the script of an array job that writes the shards of `data.tokenized`, each task its own shards.

    The task that ends last writes the manifest.

    Args:
        job: one task: one process on a node, without a GPU, whose workers have `slurm.cpus_per_gpu` cores.
        tasks: number of tasks; at_once: maximum number that run together.

    Raises:
        ConfigError: as for `render_array`.
    """
    _require_time(job)
    options = {
        "job-name": f"{job.run.name}-prepare",
        "array": f"0-{tasks - 1}" + (f"%{at_once}" if at_once else ""),
        "output": _in_run(job, ARRAY_LOG),
    }
    head = _head(job, f"{plural(tasks, 'task')}, each of {job.world}; each makes every {tasks}th shard.", options)
    workers = str(job.config.slurm.cpus_per_gpu)
    command = _command(job, [], ["prepare", str(job.config_file), "--workers", workers])
    command += f' \\\n    --shard "$((SLURM_ARRAY_TASK_ID + 1))/{tasks}"'
    listing = f"ls {shlex.quote(str(job.directory / str(job.config.data.tokenized)))}"
    about = "Tokenize: the shards of this task that do not exist yet."
    return _join_script(job, [head, _environment(job), _resumable_command(command, listing, "shards", about)])


def _join_script(job: BatchJob, parts: Sequence[str]) -> str:
    script = "\n".join(part.strip("\n") + "\n" for part in parts if part)
    if redact(script) != script:
        raise ConfigError(
            "a token or password would be in the batch script, where everyone can read it",
            code="E5016",
            path=job.config_file,
            help="put it into the environment or a .env file; SLURM passes the environment on",
        )
    return script


def _head(job: BatchJob, about: str, more: Mapping[str, str | None]) -> str:
    """Return the comments and #SBATCH lines; `more` adds options or replaces them."""
    slurm = job.config.slurm
    options = {
        "job-name": job.run.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.per_node if job.on_gpus else None,
        "cpus-per-task": slurm.cpus_per_gpu * job.per_node,
        "mem": slurm.memory,
        "time": slurm.time,
        "partition": slurm.partition,
        "account": slurm.account,
        "chdir": job.directory,
        "output": _in_run(job, LOG),
        "open-mode": "append",
        "signal": f"B:USR1@{slurm.signal_seconds}",
        **more,
    }
    lines = [f"#SBATCH --{name}={_option(value)}" for name, value in options.items() if value is not None]
    return "\n".join(
        [
            "#!/usr/bin/env bash",
            f"# Written by SureFit {__version__} for {_one_line(job.config_file)}.",
            f"# {about}",
            *lines,
            "#SBATCH --requeue",
            *(f"#SBATCH {option}" for option in slurm.options),
            "",
            "set -eo pipefail # not -u: the scripts of modules and environments read variables that are not set",
        ]
    )


def _in_run(job: BatchJob, name: str) -> str:
    return str(job.run).replace("%", "%%") + f"/{name}"


def _environment(job: BatchJob) -> str:
    """Return the lines for modules, Python, threads, the hub and the network."""
    slurm = job.config.slurm
    lines = ["# The software."]
    if slurm.modules:
        lines.append(f"module load {shlex.join(slurm.modules)}")
    lines.append(_python(job))
    lines.append(f"export OMP_NUM_THREADS={slurm.cpus_per_gpu}")
    lines.append("export PYTHONSAFEPATH=1 # modules come from the environment, not from the directory of the config")
    offline = "Compute nodes often have no network: download model and data first, and remove the #."
    lines += [f"# {offline}", "# export HF_HUB_OFFLINE=1"]
    if job.interface:
        names = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
        lines += [f"export {name}={shlex.quote(job.interface)}" for name in names]
    if job.on_gpus and job.processes > 1:
        lines.append("# NCCL reports the cause of a failure only at this level; without failures it prints nothing.")
        lines.append('export NCCL_DEBUG="${NCCL_DEBUG:-WARN}"')
    return "\n".join(lines)


def _python(job: BatchJob) -> str:
    """Return the line that makes `python` the environment's interpreter."""
    venv = job.config.slurm.venv
    home = Path(venv).expanduser().absolute() if venv else job.python.absolute().parent.parent
    if (home / "bin" / "activate").exists():
        return f"source {shlex.quote(f'{home}/bin/activate')}"
    if not (home / "bin" / "python").exists() and venv:
        raise ConfigError(
            f"{home} is not a virtual environment: it has neither bin/activate nor bin/python",
            code="E5017",
            path=job.config_file,
            field="slurm.venv",
            help="name the folder of a virtual environment that the nodes can see",
        )
    return f'export PATH={shlex.quote(f"{home}/bin")}:"$PATH"'


def _rendezvous(job: BatchJob) -> str:
    if job.processes == 1:
        return ""
    return """
# The rendezvous address: the first node of the job, and a port that no other job on it uses.
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((10000 + SLURM_JOB_ID % 20000))
export MASTER_ADDR MASTER_PORT
"""


def _start(job: BatchJob) -> str:
    """Return the lines that start training with `srun`: one launcher per node, or the one process."""
    command = _command(job, ['bash -c "$ignoring" bash'], ["train", str(job.config_file), "--resume"])
    launcher_text = "one torchrun on each node, which starts a process per GPU" if job.processes > 1 else "one process"
    launcher_text = launcher_text if job.on_gpus else launcher_text.replace(" per GPU", " per worker")
    events = shlex.quote(str(job.run / "events.jsonl"))
    return f"""
# How often this run was interrupted with its work saved, from its event log.
interruptions() {{ grep -sc '"stage": "train", "event": "interrupted"' {events} || true; }}
before=$(interruptions)

# Near the end of its time this script gets SIGUSR1; srun hands it to every process of the run.
signals=0 step=
trap 'signals=$((signals + 1)); [[ -z $step ]] || kill -USR1 "$step" || true' USR1

# Train: {launcher_text}. The first time it starts, then it resumes.
# SIGUSR1 is for the training processes, which listen to it themselves; every other process there ignores it.
ignoring='trap "" USR1; exec "$@"'
{command} &
step=$!
"""


def _evaluate(job: BatchJob, options: Sequence[str], about: str) -> str:
    command = _command(job, [], ["evaluate", str(job.config_file), *options])
    return _resumable_command(command, f"ls -lR {shlex.quote(str(job.run / 'eval'))}", "answers", about)


def _resumable_command(command: str, listing: str, what: str, about: str) -> str:
    """Return the lines of a command that keeps its partial results, named `what`, and continues from them.

    `listing` is a shell command that lists the results.
    """
    return f"""
# Near the end of its time the job goes back into the queue and later continues: its {what} are kept as
# they come. Not if it has produced nothing since it began: it would never finish.
kept() {{ {{ {listing} || true; }} 2>&1 | cksum; }}
before=$(kept) signals=0
trap 'signals=1; [[ $(kept) == "$before" ]] || scontrol requeue "$SLURM_JOB_ID"' USR1

# {about}
{command} &
{_WAIT}"""


_SHARED_OUT = """Score: the next checkpoint that is neither scored nor being scored, until none is left. The last task
# writes the summary of all."""


_WAIT = """step=$! code=0
wait "$step" || code=$?
if [[ $signals == 1 ]]; then
    code=0
    wait "$step" || code=$?
fi
exit "$code"
"""


def _command(job: BatchJob, wrapper: Sequence[str], verb: Sequence[str]) -> str:
    """Return the `srun` command of one launcher per node, or of the one process, with the config's overrides."""
    words = ["-m", "surefit", *verb, *(part for override in job.overrides for part in ("--set", override))]
    launcher = ["python"]
    if job.processes > 1:
        launcher = [
            f'torchrun --nnodes="$SLURM_NNODES" --nproc-per-node={job.per_node}',
            '--rdzv-id="$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"',
        ]
    step = 'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK"'
    return " \\\n    ".join([step, *wrapper, *launcher, shlex.join(words)])


_END = """
# A signal ends the waiting early, and the step goes on: wait again.
while true; do
    signals_before=$signals code=0
    wait "$step" || code=$?
    [[ $signals != "$signals_before" ]] || break
done

# Saved and not finished: back into the queue. Finished, failed, cancelled: the end.
if [[ $signals -gt 0 && $(interruptions) -gt $before ]]; then
    echo "job $SLURM_JOB_ID: saved, and back into the queue"
    scontrol requeue "$SLURM_JOB_ID"
    exit 0
fi
exit "$code"
"""


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
