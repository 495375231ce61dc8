"""Errors that users can cause, in one format, and the exit codes.

Every error a user can cause is a `SureFitError`: it states the problem in the user's own names and numbers, says
where it is (file, line, field), and only its `help` proposes what to do. The CLI prints it without a traceback and
exits with the class's `exit_code`. Anything else that escapes is a bug in SureFit.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
from collections.abc import Iterable, Iterator
from pathlib import Path

SET_OPTION = "--set"
"""The path of errors in a value of the command line: it is no file."""
EXIT_OK = 0
EXIT_FINDINGS = 1
"""Findings of severity error, or a gate (certificate, score) that did not pass."""
EXIT_USAGE = 2
"""The command line, the config or the data is not usable."""
EXIT_ENVIRONMENT = 3
"""The machine is not usable: a package, a permission, disk space, a device is missing."""
EXIT_BUG = 4
"""An error that SureFit did not foresee: please report it."""
EXIT_UNDECIDED = 5
"""A score gate that neither passed nor failed: there are too few rows, or no comparable scores, to tell."""
EXIT_INTERRUPTED = 75
"""Stopped on request with the work saved; `surefit train --resume` continues (75 is sysexits' EX_TEMPFAIL)."""

EXIT_LOST = 76
"""One of several processes ended because another was lost. The launcher (launch/local.py) reports which one, and its
exit status; the user does not see this number.
"""
EXIT_SHORT = 77
"""One of several processes ran out of memory, and a configuration that needs less and learns the same may fit. The
launcher restarts all of them; the user does not see this number.
"""


class SureFitError(Exception):
    """A problem the user can understand and fix.

    Args:
        message: the problem, in the user's names and numbers.
        code: identifies this error in tests, logs and `--json`; unique within SureFit and never reused
            (`scripts/error_codes.py` generates the next). None for an error of an external recipe.
        help: what to do about it.
        path: the file with the problem.
        line: 1-based line in that file.
        field: dotted config key or column name.
        also: further problems found in the same pass, so that all are reported at once.
    """

    exit_code = EXIT_USAGE

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        help: str | None = None,
        path: str | Path | None = None,
        line: int | None = None,
        field: str | None = None,
        also: Iterable[SureFitError] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.help = help
        self.path = str(path) if path is not None else None
        self.line = line
        self.field = field
        self.also = tuple(also)

    def about(self, field: str) -> None:
        """Set a config key as the field of this error and those in `also`, where they have none."""
        self.field = self.field or field
        for error in self.also:
            error.about(field)

    @property
    def place(self) -> str:
        """Location as `file:line`; empty where no file is concerned."""
        return f"{self.path}:{self.line}" if self.path and self.line is not None else self.path or ""

    @property
    def where(self) -> str:
        """Location as `file:line: field`, with the parts that are known."""
        return ": ".join(part for part in (self.place, self.field) if part)

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        text = f"{head}\n  help: {self.help}" if self.help else head
        return "\n".join([text, *map(str, self.also)])

    def as_dict(self) -> dict[str, object]:
        """Return the error as a dict, for `--json`."""
        return {
            "error": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "path": self.path,
            "line": self.line,
            "field": self.field,
            "help": self.help,
            "exit_code": self.exit_code,
            "also": [error.as_dict() for error in self.also],
        }


class ConfigError(SureFitError):
    """The config file, or an override of it, is not usable."""


class DataError(SureFitError):
    """A data file or a row in it is not usable."""


class RecipeError(SureFitError):
    """A recipe's own code failed. The row may be fine, so that no setting skips it."""


class ModelError(SureFitError):
    """A model directory or hub id is not usable."""


class MachineError(SureFitError):
    """The machine lacks something: a package, a permission, disk space, a device."""

    exit_code = EXIT_ENVIRONMENT


class LostProcess(MachineError):
    """Another process of this run was lost, so that this one cannot continue."""

    exit_code = EXIT_LOST


class ShortOfMemory(MachineError):
    """Memory ran out in this process; all processes of the run must restart with settings that need less."""

    exit_code = EXIT_SHORT


class GateError(SureFitError):
    """A check between two stages did not pass."""

    exit_code = EXIT_FINDINGS


class Interrupted(SureFitError):
    """Stopped on request, with the work saved."""

    exit_code = EXIT_INTERRUPTED


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Add a row's position to the errors raised inside, unless they have one already."""
    try:
        yield
    except DataError as error:
        raise DataError(
            error.message, code=error.code, path=error.path or where, field=error.field, help=error.help
        ) from error
    except RecipeError as error:
        error.path = error.path or where
        raise


_OS_HELP = {
    errno.ELOOP: "a symbolic link points to itself: make it point to the file",
    errno.ENAMETOOLONG: "shorten the name",
    errno.ENOTDIR: "a part of the path is a file, not a directory: correct the path",
    errno.EISDIR: "name a file in it",
    errno.ENOENT: "it is gone: put it back, or correct the path",
    errno.EIO: "the disk failed: copy the file to another disk",
    errno.ESTALE: "the network drive lost the file: mount the drive again",
    errno.EMFILE: "raise the limit on open files: ulimit -n",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EROFS: "choose a writable path",
}


def os_help(error: OSError) -> str:
    """Return advice for a path that the operating system cannot use.

    >>> os_help(PermissionError(errno.EACCES, "Permission denied")), os_help(OSError(errno.EROFS, "Read-only"))
    ('check its permissions', 'choose a writable path')
    """
    return _OS_HELP.get(error.errno or 0, "check its permissions")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `; did you mean 'x'?` where a known word is close to `word`, else the empty string.

    >>> did_you_mean("learnig_rate", ["learning_rate", "epochs"])
    "; did you mean 'learning_rate'?"
    """
    matches = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{matches[0]}'?" if matches else ""
