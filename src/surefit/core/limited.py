"""Tries a function in a process of its own, with a limit on processor time and memory.

Chat templates and tokenizers are programs of somebody else: one can loop for minutes inside a single call of a library,
take all memory, or end the process. What has not been judged plain is tried here first, on a few short texts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from surefit.core.units import GIB

SECONDS = 2
"""Of processor time; Python's own start is added."""
MEMORY = 3 * GIB
"""Of address space: a tokenizer with a vocabulary of 250,000 tokens takes 1 GB of it while it is read."""
CLOCK = 5
"""Seconds by the clock for each second of processor time: a busy machine must not change the outcome."""
START = 1

_CHILD = """
import importlib, json, resource, sys
given = json.load(sys.stdin)
sys.path[:] = given["path"]
module, _, name = given["function"].partition(":")
function = getattr(importlib.import_module(module), name)
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_AS, (given["memory"], given["memory"]))
resource.setrlimit(resource.RLIMIT_CPU, (given["seconds"], given["seconds"]))
answer = function(*given["arguments"])
sys.stdout.write(json.dumps(answer))
sys.stdout.flush()
import os
os._exit(0)
"""


class ExceedsLimit(Exception):
    """The function took more time or memory than it may, or ended its process; the text says which."""


def run_limited(function: str, *arguments: Any, seconds: int = SECONDS) -> Any:
    """Call a function in a fresh process and return its answer.

    Args:
        function: `module:name`; takes and returns what JSON can hold.
        arguments: for it.
        seconds: of processor time.

    Raises:
        ExceedsLimit: with the reason in a few words.
    """
    given = {
        "function": function, "arguments": arguments, "path": sys.path, "seconds": seconds + START, "memory": MEMORY,
    }  # fmt: skip
    command = [sys.executable, "-I", "-c", _CHILD]
    try:
        ended = subprocess.run(
            command, input=json.dumps(given), capture_output=True, text=True, timeout=CLOCK * (seconds + START),
            errors="replace", check=False, env={"TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise ExceedsLimit(f"takes more than {seconds} s") from None
    if ended.returncode in (-24, -9):  # SIGXCPU, or SIGKILL at the hard limit
        raise ExceedsLimit(f"takes more than {seconds} s")
    if ended.returncode != 0:
        last = (ended.stderr.strip().splitlines() or ["the process ended"])[-1]
        if "MemoryError" in ended.stderr or "memory allocation" in ended.stderr:
            last = f"takes more than {MEMORY // GIB} GiB of memory"
        raise ExceedsLimit(last[:200])
    return json.loads(ended.stdout)
