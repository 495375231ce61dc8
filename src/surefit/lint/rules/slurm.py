"""SLM: batch scripts of SLURM."""

from __future__ import annotations

import re
from collections.abc import Iterator

from surefit.core.units import duration_text
from surefit.facts.job_script import COMMANDS, TRAINING, JobScript
from surefit.lint.rule import Finding, rule

LOCAL = {"localhost", "127.0.0.1", "::1", "0.0.0.0"}
LONG_MINUTES = 60
"""Time limit in minutes from which losing the run is costly."""
WHOLE_NODE = 8
"""GPUs of a usual node: a job that uses them all does not share it."""
LOWEST_PORT, HIGHEST_PORT = 1024, 65535
CPUS_PER_PROCESS = 2
"""Processors per training process: one for the training loop, one for data loading, copies and communication."""


@rule("SLM001", "space-after-backslash", severity="error")
def space_after_backslash(job: JobScript) -> Iterator[Finding]:
    """A line does not continue, because its backslash is not the last character.

    ## What it does
    Looks for lines that end with a backslash and a space, or with a backslash and a comment.

    ## Why it is bad
    The shell escapes the space and ends the command there. The run starts with its defaults, without the options that
    follow, and the next line fails with "--num_processes: command not found".

    ## Example
    `accelerate launch \\ ` with a trailing space, and the options on the lines below.

    ## Fix
    Make the backslash the last character of the line.

    ## Evidence
    A published function-calling project had trailing spaces after `\\` in its launcher. VITA-Group/VLM-3R#9 (a
    comment), bxlab/metaWRAP#260 (a space).
    """
    for line in job.broken_continuations:
        yield Finding(
            path=job.path,
            line=line,
            message=f"the backslash at the end of line {line} is not its last character: the command ends there",
            help="delete the characters after the backslash",
        )


@rule("SLM002", "processes-are-not-gpus", severity="warning")
def processes_are_not_gpus(job: JobScript) -> Iterator[Finding]:
    """The launch starts fewer processes than the job has GPUs.

    ## What it does
    Compares the processes that torchrun, accelerate, deepspeed or srun start on a node with the GPUs that #SBATCH
    requests there. A single plain `python` is ignored, because a script may use several GPUs by itself. For more
    processes than GPUs, see PAR006; for processes that the number of machines does not divide, PAR004.

    ## Why it is bad
    The other GPUs stay idle, and the global batch is smaller than intended.

    ## Example
    `#SBATCH --gres=gpu:4` and `torchrun train.py`, which starts one process.

    ## Fix
    Start one process per GPU: `--nproc_per_node=$SLURM_GPUS_ON_NODE`.

    ## Evidence
    A published function-calling project had to fix how its job counted GPUs. huggingface/accelerate#2521: one of
    accelerate's own examples used the number per node as the total.
    """
    launch, gpus = job.launch, job.gpus_per_node
    if launch is None or not gpus or launch.multiplied or (launch.processes or 0) % (launch.machines or 1):
        return
    count = launch.per_node
    trains = launch.srun and TRAINING.search(launch.script or "") is not None and not job.spreads
    plain_python = launch.tool == "python" and (not launch.srun or count == 1) and not trains
    if count and count < gpus and not plain_python and not {"cpu", "use_cpu"} & set(launch.flags):
        flag = next((name for name in ("nproc_per_node", "num_processes", "num_gpus") if name in launch.flags), None)
        command = f"{launch.tool} --{flag} {launch.flags[flag]}" if flag else launch.tool
        yield Finding(
            path=job.path,
            line=launch.lines.get(flag or "", launch.line),
            message=f"{command} starts {count} process{'es' * (count > 1)} per node, and the job has {gpus} GPUs there",
            help=f"start {gpus} per node, or request {count} GPU{'s' * (count > 1)}",
        )


