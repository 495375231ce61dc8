"""The resources that a SLURM batch script requests, and the processes that it launches.

The script is only read, never run: a number that the shell would compute from anything but the script itself and
SLURM's own variables is not known. https://slurm.schedmd.com/sbatch.html
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from surefit.core.errors import ConfigError
from surefit.facts.installs import Install, installs_in
from surefit.facts.sbatch_syntax import LETTERS, SyntaxFault, find_syntax_faults, variables_in
from surefit.facts.setup import SettingLocation, Setup
from surefit.facts.shell import MISCOUNTS_GPUS, Command, Shell, options_alone, split_commands

MAX_BYTES = 200_000
"""Bytes of a script that are read; no batch script is larger."""
_DIRECTIVE = re.compile(r"#SBATCH\s+(.+)")
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "torchrun": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed": "deepspeed",
}
RANKS = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "MACHINE_RANK",
    "GROUP_RANK",
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
)
COMMANDS = {
    "llamafactory-cli": ("train",),
    "llamafactory": ("train",),
    "lmf": ("train",),
    "axolotl": ("train",),
    "swift": ("sft", "pt", "rlhf"),
    "megatron": ("sft", "pt"),
    "tune": ("run",),
    "trl": ("sft", "dpo", "kto", "grpo", "rloo", "reward"),
    "xtuner": ("train",),
    "colossalai": ("run",),
}
"""Training tools → the subcommands with which they start processes themselves."""
ON_EVERY_GPU = ("llamafactory-cli", "llamafactory", "lmf", "axolotl", "trl")
"""Training tools that start a process on each GPU they see, unless options or variables set another number."""
UNITS_MIB = {"K": 1 / 1024, "M": 1.0, "": 1.0, "G": 1024.0, "T": 1024.0**2}
"""Unit of memory, as sbatch writes it → MiB."""
TRAINING = re.compile(r"train|tun|sft|dpo|grpo|lora|rank", re.IGNORECASE)
"""Names of scripts that train."""
_TALKS = {"echo", "printf", "which", "type", "pip", "pip3", "conda", "mamba", "module", "sbatch"}
_STARTERS = {"srun", "mpirun", "mpiexec", "ssh", "pdsh", "clush", "deepspeed", "ray"}


@dataclass(frozen=True)
class Launch:
    """One command that starts the processes of a run. Numbers are None where they are only known when it runs.

    Attributes:
        tool: torchrun, accelerate, deepspeed, a training tool of its own (`COMMANDS`), or python.
        line: line number, 1-based.
        srun: whether srun starts it, once per task; otherwise it starts once, on the first node.
        tasks_per_node: times that it starts on each node.
        processes: processes over all machines, as `accelerate launch --num_processes` counts.
        processes_per_machine: processes started by each start of the command.
        machines: number of machines that its options give.
        flags: its own options, without dashes and with underscores → value; "" for a switch.
        lines: flag → line.
        script: the Python file or module it runs, or the config that a training tool is given.
        arguments: the script's own options, as `flags`.
    """

    tool: str
    line: int
    srun: bool = False
    tasks_per_node: int | None = 1
    processes: int | None = None
    processes_per_machine: int | None = None
    machines: int | None = None
    flags: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    script: str | None = None
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def multiplied(self) -> bool:
        """Return whether several tasks on a node start a launcher each, and each launcher starts several processes."""
        several = (self.tasks_per_node or 0) > 1 and (self.processes_per_machine or 0) > 1
        return self.srun and several and self.tool != "python"

    @property
    def per_node(self) -> int | None:
        """Processes on each node, over all starts of the command."""
        if self.tasks_per_node is None or self.processes_per_machine is None:
            return None
        return self.tasks_per_node * self.processes_per_machine


@dataclass(frozen=True)
class JobScript:
    """A batch script. Numbers are None where the script leaves them to the cluster or to the command line.

    Attributes:
        path: the file.
        options: its #SBATCH options, by long name → value; "" for a switch.
        lines: option → line.
        nodes, tasks_per_node, gpus_per_node: the numbers that follow from the options.
        cpus_per_node: processors for all tasks of a node.
        minutes: the time limit.
        launches: the commands that start training, in order.
        variables: shell variables that it sets to one constant value → (value, line).
        broken_continuations: lines whose last backslash is followed by a space or a comment.
        late_options: lines with an #SBATCH after the first command, where sbatch no longer reads them.
        dos_line_breaks: its lines end in \\r\\n.
        slips: directives that sbatch rejects or reads as comments.
        variables_in_options: (line, variable) of options with a shell variable.
        ranks: (variable, line) of ranks that the batch shell sets for all processes.
        stray: (word, line) of a `python` behind a launcher, which would read it as the script.
        bf16_line: line on which a launch enables bf16, in its own options or the script's.
        reaches_nodes: whether a command can start a process on another node: srun, mpirun, ssh…
        installs: the packages that it installs.
        miscounts: (part of the command, the mistake, line) of counts of GPUs that give a wrong number.
        lacking: (argument, script, line) of arguments that the launched script's parser does not have.
        spreads: whether the launched script uses several GPUs in one process.
        options_alone: (line, option) of lines that begin with an option and continue no other line.
        folders_made: the folders that the script makes, as written with its constants put in.
    """

    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    lines: Mapping[str, int] = field(default_factory=dict)
    nodes: int | None = None
    tasks_per_node: int | None = None
    gpus_per_node: int | None = None
    cpus_per_node: int | None = None
    minutes: float | None = None
    launches: tuple[Launch, ...] = ()
    variables: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    broken_continuations: tuple[int, ...] = ()
    late_options: tuple[int, ...] = ()
    dos_line_breaks: bool = False
    slips: tuple[SyntaxFault, ...] = ()
    variables_in_options: tuple[tuple[int, str], ...] = ()
    ranks: tuple[tuple[str, int], ...] = ()
    stray: tuple[tuple[str, int], ...] = ()
    bf16_line: int | None = None
    reaches_nodes: bool = False
    installs: tuple[Install, ...] = ()
    miscounts: tuple[tuple[str, str, int], ...] = ()
    lacking: tuple[tuple[str, str, int], ...] = ()
    spreads: bool = False
    options_alone: tuple[tuple[int, str], ...] = ()
    folders_made: tuple[str, ...] = ()

    @property
    def launch(self) -> Launch | None:
        """Command that trains: the first with a launcher, else with srun, else with a training script's name."""
        by_launcher = [launch for launch in self.launches if launch.tool != "python"]
        by_srun = [launch for launch in self.launches if launch.srun]
        by_name = [launch for launch in self.launches if TRAINING.search(launch.script or "")]
        return next(iter(by_launcher + by_srun + by_name), None)

    def line(self, *options: str) -> int | None:
        """Return the line of the first of these options that is set."""
        return next((self.lines[name] for name in options if name in self.lines), None)


