"""Faults in the #SBATCH lines of a script, by sbatch's own syntax.

https://slurm.schedmd.com/sbatch.html. The shell does not read these lines: nothing in them is expanded but the patterns
of file names (%j, %x…).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from surefit.core.errors import did_you_mean


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPTIONS = _set("""
    account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment constraint container
    container-id contiguous core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot
    dependency distribution error exclude exclusive export export-file extra extra-node-info get-user-env gid
    gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs
    input job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu
    mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks ntasks-per-core ntasks-per-gpu
    ntasks-per-node ntasks-per-socket open-mode output overcommit oversubscribe parsable partition power prefer
    priority profile propagate qos quiet reboot requeue reservation resv-ports segment signal sockets-per-node
    spread-job stepmgr switches test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid
    use-min-nodes verbose wait wait-all-nodes wckey wrap
""")
COUNTS = _set("""
    cpus-per-task ntasks ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket cpus-per-gpu mincpus
""")
"""Options whose value is a whole number above 0."""
LETTERS = dict(
    pair.split("=")
    for pair in _set("""
    N=nodes n=ntasks c=cpus-per-task G=gpus t=time o=output e=error J=job-name p=partition A=account a=array
    q=qos C=constraint D=chdir d=dependency w=nodelist x=exclude L=licenses M=clusters m=distribution i=input
    b=begin B=extra-node-info S=core-spec k=no-kill s=oversubscribe H=hold O=overcommit Q=quiet v=verbose W=wait
    h=help V=version F=nodefile
""")
)
"""One-letter options → their long names."""
TIME = re.compile(r"\d+(:\d{1,2}(:\d{1,2})?)?|\d+-\d{1,2}(:\d{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE)
MEMORY = re.compile(r"\d+(\.\d+)?([KMGT]B?)?", re.IGNORECASE)
NODES = re.compile(r"\d+([kKmM])?(-\d+([kKmM])?)?(:\d+)?|\d+(,\d+)*")
GRES = re.compile(r"[A-Za-z_][\w/]*(:[\w.+-]+){0,3}(\([^)]*\))?")
GPUS = re.compile(r"([A-Za-z][\w.-]*:)?\d+(,[A-Za-z][\w.-]*:\d+)*")


@dataclass(frozen=True)
class SyntaxFault:
    """One line that sbatch rejects or reads differently than intended: the fault and what to write."""

    line: int
    message: str
    help: str


def find_syntax_faults(text: str) -> Iterator[SyntaxFault]:
    """Yield every directive that sbatch rejects, and lines that were intended as one."""
    lines = text.splitlines()
    if not lines or not lines[0].startswith("#!"):
        first = lines[0] if lines else ""
        yield SyntaxFault(
            1,
            "the first line is not a shebang, so sbatch rejects the script"
            + (f": {first.strip()[:40]}" if first.strip() else ""),
            "write #!/bin/bash as the first line",
        )
    elif not re.match(r"#!\s*/\S+", lines[0]):
        yield SyntaxFault(1, f"{lines[0].strip()[:40]} does not name a program by its path", "write #!/bin/bash")
    for number, line in enumerate(lines, 1):
        directive = re.match(r"\s*#\s*(SBATCH|sbatch|Sbatch|SBACTH|SBTACH|SBATH|SBACH)\b\s*(-.*)?$", line)
        if directive and not line.startswith("#SBATCH") and directive[2] and not line.lstrip().startswith("##"):
            yield SyntaxFault(
                number, f"{line.strip()[:40]} is a comment to sbatch", "write #SBATCH at the start of the line"
            )
        elif re.match(r"#SBATCH[-=:\w]", line):
            yield SyntaxFault(number, f"{line.strip()[:40]} is a comment to sbatch", "put a space after #SBATCH")
        elif line.startswith("#SBATCH"):
            yield from _directive(number, _without_comment(line[len("#SBATCH") :]).strip())


def _without_comment(text: str) -> str:
    """Return a directive without its comment: a # behind a space, outside of quotes."""
    quote = ""
    for position, letter in enumerate(text):
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif letter == "#" and not quote and text[position - 1 : position].isspace():
            return text[:position]
    return text