@rule("SLM003", "launcher-in-every-task", severity="error")
def launcher_in_every_task(job: JobScript) -> Iterator[Finding]:
    """Every task on a node starts a launcher, and every launcher starts processes for all GPUs.

    ## What it does
    Multiplies the tasks that srun starts on a node by the processes that torchrun, accelerate or deepspeed start.

    ## Why it is bad
    Four tasks with four processes each are sixteen processes on four GPUs. They compete for the port ("address already
    in use") and for memory, or each group trains a separate run and writes to the same checkpoints.

    ## Example
    `#SBATCH --ntasks-per-node=4` and `srun torchrun --nproc_per_node=4 train.py`.

    ## Fix
    Use `--ntasks-per-node=1` with a launcher, or one task per GPU with plain `srun python`.

    ## Evidence
    https://docs.pytorch.org/docs/stable/elastic/run.html: one torchrun per node. interTwin-eu/itwinai#360: "should
    always be 1 for torchrun and always be number of GPUs when not using torchrun".
    """
    launch = job.launch
    if launch and launch.multiplied:
        tasks, processes = launch.tasks_per_node, launch.processes_per_machine
        gpus = f" for {job.gpus_per_node} GPUs" if job.gpus_per_node else ""
        yield Finding(
            path=job.path,
            line=job.line("ntasks-per-node", "ntasks") or launch.line,
            message=f"{tasks} tasks per node each start {launch.tool} with {processes} processes: "
            f"{launch.per_node} in all{gpus}",
            help="request one task per node, or remove the launcher",
        )


@rule("SLM004", "too-few-cpus", severity="warning")
def too_few_cpus(job: JobScript) -> Iterator[Finding]:
    """Each training process has fewer than two CPUs.

    ## What it does
    If the script requests a number of CPUs, divides it by the processes on a node.

    ## Why it is bad
    One CPU is busy launching kernels. Data loading, tokenization, copies and communication share it, and the GPU waits.

    ## Example
    `--cpus-per-task=4` with one task that starts 8 processes.

    ## Fix
    Request `--cpus-per-task` = processes × (2 + data loader workers).

    ## Evidence
    Lightning-AI/litgpt#1851: timeouts until `--cpus-per-task` matched the workers. SLURM gives a task one CPU by
    default (https://slurm.schedmd.com/sbatch.html).
    """
    launch, cpus = job.launch, job.cpus_per_node
    count = launch.per_node if launch and not launch.multiplied else None
    if count and cpus and cpus < CPUS_PER_PROCESS * count:
        yield Finding(
            path=job.path,
            line=job.line("cpus-per-task", "cpus-per-gpu"),
            message=f"{cpus} CPU{'s' * (cpus > 1)} for {count} training process{'es' * (count > 1)} per node",
            help=f"request at least {CPUS_PER_PROCESS * count} per node",
        )


@rule("SLM005", "no-signal-before-the-limit", severity="info")
def no_signal_before_the_limit(job: JobScript) -> Iterator[Finding]:
    """The job gets no signal before its time limit.

    ## What it does
    Looks for `--signal` in a training job with a time limit of an hour or more.

    ## Why it is bad
    At the limit SLURM sends SIGTERM and, by default 30 seconds later, SIGKILL: too soon to save a large model. The
    training since the last checkpoint is lost, or the checkpoint is incomplete.

    ## Example
    `#SBATCH --time=24:00:00` and a checkpoint every three hours.

    ## Fix
    Add `#SBATCH --signal=USR1@300` and `--requeue` if the training script saves on that signal.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html (--signal) and https://slurm.schedmd.com/slurm.conf.html (KillWait, 30
    seconds); https://docs.coreweave.com/products/sunk/run_workloads/handle-slurm-signals.md.
    """
    if job.launch and job.minutes and job.minutes >= LONG_MINUTES and "signal" not in job.options:
        yield Finding(
            path=job.path,
            line=job.line("time"),
            message=f"the job is killed after {duration_text(60 * job.minutes)} without a signal beforehand, so "
            "the training since the last checkpoint is lost",
            help="add #SBATCH --signal=USR1@300 if the training script saves on that signal, or save more often",
        )


