"""Tries a function in a process of its own, with a limit on processor time and memory.

Chat templates and tokenizers are programs of somebody else: one can loop for minutes inside a single call of a library,
take all memory, or end the process. What has not been judged plain is tried here first, on a few short texts.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

from surefit.core import env
from surefit.core.units import GIB, bytes_text

SECONDS = 2
"""Of processor time; Python's own start is added."""
MEMORY = 3 * GIB
"""Of address space: a tokenizer with a vocabulary of 250,000 tokens takes 1 GB of it while it is read."""
CLOCK = 5
"""Seconds by the clock for each second of processor time: a busy machine must not change the outcome."""
START = 1
_STARTED = "surefit: started, bytes of memory: "
_SECRET = re.compile(r"token(?!izers)|key|secret|passw|credential|auth", re.IGNORECASE)
"""Names of environment variables that the process is not handed. It gets the others: LD_LIBRARY_PATH says where
Python's own library is, for one."""

# A limit that is set already, by a shell or a scheduler, cannot be raised.
_CHILD = """
import importlib, json, resource, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
module, _, name = given["function"].partition(":")
function = getattr(importlib.import_module(module), name)
applied = {}
for kind in ("CORE", "AS", "CPU"):
    number = getattr(resource, "RLIMIT_" + kind)
    wanted, most = given["limits"][kind], resource.getrlimit(number)[1]
    applied[kind] = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(number, (applied[kind], applied[kind]))
sys.stdout.write(given["started"] + str(applied["AS"]) + "\\n")
sys.stdout.flush()
answer = function(*given["arguments"])
sys.stdout.write(json.dumps(answer))
sys.stdout.flush()
import os
os._exit(0)
"""


class ExceedsLimit(Exception):
    """The function took more time or memory than it may, or ended its process; the text says which.

    Attributes:
        ended: it ended its process by itself.
    """

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


class TrialNotRun(Exception):
    """The process did not get as far as the function, which says nothing about the function; the text says why."""


def run_limited(function: str, *arguments: Any, memory: int = MEMORY) -> Any:
    """Call a function in a fresh process and return its answer.

    Args:
        function: `module:name`; takes and returns what JSON can hold.
        arguments: for it.
        memory: bytes of address space.

    Raises:
        ExceedsLimit: with the reason in a few words.
        NotTried: no process can be started here.
    """
    seconds = SECONDS + START
    given = {
        "function": function, "arguments": arguments, "path": sys.path, "started": _STARTED,
        "limits": {"CORE": 0, "AS": memory, "CPU": seconds},
    }  # fmt: skip
    variables = {name: value for name, value in env.env_without_safepath().items() if not _SECRET.search(name)}
    try:
        ended = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD], input=json.dumps(given), capture_output=True, text=True,
            timeout=CLOCK * seconds, errors="replace", check=False,
            env={**variables, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        status, said, complaint = ended.returncode, ended.stdout, ended.stderr
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        status, said, complaint = -9, output if isinstance(output, str) else output.decode(errors="replace"), ""
    except OSError as error:
        raise TrialNotRun(str(error)) from None
    last = (complaint.strip().splitlines() or ["the process ended"])[-1][:200]
    if not said.startswith(_STARTED):
        raise TrialNotRun(last)
    applied, _, answer = said.removeprefix(_STARTED).partition("\n")
    if status in (-24, -9):  # SIGXCPU, or SIGKILL at the hard limit
        raise ExceedsLimit(f"takes more than {SECONDS} s")
    if status != 0:
        if "MemoryError" in complaint or "memory allocation" in complaint:
            raise ExceedsLimit(f"takes more than {bytes_text(int(applied))} of memory")
        raise ExceedsLimit(last, ended=True)
    return json.loads(answer)