def read_job_script(path: Path | str) -> JobScript:
    """Read a batch script.

    Raises:
        ConfigError: the file cannot be read. What is in it raises nothing.
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot be read: {error.strerror}", code="E2079", path=path, help="name a batch script"
        ) from None
    text = raw.decode("utf-8", errors="replace")
    commands, broken = split_commands(text)
    options, lines, late_lines = _options(text, commands)
    nodes = _nodes(options)
    tasks = _tasks_per_node(options, nodes)
    gpus = _gpus_per_node(options, nodes, tasks)
    shell = Shell(_slurm_variables(options, nodes, tasks, gpus), gpus)
    for command in commands:
        shell.assign(command)
    expanded = [shell.expand(command) for command in commands]
    launches = (_launch(command, nodes, tasks, gpus, shell) for command in expanded)
    return JobScript(
        path=str(path),
        options=options,
        lines=lines,
        nodes=nodes,
        tasks_per_node=tasks,
        gpus_per_node=gpus,
        cpus_per_node=_cpus_per_node(options, tasks, gpus),
        minutes=minutes_of(options.get("time", "")),
        launches=tuple(launch for launch in launches if launch),
        variables=shell.constants,
        broken_continuations=broken,
        late_options=late_lines,
        dos_line_breaks="\r\n" in text,
        slips=tuple(find_syntax_faults(text)) if "#SBATCH" in text else (),
        variables_in_options=tuple(variables_in(text)),
        ranks=tuple(_ranks(commands)),
        stray=tuple(word for command in expanded if (word := _stray(command))),
        bf16_line=next((line for command in expanded if (line := _bf16_line(command))), None),
        reaches_nodes=any(_STARTERS & set(command.words) for command in expanded),
        installs=tuple(installs_in(commands, shell)),
        miscounts=tuple(_miscounts(text)),
        options_alone=options_alone(text),
        folders_made=tuple(
            word
            for command in expanded
            if command.words[:1] == ("mkdir",)
            for word in command.words[1:]
            if word[0] != "-"
        ),
    )


def setup_of_job(script: JobScript) -> Setup:
    """Return the launch of a batch script as a `Setup`, the form that rules share.

    Where several tasks start a launcher each (`Launch.multiplied`), the number of processes is None: it is the script's
    mistake, and not what its author meant.
    """
    launch = script.launch or Launch("python", 0)
    flags = {"processes": "num_processes", "machines": "num_machines", "processes_per_machine": "num_processes"}
    if launch.tool == "torchrun":
        flags |= {"machines": "nnodes", "processes_per_machine": "nproc_per_node"}
    elif launch.tool == "deepspeed":
        flags |= {"machines": "num_nodes", "processes_per_machine": "num_gpus"}
    starts_itself = launch.tool in COMMANDS
    locations = {
        attribute: SettingLocation(
            launch.tool if starts_itself and flag not in launch.flags else f"--{flag}",
            script.path,
            launch.lines.get(flag, launch.line or None),
        )
        for attribute, flag in flags.items()
    }
    gpus = next((name for name in ("gpus-per-node", "gres", "gpus", "gpus-per-task") if name in script.options), "gpus")
    per_node, machines = None if launch.multiplied else launch.per_node, launch.machines
    return Setup(
        tool="slurm",
        places=locations | {"gpus": SettingLocation(f"--{gpus}", script.path, script.line(gpus))},
        processes=launch.processes,
        machines=machines,
        processes_per_machine=per_node,
        world_size=per_node * machines if per_node and machines else None,
        gpus=script.gpus_per_node,
        on_cpu=True if "cpu" in launch.flags or "use_cpu" in launch.flags else None,
        parallel="fsdp" if "use_fsdp" in launch.flags else None,
    )


def _options(text: str, commands: Sequence[Command]) -> tuple[dict[str, str], dict[str, int], tuple[int, ...]]:
    """Return the options, their lines, and the lines of options after the first command, which come too late."""
    first = min((command.line for command in commands), default=None)
    options: dict[str, str] = {}
    lines: dict[str, int] = {}
    late_lines = []
    for number, line in enumerate(text.splitlines(), 1):
        directive = _DIRECTIVE.match(line)
        if directive and first is not None and number > first:
            late_lines.append(number)
        elif directive:
            for name, value in _flags(re.sub(r"\s#.*", "", directive[1]).replace('"', "").split(), LETTERS):
                options[name.replace("_", "-")] = value
                lines[name.replace("_", "-")] = number
    return options, lines, tuple(late_lines)


def _ranks(commands: Sequence[Command]) -> Iterator[tuple[str, int]]:
    """Yield ranks that the script sets outside the command that uses them: every process would get the same rank."""
    for command in commands:
        for rank in re.finditer(rf"(?:^|\s)({'|'.join(RANKS)})=(\S*)", command.text):
            outside = re.match(r"(?:export\s+)?\w+=", command.text)
            if outside and not re.search(r"\s(srun|torchrun|python|accelerate)\b", command.text):
                yield rank[1], command.line
        launch = re.match(r"(srun|mpirun)\b", command.text)
        quoted = re.sub(r"'[^']*'", "", command.text)
        for rank in re.finditer(r"--(\w+_rank)[ =]\"?(?<!\\)\$\{?(SLURM_PROCID|SLURM_NODEID|SLURM_LOCALID)\b", quoted):
            if launch:
                yield f"--{rank[1]} ${rank[2]}", command.line_of(rank[1])


def _bf16_line(command: Command) -> int | None:
    """Return the line on which a launch enables bf16."""
    if _launcher(command.words)[0] is None:
        return None
    text = " ".join(command.words)
    if re.search(r"--mixed[_-]precision[ =]bf16\b", text):
        return command.line_of("mixed_precision")
    return command.line_of("bf16") if re.search(r"--bf16(?![_\w])(?![ =](false|False|0)\b)", text) else None


def _miscounts(text: str) -> Iterator[tuple[str, str, int]]:
    for number, line in enumerate(text.splitlines(), 1):
        for pattern, mistake in MISCOUNTS_GPUS if not line.lstrip().startswith("#") else ():
            if miscount := pattern.search(line):
                yield miscount[0].rstrip(")`"), mistake, number


def _stray(command: Command) -> tuple[str, int] | None:
    """Return a `python` where a launcher expects the script, with its line."""
    tool, start = _launcher(command.words)
    if tool not in ("torchrun", "accelerate", "deepspeed"):
        return None
    for i, word in enumerate(command.words[start:]):
        if word.endswith(".py") or word in ("-m", "--module", "--no_python", "--no-python"):
            return None
        if re.fullmatch(r"(\S*/)?python[\d.]*", word) and not command.words[start + i - 1].startswith("--python"):
            return word, command.line_of_word(word)
    return None


def _flags(words: Sequence[str], short: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield (name with underscores, value) of `--name=value`, `--name value`, `-N value` and `-Nvalue`."""
    for i, word in enumerate(words):
        following = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else ""
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            yield name.replace("-", "_"), value if equals else following
        elif word.startswith("-") and word[1:2] in short:
            yield short[word[1]].replace("-", "_"), word[2:].removeprefix("=") or following


