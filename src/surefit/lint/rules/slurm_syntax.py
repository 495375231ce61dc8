"""SLM: directives, options and settings that sbatch, a launcher or the node does not accept."""

from __future__ import annotations

import re
from collections.abc import Iterator

from surefit.facts.job_script import JobScript
from surefit.lint.rule import Finding, rule
from surefit.lint.rules.slurm import HIGHEST_PORT, LOWEST_PORT, ports

OLD_GPUS = (
    r"(?<![a-z])(v100s?|p100|t4|k80|p40|p4|m60|rtx_?20[678]0(_?ti)?|gtx_?10[678]0(_?ti)?|2080_?ti|titan_?v)(?![0-9a-z])"
)
"""Names of NVIDIA's GPUs before Ampere, as clusters write them."""


@rule("SLM011", "directive-not-understood", severity="error")
def directive_not_understood(job: JobScript) -> Iterator[Finding]:
    """sbatch rejects an #SBATCH line, or does not recognize it.

    ## What it does
    Checks the directives against sbatch's syntax: option names, times, memory, counts, generic resources; looks for
    mistyped directives that are comments (`# SBATCH`, `#SBATCH--time`), and for the shebang.

    ## Why it is bad
    sbatch rejects the job; or it ignores the line, and the job gets the cluster's default.

    ## Example
    `#SBATCH --time=24h`, `#SBATCH --mem=64 GB`, `#SBATCH --ntask-per-node=1`.

    ## Fix
    The finding says what to change.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html; sbatch: "This does not look like a batch script. The first line must start
    with #! followed by the path to an interpreter."
    """
    for slip in job.slips:
        yield Finding(path=job.path, line=slip.line, message=slip.message, help=slip.help)


@rule("SLM012", "variable-in-a-directive", severity="warning")
def variable_in_a_directive(job: JobScript) -> Iterator[Finding]:
    """An #SBATCH line contains a shell variable, which is not expanded.

    ## What it does
    Looks for `$NAME`, `$(…)` and backticks in directives.

    ## Why it is bad
    To the shell the line is a comment, and sbatch expands nothing but % patterns in file names: `--nodes=$NUM_NODES` is
    rejected, and `--output=$HOME/logs` refers to a folder called $HOME.

    ## Example
    `#SBATCH --nodes=$NUM_NODES`.

    ## Fix
    Write the value, or pass the option on the command line: `sbatch --nodes=$NUM_NODES job.sh`.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html: sbatch reads the options in the script, before any shell.
    """
    for line, name in job.variables_in_options:
        yield Finding(
            path=job.path,
            line=line,
            message=f"{name} in an #SBATCH line is literal text: sbatch does not expand variables",
            help="write the value, or pass the option to sbatch on the command line",
        )


@rule("SLM013", "rank-in-the-batch-shell", severity="warning")
def rank_in_the_batch_shell(job: JobScript) -> Iterator[Finding]:
    """The batch script sets one rank for all processes.

    ## What it does
    Looks for RANK, LOCAL_RANK, NODE_RANK, MACHINE_RANK, SLURM_PROCID and the like that are set outside the command that
    srun starts.

    ## Why it is bad
    The batch script runs once, on the first node: every process gets the same rank, and they wait for ranks that never
    start, or several take the same one.

    ## Example
    `export NODE_RANK=$SLURM_NODEID` above `srun torchrun --node_rank=$NODE_RANK …`: it is 0 on every node.

    ## Fix
    Set it inside the command that srun starts, `srun bash -c 'NODE_RANK=$SLURM_NODEID …'`, or use
    `--rdzv_backend=c10d`, which needs no ranks.

    ## Evidence
    https://slurm.schedmd.com/sbatch.html: "Slurm runs a single copy of the batch script on the first node".
    """
    for name, line in job.ranks:
        if job.nodes == 1 and job.launch is not None and not job.launch.srun:
            continue  # one process that starts the others, on one machine
        yield Finding(
            path=job.path,
            line=line,
            message=f"{name} is set in the batch script, which runs once: all processes get the same value",
            help="set it inside the command that srun starts, or let the launcher set ranks",
        )


@rule("SLM014", "python-behind-a-launcher", severity="error")
def python_behind_a_launcher(job: JobScript) -> Iterator[Finding]:
    """The launch command has `python` where the launcher expects the script.

    ## What it does
    Looks for `python` between torchrun, `accelerate launch` or deepspeed and the script.

    ## Why it is bad
    The launcher starts Python itself and treats the next word as a file: "can't open file 'python'".

    ## Example
    `torchrun --nproc_per_node=4 python train.py`.

    ## Fix
    Remove the word.

    ## Evidence
    https://docs.pytorch.org/docs/stable/elastic/run.html: `torchrun [options] script.py`; --no-python is for programs.
    """
    for word, line in job.stray:
        yield Finding(
            path=job.path,
            line=line,
            message=f"{word} is where the launcher expects the script; the launcher starts Python itself",
            help=f"remove {word}",
        )


