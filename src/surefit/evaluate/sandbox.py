"""Untrusted Python, run where it can do no harm, and tests that it cannot talk into passing (docs/sandbox.md).

The program gets a process of its own; the tests run in another one and only call it. Values cross as plain data, so the
verdict depends on what the program returns and on nothing else that it does.
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
"""Characters of a program; the longest solution of HumanEval and MBPP has 2,000. Parsing the worst that fits (one
f-string) takes under 2 s, and the time grows with the square of the length."""
Status = Literal["passed", "failed", "timeout", "memory"]


@dataclass(frozen=True)
class SandboxResult:
    """How it went.

    Attributes:
        status: passed, where the source (and the tests) ran to the end; timeout or memory, where a limit ended it;
            failed otherwise.
        output: the first 64 KiB of what was printed.
        detail: the exception or the limit; empty where it passed.
    """

    status: Status
    output: str
    detail: str = ""


def run_python(source: str, timeout_s: float = TIMEOUT_S, memory_bytes: int = MEMORY_BYTES) -> SandboxResult:
    """Run untrusted source as a script. "passed" is the program's own word: only `run_tests` judges.

    Args:
        timeout_s: seconds of processor time; by the clock three times as many, so that a busy machine changes nothing.
        memory_bytes: limit of the address space.

    Raises:
        MachineError: this machine has no way to shut the program in.
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
        MachineError: this machine has no way to shut the program in.
    """
    return _run(Program(program, tests, tuple(names), before), timeout_s, memory_bytes)


def run_many(
    jobs: Sequence[Program],
    timeout_s: float = TIMEOUT_S,
    memory_bytes: int = MEMORY_BYTES,
    workers: int | None = None,
    on_result: Callable[[int, SandboxResult], None] | None = None,
) -> list[SandboxResult]:
    """Several jobs at once, as many as there are processors by default; results in the order of the jobs."""
    require_sandbox()
    results = []
    with ThreadPoolExecutor(workers or len(os.sched_getaffinity(0))) as pool:
        waiting = [pool.submit(_run, job, timeout_s, memory_bytes) for job in jobs]
        try:
            for number, future in enumerate(waiting):
                results.append(future.result())
                if on_result:
                    on_result(number, results[-1])
        except BaseException:  # Ctrl-C: nobody waits for half a minute of other people's programs
            pool.shutdown(wait=False, cancel_futures=True)
            while not all(future.done() for future in waiting):
                end_all()  # again and again: a thread may just have been about to start one
                time.sleep(0.05)
            raise
    return results


def require_sandbox() -> None:
    """Raise now, not after an hour of generating.

    Raises:
        MachineError: this machine has no way to shut a program in.
    """
    find_working_sandbox()


def _unreadable(program: str) -> str | None:
    """Why a source is not even handed to the judge, whose own time and memory it would take."""
    if len(program) > MAX_SOURCE:
        return f"a program of {len(program):,} characters; up to {MAX_SOURCE:,} are read"
    try:
        program.encode()
    except UnicodeEncodeError:
        return "UnicodeEncodeError: half of a surrogate pair, which is no character"
    return None


def _run(job: Program, timeout_s: float, memory_bytes: int) -> SandboxResult:
    if fault := _unreadable(job.program):
        return SandboxResult("failed", "", fault)
    outcome = run_program(job, timeout_s, memory_bytes)
    assert outcome.status in ("passed", "failed", "timeout", "memory")
    return SandboxResult(outcome.status, outcome.output, outcome.detail)  # type: ignore[arg-type]
