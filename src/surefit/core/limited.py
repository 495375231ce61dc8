"""Runs a function in a process of its own, with a limit on processor time and memory.

Chat templates and tokenizers are programs of somebody else: one can loop for minutes inside a single library call,
exhaust the memory, or end the process. One that is not known to be harmless is tried here first, on a few short texts.
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
"""Limit on processor time in seconds; Python's own start is added."""
MEMORY = 3 * GIB
"""Limit on address space in bytes: a tokenizer with a vocabulary of 250,000 tokens needs 1 GB of it while it is
loaded.
"""
CLOCK = 5
"""Wall-clock seconds for each second of processor time: a busy machine must not change the outcome."""
START = 1
_STARTED = "surefit: started, bytes of memory: "
_SECRET = re.compile(r"token(?!izers)|key|secret|passw|credential|auth", re.IGNORECASE)
"""Names of environment variables that the process does not get. It gets the others: LD_LIBRARY_PATH, for one, is the
location of Python's own library.
"""

# A limit that a shell or a scheduler has already set cannot be raised.
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
    """The function exceeded its time or memory, or ended its process; the text states which.

    Attributes:
        ended: whether it ended its process by itself.
    """

    def __init__(self, reason: str, *, ended: bool = False) -> None:
        super().__init__(reason)
        self.ended = ended


class TrialNotRun(Exception):
    """The process failed before it called the function, so nothing is known about the function; the text states why."""


def run_limited(function: str, *arguments: Any, memory: int = MEMORY) -> Any:
    """Call a function in a fresh process and return its result.

    Args:
        function: `module:name` of a function with JSON arguments and result.
        arguments: the function's arguments.
        memory: limit on address space in bytes.

    Raises:
        ExceedsLimit: with the reason in a few words.
        TrialNotRun: the process could not be started, or failed before the call.
    """
    seconds = SECONDS + START
    job = {
        "function": function, "arguments": arguments, "path": sys.path, "started": _STARTED,
        "limits": {"CORE": 0, "AS": memory, "CPU": seconds},
    }  # fmt: skip
    variables = {name: value for name, value in env.env_without_safepath().items() if not _SECRET.search(name)}
    try:
        process = subprocess.run(
            [sys.executable, "-I", "-c", _CHILD], input=json.dumps(job), capture_output=True, text=True,
            timeout=CLOCK * seconds, errors="replace", check=False,
            env={**variables, "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        status, stdout, stderr = process.returncode, process.stdout, process.stderr
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        status, stdout, stderr = -9, output if isinstance(output, str) else output.decode(errors="replace"), ""
    except OSError as error:
        raise TrialNotRun(str(error)) from None
    last_line = (stderr.strip().splitlines() or ["the process ended"])[-1][:200]
    if not stdout.startswith(_STARTED):
        raise TrialNotRun(last_line)
    applied, _, answer = stdout.removeprefix(_STARTED).partition("\n")
    if status in (-24, -9):  # SIGXCPU, or SIGKILL at the hard limit
        raise ExceedsLimit(f"took more than {SECONDS} s")
    if status != 0:
        if "MemoryError" in stderr or "memory allocation" in stderr:
            raise ExceedsLimit(f"took more than {bytes_text(int(applied))} of memory")
        raise ExceedsLimit(last_line, ended=True)
    return json.loads(answer)