@rule("SLM015", "no-bf16-on-the-node", severity="warning")
def no_bf16_on_the_node(job: JobScript) -> Iterator[Finding]:
    """The launch uses bf16, but the job requests GPUs that do not support it.

    ## What it does
    Compares the type of GPU in `--gres`, `--gpus` or `--constraint` with `--mixed_precision bf16` or `--bf16` of the
    launch.

    ## Why it is bad
    GPUs older than Ampere silently emulate bf16: a step takes many times as long.

    ## Example
    `#SBATCH --gres=gpu:v100:4` and `accelerate launch --mixed_precision bf16 train.py`.

    ## Fix
    Use fp16, or request Ampere or newer GPUs.

    ## Evidence
    A published report on LLM ranking on two T4 with "bf16 compute" took 16 seconds per iteration.
    """
    if job.bf16_line is None:
        return
    for name in ("gres", "gpus", "gpus-per-node", "gpus-per-task", "constraint"):
        match = re.search(OLD_GPUS, job.options.get(name, ""), re.IGNORECASE)
        if match:
            yield Finding(
                path=job.path,
                line=job.bf16_line,
                message=f"the launch uses bf16, but --{name} requests {match[0].upper()}, which emulates it",
                help="write fp16, or request Ampere or newer GPUs (A100, L4, H100)",
            )
            return


@rule("SLM016", "port-not-usable", severity="error")
def port_not_usable(job: JobScript) -> Iterator[Finding]:
    """The processes cannot open the master port.

    ## What it does
    Looks for MASTER_PORT, `--master_port`, `--main_process_port` or the port of `--rdzv_endpoint` below 1,024 or above
    65,535.

    ## Why it is bad
    The largest port is 65,535, and ports below 1,024 are privileged: the first process stops at once, and the others
    wait for it until the timeout.

    ## Example
    `export MASTER_PORT=295000`.

    ## Fix
    Use a port from 1,024 to 65,535, such as 20,000 + job id modulo 20,000.

    ## Evidence
    ip(7): "The port numbers below 1024 are called privileged ports".
    """
    for name, port, line in ports(job):
        if port.isdecimal() and int(port) and not LOWEST_PORT <= int(port) <= HIGHEST_PORT:
            yield Finding(
                path=job.path,
                line=line,
                message=f"{name} is {port}, but a job can only open ports from {LOWEST_PORT:,} to {HIGHEST_PORT:,}",
                help="write MASTER_PORT=$((20000 + SLURM_JOB_ID % 20000))",
            )


@rule("SLM029", "unquoted-version", severity="warning")
def unquoted_version(job: JobScript) -> Iterator[Finding]:
    """The shell reads a version specifier as a redirection.

    ## What it does
    Looks for unquoted `>` and `<` in the packages of `pip install`.

    ## Why it is bad
    The shell splits the word there: pip gets only the name and installs any release, and its output goes to a file
    called `=0.43`. With `<` the command stops if there is no such file.

    ## Example
    `pip install bitsandbytes>=0.43`.

    ## Fix
    Quote the requirement: `pip install "bitsandbytes>=0.43"`.

    ## Evidence
    A published function-calling project installed an old bitsandbytes this way. Bash's manual, "Redirections".
    """
    for install in job.installs:
        if install.redirected:
            effect = (
                "reads it" if "<" in install.text else f"writes it, and pip installs any release of {install.written}"
            )
            yield Finding(
                path=job.path,
                line=install.line,
                message=f"the shell treats {install.redirected} in {install.text} as a file: it {effect}",
                help=f'write "{install.text}"',
            )


@rule("SLM030", "gpus-miscounted", severity="error")
def gpus_miscounted(job: JobScript) -> Iterator[Finding]:
    """A command that should count the GPUs returns something else.

    ## What it does
    Looks for `nvidia-smi -L | wc` without `-l`, and for `nvidia-smi --format=csv | wc -l` with the header line.

    ## Why it is bad
    `wc` prints three numbers: the launcher uses the first and passes the others to the script as arguments. A header
    line starts one process too many, which finds no GPU.

    ## Example
    `NUM_GPUS=$(nvidia-smi -L | wc)`.

    ## Fix
    Use `$SLURM_GPUS_ON_NODE`, or `nvidia-smi -L | wc -l`.

    ## Evidence
    A published function-calling project had to fix how its job counted GPUs. wc(1): "Print newline, word, and byte
    counts".
    """
    for command, reason, line in job.miscounts:
        yield Finding(
            path=job.path,
            line=line,
            message=f"{command} does not print the number of GPUs: {reason}",
            help="write nvidia-smi -L | wc -l, or $SLURM_GPUS_ON_NODE",
        )


@rule("SLM031", "argument-the-script-lacks", severity="error")
def argument_the_script_lacks(job: JobScript) -> Iterator[Finding]:
    """The launch passes an argument that the script does not accept.

    ## What it does
    Compares the arguments after the script with the options of its `ArgumentParser`, if the script is beside the job
    script and all arguments are literal.

    ## Why it is bad
    argparse stops every process with "unrecognized arguments", after the job has waited for its GPUs.

    ## Example
    `torchrun train.py --metrics_port 9400` where `train.py` has no such option.

    ## Fix
    Remove the argument, or add it to the script's parser.

    ## Evidence
    A published function-calling project documented metrics ports that none of its parsers defined.
    """
    for name, script, line in job.lacking:
        yield Finding(
            path=job.path,
            line=line,
            message=f"{script} has no --{name}: its parser stops with an error",
            help=f"remove --{name}, or add it to the parser of {script}",
        )