def _number(text: str | None) -> int | None:
    """Parse a plain count; None for ranges, expressions and missing text."""
    return int(text) if text and re.fullmatch(r"\d{1,7}", text) else None


def _per_node(total: int | None, nodes: int | None) -> int | None:
    """Return each node's part of a total; None where the nodes do not divide it, or one of them is not known."""
    return total // nodes if total and nodes and total % nodes == 0 else None


def _count(text: str | None) -> int | None:
    """Return the number in `4` or `a100:4`."""
    return _number((text or "").rpartition(":")[2])


def _gres(text: str) -> int | None:
    """Return the number of GPUs among generic resources (GRES).

    >>> _gres("gpu:4"), _gres("gpu:a100:2,nvme:1"), _gres("gpu:a100"), _gres("nvme:1")
    (4, 2, 1, None)
    """
    for part in text.split(","):
        gpu = re.fullmatch(r"gpu(?::(?!\d+$)[\w.-]+)?(?::(\d{1,7}))?", part.split("(")[0].strip())
        if gpu:
            return int(gpu[1] or 1)
    return None


def _nodes(options: Mapping[str, str]) -> int | None:
    if "nodes" in options:
        return _number(options["nodes"])
    tasks, per_node = _number(options.get("ntasks")), _number(options.get("ntasks-per-node"))
    if tasks and per_node:
        return -(-tasks // per_node)
    return 1 if "ntasks" not in options or tasks == 1 else None


def _tasks_per_node(options: Mapping[str, str], nodes: int | None) -> int | None:
    if "ntasks-per-node" in options:
        return _number(options["ntasks-per-node"])
    if "ntasks" in options:
        return _per_node(_number(options["ntasks"]), nodes)
    derived_options = {"ntasks-per-gpu", "gpus-per-task", "ntasks-per-socket", "ntasks-per-core"} & set(options)
    return None if derived_options else 1


def _gpus_per_node(options: Mapping[str, str], nodes: int | None, tasks: int | None) -> int | None:
    if "gpus-per-node" in options:
        return _count(options["gpus-per-node"])
    if "gres" in options:
        return _gres(options["gres"])
    if "gpus" in options:
        return _per_node(_count(options["gpus"]), nodes)
    per_task = _count(options.get("gpus-per-task"))
    return per_task * tasks if per_task and tasks else None


def _cpus_per_node(options: Mapping[str, str], tasks: int | None, gpus: int | None) -> int | None:
    per_task, per_gpu = _number(options.get("cpus-per-task")), _number(options.get("cpus-per-gpu"))
    if "exclusive" in options:
        return None
    if per_task and tasks:
        return per_task * tasks
    return per_gpu * gpus if per_gpu and gpus else None


def memory_mib(script: JobScript) -> float | None:
    """Return the memory that a job requests on each node, in MiB; None where it states none, or requests all of it.

    A number without a unit is in MiB.
    """
    for name, count in (
        ("mem", 1),
        ("mem-per-cpu", script.cpus_per_node or script.tasks_per_node or 1),
        ("mem-per-gpu", script.gpus_per_node),
    ):
        size = re.fullmatch(r"(\d{1,12}(?:\.\d{1,9})?)([KMGT]?)B?", script.options.get(name, ""), re.IGNORECASE)
        if size and count:
            return float(size[1]) * UNITS_MIB[size[2].upper()] * count or None
    return None


def minutes_of(text: str) -> float | None:
    """Parse a SLURM time to minutes: minutes, min:s, h:min:s, d-h, d-h:min or d-h:min:s.

    >>> minutes_of("90"), minutes_of("1:30:00"), minutes_of("2-12"), minutes_of("UNLIMITED")
    (90.0, 90.0, 3600.0, None)
    """
    parsed = re.fullmatch(r"(?:(\d{1,4})-)?(\d{1,6})(?::(\d{1,4}))?(?::(\d{1,4}))?", text)
    if not parsed:
        return None
    days, *clock = parsed.groups()
    first, second, third = (int(part or 0) for part in clock)
    if days is not None:
        return int(days) * 1440 + first * 60 + second + third / 60
    return first * 60 + second + third / 60 if clock[2] is not None else first + second / 60


def _slurm_variables(
    options: Mapping[str, str], nodes: int | None, tasks: int | None, gpus: int | None
) -> dict[str, str]:
    """Return the variables that SLURM sets in the job, where the script determines them."""
    total = tasks * nodes if tasks and nodes else None
    values: dict[str, int | str | None] = {
        "SLURM_NNODES": nodes,
        "SLURM_JOB_NUM_NODES": nodes,
        "SLURM_NTASKS": total,
        "SLURM_NPROCS": total,
        "SLURM_NTASKS_PER_NODE": _number(options.get("ntasks-per-node")),
        "SLURM_CPUS_PER_TASK": _number(options.get("cpus-per-task")),
        "SLURM_GPUS_ON_NODE": gpus,
        "SLURM_GPUS_PER_NODE": _number(options.get("gpus-per-node")),
        "SLURM_GPUS": _number(options.get("gpus")),
    }
    return {name: str(value) for name, value in values.items() if value is not None}


def _launch(command: Command, nodes: int | None, tasks: int | None, gpus: int | None, shell: Shell) -> Launch | None:
    """Return the launch in a command whose variables were put in, or None."""
    words = command.words
    if not words or words[0] in _TALKS:
        return None
    tool, start = _launcher(words)
    if tool is None:
        return None
    own_words, script = _own_words(words[start:], tool)
    flags = dict(_flags(own_words, {}))
    names = [word.rpartition("/")[2] for word in words[:start]]
    arguments = dict(_flags(_behind(words[start:], script), {})) if script and script not in own_words else {}
    launch = Launch(
        tool,
        command.line,
        srun="srun" in names,
        flags=flags,
        lines={flag: command.line_of(flag) for flag in (*flags, *arguments)},
        script=script,
        arguments=arguments,
    )
    if launch.srun:
        srun_options = dict(_flags(words[names.index("srun") + 1 : start], LETTERS))
        launch = replace(
            launch, tasks_per_node=_srun_tasks(srun_options, _number(srun_options.get("nodes")) or nodes, tasks)
        )
    return _counted(launch, nodes, gpus, shell)


def _behind(words: tuple[str, ...], script: str | None) -> tuple[str, ...]:
    """Return the words behind the script, up to a redirection."""
    following = words[words.index(script) + 1 :] if script in words else ()
    end = next((i for i, word in enumerate(following) if re.match(r"\d?>|<|&|\|", word)), len(following))
    return following[:end]


def _launcher(words: tuple[str, ...]) -> tuple[str | None, int]:
    """Return (tool, index of the first word after the launcher)."""
    for i, word in enumerate(words):
        name = word.rpartition("/")[2]
        following = words[i + 1] if i + 1 < len(words) else ""
        if name == "torchrun":
            return "torchrun", i + 1
        if name == "accelerate" and following == "launch":
            return "accelerate", i + 2
        if name == "deepspeed" and any(argument.endswith(".py") for argument in words[i + 1 :]):
            return "deepspeed", i + 1
        if following in COMMANDS.get(name, ()):
            return name, i + 2
        if re.fullmatch(r"python[\d.]*", name):
            return _python(words, i + 1)
    return None, 0


def _python(words: tuple[str, ...], start: int) -> tuple[str | None, int]:
    """Return `_launcher`'s result for the words behind `python`: `python -m torch.distributed.run` is torchrun."""
    arguments = words[start:]
    module = arguments[arguments.index("-m") + 1] if "-m" in arguments[:-1] else ""
    if module in _MODULES:
        return _MODULES[module], start + arguments.index("-m") + 2
    script = next((word for word in arguments if not word.startswith("-")), "")
    return ("python", start) if module or script.endswith(".py") else (None, 0)


def _own_words(words: tuple[str, ...], tool: str) -> tuple[tuple[str, ...], str | None]:
    """Return the launcher's own options, and the script it runs; the words after that are the script's."""
    for i, word in enumerate(words):
        if word in ("-m", "--module") and i + 1 < len(words):
            return words[:i], words[i + 1]
        if word.endswith(".py"):
            return (() if tool == "python" else words[:i]), word
    if tool in COMMANDS:
        return words, next((word for word in words if word.endswith((".yaml", ".yml", ".json"))), None)
    return words, None


def _srun_tasks(asked: Mapping[str, str], nodes: int | None, tasks: int | None) -> int | None:
    """Return the tasks that one srun starts on each node: its own options precede the job's."""
    if "ntasks_per_node" in asked:
        return _number(asked["ntasks_per_node"])
    if "ntasks" in asked:
        return _per_node(_number(asked["ntasks"]), nodes)
    return tasks


def _counted(launch: Launch, nodes: int | None, gpus: int | None, shell: Shell) -> Launch:
    """Return the launch with its numbers of processes, from the options and the launcher's documented defaults."""
    flags = launch.flags
    if launch.tool == "python":
        return replace(launch, processes_per_machine=1, machines=nodes if launch.srun else 1)
    if launch.tool == "torchrun":
        count = flags.get("nproc_per_node", "1")
        per_machine = gpus if count in ("gpu", "auto") else _number(count)
        return replace(launch, processes_per_machine=per_machine, machines=_number(flags.get("nnodes", "1")))
    if launch.tool == "deepspeed":
        return replace(
            launch, processes_per_machine=_number(flags.get("num_gpus")), machines=_number(flags.get("num_nodes"))
        )
    if launch.tool in COMMANDS:
        return _counted_by_tool(launch, gpus, shell)
    machines = _number(flags.get("num_machines", None if "config_file" in flags else "1"))
    processes = _number(flags.get("num_processes"))
    per_machine = processes // machines if processes and machines else None
    return replace(launch, processes=processes, machines=machines, processes_per_machine=per_machine)


def _counted_by_tool(launch: Launch, gpus: int | None, shell: Shell) -> Launch:
    """Return the launch with the processes that a training tool starts: by its options, its variables, or the GPUs.

    LLaMA-Factory, launcher.py: torchrun with NPROC_PER_NODE processes, or one for each device where there are several,
    on NNODES machines. ms-swift and XTuner start torchrun where NPROC_PER_NODE is set.
    """
    flags = launch.flags
    if "USE_RAY" in shell.assigned or flags.get("launcher") == "python":
        return launch
    count = flags.get("nproc_per_node") or flags.get("num_processes")
    if count is None and "NPROC_PER_NODE" in shell.assigned:
        count = shell.assigned["NPROC_PER_NODE"][0] or ""
    if count is not None:
        per_machine = gpus if count in ("gpu", "auto") else _number(count)
    else:
        per_machine = gpus if launch.tool in ON_EVERY_GPU else 1
    nodes = shell.assigned.get("NNODES", ("1", 0))[0] if "nnodes" not in flags else flags["nnodes"]
    return replace(launch, processes_per_machine=per_machine, machines=_number(nodes))
