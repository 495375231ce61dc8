"""The end of a verb: every outcome becomes a message and an exit code."""

from __future__ import annotations

import contextlib
import errno
import functools
import inspect
import os
import shlex
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec

import typer

from surefit import __version__
from surefit.cli.options import Json
from surefit.cli.render import Output, make_encodable
from surefit.core import env
from surefit.core.errors import (
    EXIT_BUG,
    EXIT_OK,
    ConfigError,
    Interrupted,
    LostProcess,
    MachineError,
    ShortOfMemory,
    SureFitError,
    os_help,
)
from surefit.core.packaging import explain_import_error
from surefit.core.progress import progress_listener
from surefit.core.rundir import FULL
from surefit.core.units import printable, truncate_text

USAGE = {errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR}
"""Errors caused by a path that the user named, wherever it is first opened."""
MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EACCES, errno.EPERM, errno.EMFILE, errno.ESTALE}
"""Errors of the machine, independent of the operation."""


P = ParamSpec("P")


def verb(function: Callable[Concatenate[Output, P], int]) -> Callable[..., None]:
    """Return the typer command of a function that prints to an output and returns its exit code.

    The options of the command are the function's parameters after the first, and `--json`.
    """
    _, *parameters = inspect.signature(function, eval_str=True).parameters.values()
    parameters.append(inspect.Parameter("as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=Json))

    @functools.wraps(function)
    def command(*, as_json: bool, **options: Any) -> None:
        run_verb(as_json, lambda out: function(out, **options))  # type: ignore[call-arg]

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def run_verb(as_json: bool, work: Callable[[Output], int], with_result: bool = True) -> None:
    """Run a verb, and turn every outcome into a message and an exit code."""
    make_encodable()
    out = Output(as_json, with_result, rank=env.distributed_env()[0])
    try:
        code = _run(out, work)
        sys.stdout.flush()
    except OSError as error:  # while printing the outcome
        code = _stdout_failed(out, error)
    raise typer.Exit(code)


def open_closed_streams() -> None:
    """Open /dev/null for a standard stream that is closed (`>&-`).

    Otherwise the next file that is opened gets its number, and a child process prints into that file.
    """
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, "w" if descriptor else "r", encoding="utf-8"))


def _run(out: Output, work: Callable[[Output], int]) -> int:
    out.log.say(printable(env.redact(f"surefit {__version__}: {shlex.join(sys.argv[1:])}")))
    try:
        _require_working_directory()
        _say_what_was_set(out, env.load_dotenv())
        with progress_listener(out.note):
            code = work(out)
    except typer.BadParameter:  # typer prints it, with the usage
        raise
    except (Interrupted, LostProcess) as error:
        # Of several processes, rank 0 reports an interruption for all, and the launcher reports lost processes.
        if not (out.rank if isinstance(error, Interrupted) else env.launched_here()):
            out.error(error)
        code = error.exit_code
    except ShortOfMemory as error:
        out.note_of_rank(error.message)
        code = error.exit_code
    except SureFitError as error:
        out.error(error)
        code = error.exit_code
    except KeyboardInterrupt:
        out.note("interrupted")
        code = 130
    except BrokenPipeError:  # the reader went away (`| head`): `run_verb` handles it
        raise
    except MemoryError:
        out.error(
            MachineError(
                "out of memory (RAM)", code="E1013", help="lower train.per_device_train_batch_size or data.max_length"
            )
        )
        code = 3
    except OSError as error:
        if error.errno in FULL and error.filename is None:  # stdout: an error of a file has its name
            raise
        code = _failed_system_call(out, error)
    except Exception as error:
        code = _report_package(out, error) or _report_bug(out)
    return code


def _require_working_directory() -> None:
    try:
        os.getcwd()
    except FileNotFoundError:
        raise MachineError(
            "the directory that this command was started in is gone", code="E1200", help="change into one that is there"
        ) from None


def _failed_system_call(out: Output, error: OSError) -> int:
    """Report a system call that failed on an invalid path or on the machine, else a bug; return the exit code."""
    kind = ConfigError if error.errno in USAGE else MachineError if error.errno in MACHINE else None
    if kind is None:
        return _report_package(out, error) or _report_bug(out)
    path = truncate_text(str(error.filename), 200) if error.filename is not None else None
    problem = kind(error.strerror or str(error), code="E1201", path=path, help=os_help(error))
    out.error(problem)
    return problem.exit_code


def _report_package(out: Output, error: Exception) -> int | None:
    """Report a package that is missing or cannot be imported; return the exit code, or None for any other error."""
    problem = explain_import_error(error)
    if problem is None:
        return None
    out.error(problem)
    return problem.exit_code


def _stdout_failed(out: Output, error: OSError) -> int:
    """Report on stderr that stdout cannot be written, and leave nothing that the interpreter would flush at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.stdout.flush()
    if isinstance(error, BrokenPipeError):
        return EXIT_OK
    out.as_json = False
    problem = MachineError(
        f"the output cannot be written: {error.strerror}", code="E1202", help="make room where stdout leads to"
    )
    out.error(problem)
    return problem.exit_code


def _say_what_was_set(out: Output, dotenv: env.Dotenv | None) -> None:
    """Note the variables that `.env` has set. A child process finds them in its environment, and prints nothing."""
    if dotenv is None or not dotenv.accepted + dotenv.left:
        return
    parts = [f"sets {', '.join(dotenv.accepted)}"] if dotenv.accepted else []
    if dotenv.left:
        names = ", ".join(dotenv.left[:8]) + (" …" if len(dotenv.left) > 8 else "")
        parts.append(f"may not set {names}: that belongs into the environment")
    out.note(f"{dotenv.path.name} here {'; it '.join(parts)}")


def exit_now(ended: SystemExit) -> None:
    """End the process of a verb with nothing left to finish, without finalizing the interpreter.

    With torch and transformers imported, that takes a second and more. Returns if the output cannot be flushed, which
    Python then reports itself, or if `ended` carries more than an exit code.
    """
    if not isinstance(ended.code, int):
        return
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(ended.code)


def _report_bug(out: Output) -> int:
    with tempfile.NamedTemporaryFile("w", prefix="surefit-bug-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(env.redact(traceback.format_exc()))
    problem = traceback.format_exc(limit=0).strip().splitlines()[-1]
    error = SureFitError(
        f"SureFit did not expect this: {problem}",
        code="E1014",
        help=f"this is a bug in SureFit, please report it with {file.name}; what was saved before is still good",
    )
    error.exit_code = EXIT_BUG
    out.error(error)
    return EXIT_BUG
