"""Starts untrusted Python in a sandbox: own namespaces, no file but Python's library, no privileges, limits on
everything.

Two kinds of sandbox, tried once on this machine. `own`: `jail_inside` makes the namespaces itself; the interpreter is
not even visible to the program, and as root the program runs unprivileged. `bwrap`: bubblewrap makes them, for
machines that let only a few known programs do so (Ubuntu's AppArmor). The rest (limits, capabilities, the filter of
system calls) is the same code for both. Without either nothing is run.
"""

from __future__ import annotations

import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from surefit.core import seccomp
from surefit.core.errors import MachineError
from surefit.core.units import MIB

SandboxKind = Literal["own", "bwrap"]
INSIDE = Path(__file__).with_name("jail_inside.py")
OUTPUT_BYTES = 64 * 1024
DISK_BYTES = 16 * MIB
OPEN_FILES = 64
THREADS = 64
CLOCK = 3
"""Wall-clock seconds for each second of processor time: a busy machine must not change a score."""
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom")


@dataclass(frozen=True)
class Program:
    """Untrusted code and the tests that judge it.

    Attributes:
        program: the untrusted source.
        tests: trusted source that calls the program's definitions; must run to its end.
        names: the program's names that `tests` uses.
        before: trusted source that runs before `tests`, without the program.
        module: the program's `__name__`.
    """

    program: str
    tests: str = ""
    names: tuple[str, ...] = ()
    before: str = ""
    module: str = "program"


@dataclass(frozen=True)
class JailResult:
    """Result of a job: the judge's status, its reason, and the start of the output."""

    status: str
    detail: str
    output: str


def run_program(job: Program, timeout_s: float, memory_bytes: int, way: SandboxKind | None = None) -> JailResult:
    """Run one job to its end, or kill it at its limits.

    Args:
        timeout_s: processor seconds for each of program and tests; the wall-clock limit is `CLOCK` times that.
        memory_bytes: address space of each of the two.
        way: kind of sandbox; by default one that works on this machine.

    Raises:
        MachineError: no sandbox works on this machine.
    """
    way = way or find_working_sandbox()
    job_json = json.dumps(
        _jail_settings(timeout_s, memory_bytes) | {"program": job.program, "name": job.module}
    ).encode()
    tests_json = json.dumps({"tests": job.tests, "names": job.names, "before": job.before}).encode()
    try:
        job_file = os.memfd_create("job")
    except OSError as error:
        reason = f"it cannot create a file in memory ({error.strerror})"
        raise MachineError(f"this machine cannot sandbox untrusted code: {reason}", code="E1052", help=_HELP) from error
    verdict, verdict_writer = os.pipe()
    try:
        with os.fdopen(job_file, "wb", closefd=False) as file:
            file.write(job_json + tests_json)
        process = subprocess.Popen(
            _command(way, verdict_writer, len(job_json)),
            stdin=job_file,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(verdict_writer,),
            env={},
            cwd="/",
            start_new_session=True,
        )
    finally:
        os.close(verdict_writer)
        os.close(job_file)
    _running.add(process)
    try:
        return _watch(process, verdict, time.monotonic() + CLOCK * timeout_s)
    finally:
        _end(process)
        _running.discard(process)
        os.close(verdict)


_running: set[subprocess.Popen[bytes]] = set()


def end_all() -> None:
    """Kill every running job, in any thread; threads that wait for one get a failure."""
    for process in list(_running):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _jail_settings(timeout_s: float, memory_bytes: int) -> dict[str, object]:
    visible, hidden, links = library_paths()
    limits = {
        "CPU": max(1, round(timeout_s)),
        "AS": memory_bytes,
        "FSIZE": DISK_BYTES,
        "NOFILE": OPEN_FILES,
        "NPROC": THREADS,
        "CORE": 0,
        "MEMLOCK": 0,
        "MSGQUEUE": 0,
    }
    return {
        "visible": visible,
        "hidden": hidden,
        "links": links,
        "limits": limits,
        "disk_bytes": DISK_BYTES,
        "seconds": round(CLOCK * timeout_s) + 15,
        "filter": seccomp.denying_filter().hex(),
    }


@functools.cache
def library_paths() -> tuple[tuple[str, ...], tuple[str, ...], dict[str, str]]:
    """Return the paths that a program may see: Python's standard library without installed packages, the C libraries,
    three devices.

    Returns:
        The visible paths, folders in them that are hidden, and symbolic links of the root folder.
    """
    base = {
        sysconfig.get_path(name, vars={"base": sys.base_prefix, "platbase": sys.base_prefix})
        for name in ("stdlib", "platstdlib")
    }
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        mapped_files = {line.split(None, 5)[-1].strip() for line in maps if "/" in line}
    library_names = ("/libc.so", "/libc-", "/ld-", "/libpython", "/libm.so")
    library_folders = {os.path.dirname(path) for path in mapped_files if any(name in path for name in library_names)}
    library_folders |= {
        os.path.realpath(folder) for folder in ("/lib64", "/lib") if list(Path(folder).glob("ld-linux*"))
    }
    folders = sorted(path for path in base | library_folders if os.path.isdir(path))
    visible = [p for p in folders if not any(p != parent and p.startswith(parent + "/") for parent in folders)]
    package_folders = [os.path.join(path, name) for path in sorted(base) for name in ("site-packages", "dist-packages")]
    links = {link: os.readlink(link) for link in ("/lib", "/lib64", "/lib32") if os.path.islink(link)}
    return (*visible, *filter(os.path.exists, DEVICES)), tuple(filter(os.path.isdir, package_folders)), links