@rule("SLM006", "master-on-localhost", severity="error")
def master_on_localhost(job: JobScript) -> Iterator[Finding]:
    """Several nodes use localhost as the master address.

    ## What it does
    Looks for localhost or 127.0.0.1 as the master address in a job with more than one node.

    ## Why it is bad
    On every node localhost is the node itself: each waits for the others there until the timeout.

    ## Example
    `export MASTER_ADDR=localhost` in a job with `--nodes=2`.

    ## Fix
    Set `MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)`.

    ## Evidence
    pytorch/pytorch#76069.
    """
    if not job.launch or not job.nodes or job.nodes < 2 or job.launch.machines == 1:
        return
    for name, address, line in _addresses(job):
        if address in LOCAL:
            yield Finding(
                path=job.path,
                line=line,
                message=f"{name} is {address}, but the job has {job.nodes} nodes: each would wait for itself",
                help='use the first node: $(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            )
            return


def _addresses(job: JobScript) -> Iterator[tuple[str, str, int]]:
    """Yield (flag or variable, host, line) of the meeting points that are written out."""
    if job.launch:
        for flag in ("master_addr", "main_process_ip", "rdzv_endpoint"):
            if flag in job.launch.flags:
                host = re.sub(r":\d+$", "", job.launch.flags[flag])
                yield f"--{flag}", host, job.launch.lines.get(flag, job.launch.line)
    if "MASTER_ADDR" in job.variables:
        value, line = job.variables["MASTER_ADDR"]
        yield "MASTER_ADDR", value, line


@rule("SLM007", "launch-misses-nodes", severity="error")
def launch_misses_nodes(job: JobScript) -> Iterator[Finding]:
    """The launch does not match the nodes of the job.

    ## What it does
    In a job with several nodes, looks for a command that starts processes on the others (srun, mpirun, ssh…), and
    compares the number of machines in torchrun's or accelerate's options with the number of nodes. In a job with one
    node that is not an array, looks for a launch on several machines.

    ## Why it is bad
    A batch script runs on the first node only: without srun the others stay idle, and the launcher waits for them. With
    too few machines every node trains a separate run, and they overwrite each other's checkpoints.

    ## Example
    `#SBATCH --nodes=2` and `srun torchrun --nproc_per_node=4 train.py`, which launches on one machine.

    ## Fix
    Use `srun torchrun --nnodes=$SLURM_NNODES …` with one task per node.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html: "Slurm runs a single copy of the batch script on the first node".
    Lightning-AI/pytorch-lightning#8707: a run on two nodes hung until `srun` was added.
    """
    launch, nodes = job.launch, job.nodes
    if launch is None or not nodes:
        return
    if nodes < 2:
        yield from _too_many_machines(job)
        return
    if not job.reaches_nodes:
        message, help_ = f"{launch.tool} starts on the first of {nodes} nodes only", "start it with srun"
    elif (
        launch.srun and launch.tool != "python" and launch.tasks_per_node == 1 and launch.machines not in (None, nodes)
    ):
        flag = "nnodes" if launch.tool == "torchrun" else "num_machines"
        by_variable = launch.tool in COMMANDS
        consequence = "each trains a separate run" if launch.machines == 1 else "it waits for machines that never start"
        message = f"{launch.tool} is set to {launch.machines} machine{'s' * (launch.machines != 1)}, but the job has "
        message += f"{nodes} nodes: {consequence}"
        help_ = "set NNODES=$SLURM_NNODES" if by_variable else f"write --{flag}=$SLURM_NNODES"
    else:
        return
    yield Finding(path=job.path, line=launch.lines.get("nnodes", launch.line), message=message, help=help_)


def _too_many_machines(job: JobScript) -> Iterator[Finding]:
    """Yield a finding for a launch on several machines in a job of one node, unless several such jobs make them up."""
    launch = job.launch
    if launch is None or "nodes" not in job.options or "array" in job.options:
        return
    rank = next((launch.flags[name] for name in ("node_rank", "machine_rank") if name in launch.flags), "0")
    if (launch.machines or 0) > 1 and rank in ("0", "$SLURM_NODEID", "$SLURM_PROCID"):
        flag = next((name for name in ("nnodes", "num_machines", "num_nodes") if name in launch.flags), "nnodes")
        yield Finding(
            path=job.path,
            line=launch.lines.get(flag, launch.line),
            message=f"--{flag} of {launch.tool} is {launch.machines}, but --nodes requests one node: it "
            "waits for machines that never start",
            help=f"write #SBATCH --nodes={launch.machines}, or --{flag}=1",
        )


@rule("SLM008", "option-after-a-command", severity="warning")
def option_after_a_command(job: JobScript) -> Iterator[Finding]:
    """An #SBATCH line comes after the first command and is not read.

    ## What it does
    Looks for #SBATCH lines below the first line that is not a comment.

    ## Why it is bad
    sbatch silently ignores options after the first command: the job gets the cluster's defaults instead.

    ## Example
    `set -e` above `#SBATCH --time=24:00:00`.

    ## Fix
    Move all #SBATCH lines to the top.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html: options are read "before any executable commands in the script".
    """
    for line in job.late_options:
        yield Finding(
            path=job.path,
            line=line,
            message=f"the #SBATCH on line {line} comes after the first command, so sbatch ignores it",
            help="move it above the first command",
        )


@rule("SLM009", "dos-line-breaks", severity="error")
def dos_line_breaks(job: JobScript) -> Iterator[Finding]:
    """The script has Windows line endings.

    ## What it does
    Looks for carriage returns at the ends of lines.

    ## Why it is bad
    sbatch rejects the script; bash would read the carriage return as part of the last word of every line.

    ## Example
    A script edited on Windows and copied to the cluster.

    ## Fix
    `dos2unix FILE`, or `sed -i 's/\\r$//' FILE`.

    ## Evidence
    sbatch's own message: "Batch script contains DOS line breaks (\\r\\n) instead of expected UNIX line breaks (\\n)".
    """
    if job.dos_line_breaks:
        yield Finding(
            path=job.path,
            message="its lines end in \\r\\n, which sbatch rejects",
            help="convert it: sed -i 's/\\r$//' FILE",
        )


@rule("SLM010", "port-is-fixed", severity="info")
def port_is_fixed(job: JobScript) -> Iterator[Finding]:
    """The master port is hard-coded, but other jobs can share the node.

    ## What it does
    Looks for a constant port in a single-node job that uses fewer than eight GPUs and is not exclusive.

    ## Why it is bad
    A second copy of the job on the same node stops because the port is in use, or joins the other run.

    ## Example
    `export MASTER_PORT=29500` in a job with one of a node's four GPUs, submitted twice.

    ## Fix
    Use `torchrun --standalone` on one node, or derive the port from the job id.

    ## Evidence
    TorchDR/TorchDR#249, m2lines/Samudra#805.
    """
    unshared = job.nodes != 1 or "exclusive" in job.options or not job.gpus_per_node or job.gpus_per_node >= WHOLE_NODE
    if unshared or not job.launch or job.launch.tool == "python":
        return
    for name, port, line in ports(job):
        if port.isdecimal() and LOWEST_PORT <= int(port) <= HIGHEST_PORT:
            yield Finding(
                path=job.path,
                line=line,
                message=f"{name} is {port} in every job: two jobs on one node would use the same port",
                help="use torchrun --standalone, or MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            )
            return


def ports(job: JobScript) -> Iterator[tuple[str, str, int]]:
    """Yield (flag or variable, port, line) of the ports that are written out."""
    if job.launch:
        for flag in ("master_port", "main_process_port", "rdzv_endpoint"):
            if flag in job.launch.flags:
                yield (
                    f"--{flag}",
                    job.launch.flags[flag].rpartition(":")[2],
                    job.launch.lines.get(flag, job.launch.line),
                )
    if "MASTER_PORT" in job.variables:
        value, line = job.variables["MASTER_PORT"]
        yield "MASTER_PORT", value, line