def variables_in(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, variable) of directives with a shell variable, which sbatch reads as plain text."""
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#SBATCH"):
            continue
        # A variable in single quotes is intended as plain text.
        unquoted = re.sub(r"'[^']*'", "", _without_comment(line[len("#SBATCH") :]))
        match = re.search(r"(\$\{?\w+\}?|\$\(|`)", unquoted)
        if match:
            yield number, match[1]


def _directive(number: int, text: str) -> Iterator[SyntaxFault]:
    if not text:
        yield SyntaxFault(number, "this #SBATCH has no option", "write one, or remove the line")
        return
    if not text.startswith("-"):
        word = text.split()[0]
        name = word.partition("=")[0]
        yield SyntaxFault(
            number,
            f"{word[:40]} is not an option of sbatch",
            f"write --{name}" if name in OPTIONS else "begin it with --",
        )
        return
    words = _words(text)
    for i, word in enumerate(words):
        if re.match(r"-\w{2,}=?", word) and not word.startswith("--") and word[1:].partition("=")[0] in OPTIONS:
            yield SyntaxFault(number, f"{word[:40]} has one dash", f"write -{word}")
        elif word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if equals and value and i + 1 < len(words) and not words[i + 1].startswith("-"):
                yield SyntaxFault(
                    number, f"{words[i + 1][:40]} follows the value of --{name}", "write it without spaces"
                )
            following = words[i + 1] if i + 1 < len(words) and not words[i + 1].startswith("-") else ""
            yield from _option(number, name, value if equals else following, spaced=bool(equals) and not value)
        elif word[1:2] in LETTERS and i == 0:
            value = word[2:].removeprefix("=") or (words[1] if len(words) > 1 else "")
            yield from _option(number, LETTERS[word[1]], value)


def _words(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.replace('"', "").replace("'", "").split()


def _option(number: int, name: str, value: str, spaced: bool = False) -> Iterator[SyntaxFault]:
    if name not in OPTIONS:
        candidates = [option for option in OPTIONS if option.startswith(name)]
        if len(candidates) != 1:  # getopt accepts an unambiguous beginning
            hint = did_you_mean(name, sorted(OPTIONS)) or did_you_mean(name.replace("_", "-"), sorted(OPTIONS))
            yield SyntaxFault(number, f"sbatch has no option --{name}{hint}", "correct its name")
        return
    if spaced:
        yield SyntaxFault(number, f"--{name}= has no value", f"write --{name}=VALUE without a space")
    elif value and "$" not in value and (problem := _wrong(name, value)):
        yield SyntaxFault(number, f"--{name}={value}: {problem}", "sbatch rejects it, or reads it as something else")


def _wrong(name: str, value: str) -> str | None:
    """Return the required form of an option's value, or None where the value has it."""
    if name in ("time", "time-min"):
        parts = re.split(r"[-:]", value)
        if not TIME.fullmatch(value):
            return "a time is minutes, hours:minutes:seconds or days-hours:minutes:seconds"
        too_large = [part for part in parts[-2:] if value.count(":") and part.isdecimal() and int(part) > 59]
        return "minutes and seconds go up to 59" if too_large and value.count(":") == 2 else None
    if name in ("mem", "mem-per-cpu", "mem-per-gpu", "tmp"):
        return None if MEMORY.fullmatch(value) else "memory is a number followed by K, M, G or T"
    if name in COUNTS:
        return None if value.isdecimal() and int(value) > 0 else "a whole number above 0"
    if name == "nodes":
        return None if NODES.fullmatch(value) and not re.match(r"0+(\D|$)", value) else "a number of nodes, or a range"
    if name == "gres":
        parts = re.split(r",(?![^(]*\))", value)
        invalid = [part for part in parts if not GRES.fullmatch(part)]
        return "resources are written name:count or name:type:count" if invalid else None
    if name in ("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"):
        return None if GPUS.fullmatch(value) else "a number of GPUs, or type:number"
    if name == "signal":
        return None if re.fullmatch(r"([BR]{1,2}:)?(SIG)?[A-Z0-9]+(@\d+)?", value) else "a signal is written USR1@300"
    if name == "array":
        pattern = r"\d+(-\d+(:\d+)?)?(,\d+(-\d+(:\d+)?)?)*(%\d+)?"
        if not re.fullmatch(pattern, value):
            return "an array is written 0-9 or 1,3,5, with %4 for four at a time"
        spans = [re.match(r"(\d+)-(\d+)", part) for part in value.split(",")]
        backwards = next((span[0] for span in spans if span and int(span[1]) > int(span[2])), None)
        if backwards or re.search(r":0+(?:[,%]|$)|%0+$", value):
            return (
                f"{backwards} ends before it begins"
                if backwards
                else "the step and the number at a time must be above 0"
            )
        return None
    return None