def _command(way: SandboxKind, verdict: int, first: int) -> list[str]:
    arguments = [way, str(verdict), str(first)]
    if way == "own":
        return [sys.executable, "-I", "-S", str(INSIDE), *arguments]
    visible, hidden, links = library_paths()
    python = os.path.realpath(sys.executable)
    command = [_bubblewrap() or "bwrap", "--unshare-all", "--die-with-parent", "--as-pid-1", "--clearenv"]
    command += ["--cap-drop", "ALL", "--uid", "65534", "--gid", "65534"]
    for path in (*visible, python):
        command += ["--dev-bind" if path in DEVICES else "--ro-bind", path, path]
    command += ["--ro-bind", str(INSIDE), f"/{INSIDE.name}"]
    for path in hidden:
        command += ["--size", "4096", "--tmpfs", path, "--remount-ro", path]
    for link, target in links.items():
        command += ["--symlink", target, link]
    command += ["--size", str(DISK_BYTES), "--tmpfs", "/tmp", "--remount-ro", "/", "--chdir", "/tmp"]
    return [*command, python, "-I", "-S", f"/{INSIDE.name}", *arguments]


def _bubblewrap() -> str | None:
    return shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")


def _watch(process: subprocess.Popen[bytes], verdict: int, deadline: float) -> JailResult:
    """Collect output and verdict; end everything at the deadline or at the verdict."""
    assert process.stdout is not None
    output, verdict_bytes = bytearray(), bytearray()
    timed_out = False
    with selectors.DefaultSelector() as selector, process.stdout as stdout:
        selector.register(stdout, selectors.EVENT_READ, output)
        selector.register(verdict, selectors.EVENT_READ, verdict_bytes)
        while verdict in selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            timed_out = not ready or time.monotonic() > deadline
            if timed_out:
                break
            for key, _ in ready:
                part = os.read(key.fd, 65536)
                key.data.extend(part[: OUTPUT_BYTES - len(key.data)])
                if not part:
                    selector.unregister(key.fileobj)
        _end(process)
        _rest(stdout.fileno(), output)
    text = output.decode("utf-8", errors="replace")
    if timed_out:
        return JailResult("timeout", "the limit on time by the clock", text)
    return _outcome(bytes(verdict_bytes), text)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the job. The group holds the launcher and process 1 of the namespaces: when that ends, every process in them
    ends.
    """
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _rest(stdout: int, output: bytearray) -> None:
    """Read the output that was printed before the verdict and not read yet."""
    os.set_blocking(stdout, False)
    with suppress(BlockingIOError):
        while len(output) < OUTPUT_BYTES and (part := os.read(stdout, OUTPUT_BYTES - len(output))):
            output.extend(part)


def _outcome(said: bytes, output: str) -> JailResult:
    try:
        verdict = json.loads(said)
    except ValueError:
        return JailResult("failed", "the tests were killed from outside (out of memory or processor time?)", output)
    if verdict["status"] == "refused":
        raise MachineError(f"this machine cannot sandbox untrusted code: {verdict['detail']}", code="E1053", help=_HELP)
    return JailResult(verdict["status"], verdict["detail"], output)


_HELP = (
    "SureFit runs programs from a model only in a sandbox of Linux namespaces: install bubblewrap (apt install "
    "bubblewrap), or allow user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone); in "
    "Docker add --security-opt seccomp=unconfined --security-opt apparmor=unconfined, or evaluate outside the container"
)


def sandbox_kinds_to_try() -> Sequence[SandboxKind]:
    """Return the kinds of sandbox to try on this machine, the preferred one first.

    Bubblewrap does not work for root: what it starts as another user is the real root to the kernel, outside every
    limit on processes.
    """
    return ("own", "bwrap") if _bubblewrap() and os.geteuid() != 0 else ("own",)


@functools.cache
def find_working_sandbox() -> SandboxKind:
    """Return the first kind of sandbox that works on this machine, tried with a one-line program.

    Raises:
        MachineError: none works.
    """
    if sys.platform != "linux" or not seccomp.supported():
        raise MachineError(
            "untrusted code can be sandboxed on Linux only, on x86_64 or aarch64", code="E1054", help=_HELP
        )
    if paths_in_tmp := [path for path in library_paths()[0] if path.startswith("/tmp/")]:
        raise MachineError(
            f"this Python's library is under /tmp ({paths_in_tmp[0]}), which the sandbox replaces",
            code="E1055",
            help="use a Python that is installed elsewhere, such as /usr/bin/python3 or one in your home",
        )
    problems = []
    for kind in sandbox_kinds_to_try():
        try:
            outcome = run_program(Program("ready = True"), 20.0, 512 * MIB, kind)
        except MachineError as error:
            problems.append(error.message)
            continue
        if outcome.status == "passed":
            return kind
        problems.append(f"{kind}: {outcome.detail} {outcome.output}".strip())
    raise MachineError("; ".join(problems), code="E1056", help=_HELP)
