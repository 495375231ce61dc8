"""SLM: memory, log files, devices and launchers' options that do not fit together."""

from __future__ import annotations

import os.path
import re
from collections.abc import Iterator
from pathlib import Path

from surefit.core.units import bytes_text
from surefit.facts.job_script import JobScript, memory_mib
from surefit.lint.rule import Finding, rule

LEAST_MIB = 2048
"""RAM in MiB that a process with PyTorch and CUDA needs before it holds a single weight."""
NAMES = {"%x": "$SLURM_JOB_NAME", "%j": "$SLURM_JOB_ID", "%J": "$SLURM_JOB_ID", "%A": "$SLURM_ARRAY_JOB_ID"}
NAMES |= {"%a": "$SLURM_ARRAY_TASK_ID", "%u": "$USER"}
"""Patterns in the names of log files → the shell variables with the same value."""
APART = {
    "accelerate": ((("multi_gpu", "use_fsdp", "use_deepspeed", "cpu", "tpu"), "they select different launch modes"),),
    "deepspeed": (
        (("include", "num_gpus"), "the launcher accepts a list of GPUs or their number"),
        (("include", "num_nodes"), "the launcher accepts a list of nodes or their number"),
        (("exclude", "num_gpus"), "the launcher accepts a list of GPUs or their number"),
        (("exclude", "num_nodes"), "the launcher accepts a list of nodes or their number"),
        (("include", "exclude"), "the launcher accepts one of the two lists"),
    ),
}
"""Launcher → (options that exclude each other, why)."""


@rule("SLM042", "memory-too-small", severity="error")
def memory_too_small(job: JobScript) -> Iterator[Finding]:
    """The job requests less memory than a training process needs to start.

    ## What it does
    Reads `--mem`, `--mem-per-cpu` and `--mem-per-gpu` of a training job; a number without a unit is in megabytes.

    ## Why it is bad
    SLURM kills the job while it imports PyTorch or loads the model, with "oom-kill event" and no message from the
    script.

    ## Example
    `#SBATCH --mem=240`, which is 240 MB, not 240 GB.

    ## Fix
    Write the unit: `--mem=240G`.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html#OPT_mem: "Default units are megabytes".
    """
    requested = memory_mib(job)
    if job.launch is None or requested is None or requested >= LEAST_MIB:
        return
    name = next(option for option in ("mem", "mem-per-cpu", "mem-per-gpu") if option in job.options)
    value = job.options[name]
    yield Finding(
        path=job.path,
        line=job.line(name),
        message=f"--{name}={value} is {bytes_text(round(requested * 2**20))} per node, less than PyTorch needs",
        help=f"write --{name}={value}G" if value.isdecimal() else "request several gigabytes",
    )


@rule("SLM043", "log-folder-absent", severity="warning")
def log_folder_absent(job: JobScript) -> Iterator[Finding]:
    """The job's log folder does not exist when the job starts.

    ## What it does
    Looks at the folders of `--output` and `--error` for a name with a pattern such as %j, a folder that the script
    itself creates, and a relative path that exists neither here nor beside the script.

    ## Why it is bad
    SLURM opens the file before the script runs, and does not create folders: the job fails at once, without any
    message.

    ## Example
    `#SBATCH --output=logs/%x/%j.out` with `mkdir -p logs/$SLURM_JOB_NAME` in the script.

    ## Fix
    Create the folder before `sbatch`, and use patterns in the file name only.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html, --output: the batch script's standard output is connected "directly to the
    file name specified"; no directory is created.
    """
    made_folders = {os.path.normpath(re.sub(r"\$\{(\w+)\}", r"$\1", folder)) for folder in job.folders_made}
    reported: set[str] = set()
    for name in ("output", "error"):
        folder = os.path.dirname(job.options.get(name, ""))
        if not folder or folder.startswith("/dev") or folder in reported:
            continue
        reported.add(folder)
        expanded = os.path.normpath(re.sub(r"%\d*[xjJAau]", lambda match: NAMES[f"%{match[0][-1]}"], folder))
        if re.search(r"%\d*[A-Za-z]", folder):
            reason = "its name is known only when the job runs"
        elif any(path == expanded or path.startswith(f"{expanded}/") for path in made_folders):
            reason = "the script creates it after the file is opened"
        elif _is_absent(folder, job):
            reason = "it does not exist"
        else:
            continue
        yield Finding(
            path=job.path,
            line=job.line(name),
            message=f"--{name} writes into the folder {folder}, which SLURM does not create: {reason}",
            help="create the folder before sbatch, and use patterns such as %j in the file name only",
        )


def _is_absent(folder: str, job: JobScript) -> bool:
    """Return whether a relative folder exists neither in the working directory nor beside the script or above it."""
    if os.path.isabs(folder) or "$" in folder or folder.startswith("~") or "chdir" in job.options:
        return False
    script_folder = Path(job.path).resolve().parent
    return not any((base / folder).is_dir() for base in (Path.cwd(), script_folder, *list(script_folder.parents)[:3]))


