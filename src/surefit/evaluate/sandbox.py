"""Runs untrusted Python where it can do no harm, with tests that it cannot manipulate (docs/sandbox.md).

The program runs in its own process; the tests run in another one and only call it. Values are passed as plain data, so
the verdict depends only on what the program returns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from surefit.core.jail import Program, end_all, find_working_sandbox, run_program
from surefit.core.units import MIB

__all__ = [
    "MEMORY_BYTES",
    "TIMEOUT_S",
    "Program",
    "SandboxResult",
    "require_sandbox",
    "run_many",
    "run_python",
    "run_tests",
]

TIMEOUT_S = 10.0
MEMORY_BYTES = 512 * MIB
MAX_SOURCE = 50_000
"""Largest number of characters of a program; the longest solution of HumanEval and MBPP has 2,000. Parsing the worst
program of this length (one f-string) needs less than 2 s, and the time grows with the square of the length."""
Status = Literal["passed", "failed", "timeout", "memory"]


@dataclass(frozen=True)
class SandboxResult:
    """Outcome of a sandboxed program.

    Attributes:
        status: passed if the source (and the tests) ran to the end; timeout or memory if a limit ended it; failed
            otherwise.
        output: the first 64 KiB of the output.
        detail: the exception or the limit; empty if it passed.
    """

    status: Status
    output: str
    detail: str = ""


def run_python(source: str, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> SandboxResult:
    """Run untrusted source as a script. "passed" is the program's own claim: only `run_tests` judges.

    Args:
        timeout_s: seconds of processor time; three times that by the clock, so that a busy machine does not matter.
        memory_bytes: limit of the address space.

    Raises:
        MachineError: this machine supports no sandbox.
    """
    return _run(Program(source, module="__main__"), timeout_s, memory_bytes)


def run_tests(
    program: str,
    tests: str,
    names: Sequence[str],
    before: str = "",
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
) -> SandboxResult:
    """Run trusted tests against an untrusted program.

    Args:
        program: the untrusted source.
        tests: source that calls what the program defines and raises if it is wrong.
        names: the functions and classes of the program that `tests` uses.
        before: source that `tests` needs and that does not need the program.

    Raises:
        MachineError: this machine supports no sandbox.
    """
    return _run(Program(program, tests, tuple(names), before), timeout_s, memory_bytes)


def run_many(
    jobs: Sequence[Program],
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
    workers: int | None = None,
    on_result: Callable[[int, SandboxResult], None] | None = None,
) -> list[SandboxResult]:
    """Run several jobs at once, by default one per processor; results in the order of the jobs."""
    require_sandbox()
    results = []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        futures = [pool.submit(_run, job, timeout_s, memory_bytes) for job in jobs]
        try:
            for number, future in enumerate(futures):
                results.append(future.result())
                if on_result:
                    on_result(number, results[-1])
        except BaseException:  # Ctrl-C: do not wait half a minute for the programs
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in futures):
                end_all()  # repeatedly: a thread may be about to start another program
                time.sleep(0.05)
            raise
    return results


def require_sandbox() -> None:
    """Raise if this machine supports no sandbox, before anything is generated.

    Raises:
        MachineError: this machine supports no sandbox.
    """
    find_working_sandbox()


def _unreadable(program: str) -> str | None:
    """Return why a source is not passed to the judging process, because it would use too much of its time and memory;
    None if it is."""
    if len(program) > MAX_SOURCE:
        return f"the program has {len(program):,} characters; the limit is {MAX_SOURCE:,}"
    try:
        program.encode()
    except UnicodeEncodeError:
        return "UnicodeEncodeError: a lone surrogate is not a character"
    return None


def _run(job: Program, timeout_s: float, memory_bytes: int) -> SandboxResult:
    if fault := _unreadable(job.program):
        return SandboxResult("failed", "", fault)
    outcome = run_program(job, timeout_s, memory_bytes)
    assert outcome.status in ("passed", "failed", "timeout", "memory")
    return SandboxResult(outcome.status, outcome.output, outcome.detail)  # type: ignore[arg-type]