@rule("SLM044", "devices-hidden", severity="error")
def devices_hidden(job: JobScript) -> Iterator[Finding]:
    """CUDA_VISIBLE_DEVICES does not match the processes of the launch, or the GPUs of the job.

    ## What it does
    Counts the devices in a constant CUDA_VISIBLE_DEVICES, and compares them with the processes of the launch and the
    GPUs that the job requests.

    ## Why it is bad
    Processes without a device stop with "invalid device ordinal"; a number outside the job's GPUs does not exist, or
    belongs to another job.

    ## Example
    `export CUDA_VISIBLE_DEVICES=0,1` above `torchrun --nproc_per_node=4`.

    ## Fix
    Remove the variable: SLURM sets it.

    ## Evidence
    https://slurm.schedmd.com/gres.html: SLURM sets CUDA_VISIBLE_DEVICES to the GPUs of the job.
    """
    launch, value = job.launch, job.variables.get("CUDA_VISIBLE_DEVICES")
    if launch is None or value is None or not re.fullmatch(r"\d{1,3}(,\d{1,3})*,?", value[0]):
        return
    devices = [int(number) for number in value[0].strip(",").split(",")]
    count = launch.per_node or 0
    if launch.tool != "deepspeed" and count > len(devices):  # deepspeed ignores the variable if it gets a number
        message = f"{launch.tool} starts {count} processes per node, but CUDA_VISIBLE_DEVICES lists {len(devices)} GPUs"
    elif job.gpus_per_node and max(devices) >= job.gpus_per_node:
        message = f"CUDA_VISIBLE_DEVICES names device {max(devices)}, but the job has {job.gpus_per_node} GPUs per node"
    else:
        return
    yield Finding(
        path=job.path,
        line=value[1],
        field="CUDA_VISIBLE_DEVICES",
        message=message,
        help="remove CUDA_VISIBLE_DEVICES, which SLURM sets, or list a GPU for each process",
    )


@rule("SLM045", "line-continues-nothing", severity="error")
def line_continues_nothing(job: JobScript) -> Iterator[Finding]:
    """A line begins with an option, but the line above does not continue.

    ## What it does
    Looks for lines that begin with `-` outside of brackets, quotes and here-documents, after a line that does not end
    with a backslash, or that is a comment.

    ## Why it is bad
    The run starts without the options of this line and those below it, and the shell then reports that
    `--per_device_train_batch_size` is not a command.

    ## Example
    `--learning_rate 1e-5` without a trailing backslash, and `--num_train_epochs 3` on the next line.

    ## Fix
    End the line above with a backslash; remove comments and empty lines from the command.

    ## Evidence
    Bash's manual, "Escape Character": only a backslash right before the line break continues a line.
    """
    for line, option in job.options_alone[:1]:
        yield Finding(
            path=job.path,
            line=line,
            message=f"{option} begins a new command: line {line - 1} does not continue",
            help=f"end line {line - 1} with a backslash; a comment or an empty line also ends the command",
        )


@rule("SLM046", "launcher-options-apart", severity="error")
def launcher_options_apart(job: JobScript) -> Iterator[Finding]:
    """A launcher gets options that exclude each other.

    ## What it does
    Looks for options of accelerate, deepspeed and torchrun that exclude each other, and for `--multi_gpu` with a single
    process.

    ## Why it is bad
    The launcher stops before any process starts; torchrun's `--standalone` makes every machine wait for itself.

    ## Example
    `deepspeed --num_gpus 4 --include localhost:0,1 train.py`, `accelerate launch --multi_gpu --use_fsdp train.py`.

    ## Fix
    Remove one of them.

    ## Evidence
    DeepSpeed 0.19, launcher/runner.py: "Cannot specify num_nodes/gpus with include/exclude". Accelerate 1.15,
    commands/launch.py: "You can only use one of `--cpu`, `--multi_gpu`, `--tpu`, `--use_deepspeed`, `--use_fsdp`".
    """
    for launch in job.launches:
        for options, reason in APART.get(launch.tool, ()):
            flags = [name for name in options if name in launch.flags]
            if len(flags) > 1:
                yield Finding(
                    path=job.path,
                    line=launch.lines.get(flags[1], launch.line),
                    message=f"{launch.tool} does not accept --{flags[0]} with --{flags[1]}: {reason}",
                    help=f"remove --{flags[0]} or --{flags[1]}",
                )
                break
        if launch.tool == "torchrun" and "standalone" in launch.flags and (launch.machines or 1) > 1:
            yield Finding(
                path=job.path,
                line=launch.lines.get("standalone", launch.line),
                message=f"--standalone is for one machine, but --nnodes is {launch.machines}: each waits for itself",
                help="write --rdzv_backend=c10d --rdzv_endpoint=$MASTER_ADDR:$MASTER_PORT instead",
            )
        if launch.tool == "accelerate" and "multi_gpu" in launch.flags and launch.processes == 1:
            yield Finding(
                path=job.path,
                line=launch.lines.get("num_processes", launch.line),
                message="--multi_gpu needs two processes or more, but --num_processes is 1",
                help="remove --multi_gpu, or start a process for each GPU",
            )
