"""What can go wrong, said the same way everywhere.

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

EXIT_OK = 0
EXIT_FINDINGS = 1
"""Findings of severity error, or a gate (certificate, score) that did not pass."""
EXIT_USAGE = 2
"""The command line, the config or the data is not usable as it is."""
EXIT_ENVIRONMENT = 3
"""The machine is not usable as it is: a package, a permission, disk space, a device."""
EXIT_BUG = 4
"""An error that SureFit did not foresee: please report it."""
EXIT_UNDECIDED = 5
"""A score gate that neither passed nor failed: there are too few rows, or no comparable scores, to tell."""
EXIT_INTERRUPTED = 75
"""Stopped on request with the work saved; `surefit train --resume` continues (75 is sysexits' EX_TEMPFAIL)."""

EXIT_LOST = 76
"""Of one process of several: another one was gone. The launcher (launch/local.py) says which, and what that one left
with; nobody else sees this number."""
EXIT_SHORT = 77
"""Of one process of several: its memory ran out, and with less that learns the same there may be enough. The launcher
starts all of them again; nobody else sees this number."""


class SureFitError(Exception):
    """A problem the user can understand and fix.

    Args:
        message: the problem, in the user's names and numbers.
        code: names this error in tests, logs and `--json`; unique within SureFit and never reused
            (`scripts/error_codes.py` gives out the next). None for an error of a recipe from outside.
        help: what to do about it.
        path: the file it is in.
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
        """Name a config key, in this error and in those behind it, where they name no field themselves."""
        self.field = self.field or field
        for other in self.also:
            other.about(field)

    @property
    def where(self) -> str:
        """`file:line: field`, with whatever of the three is known."""
        place = self.path or ""
        if place and self.line is not None:
            place += f":{self.line}"
        return ": ".join(part for part in (place, self.field) if part)

    def __str__(self) -> str:
        head = f"{self.where}: {self.message}" if self.where else self.message
        text = f"{head}\n  help: {self.help}" if self.help else head
        return "\n".join([text, *map(str, self.also)])

    def as_dict(self) -> dict[str, object]:
        """The same, for `--json`."""
        return {
            "error": type(self).__name__,
            "code": self.code,
            "message": self.message,
            "path": self.path,
            "line": self.line,
            "field": self.field,
            "help": self.help,
            "exit_code": self.exit_code,
            "also": [other.as_dict() for other in self.also],
        }


class ConfigError(SureFitError):
    """The config file, or an override of it, is not usable."""


class DataError(SureFitError):
    """A data file or a row in it is not usable."""


class RecipeError(SureFitError):
    """A recipe's own code failed. No row is at fault for certain, so that no setting leaves such a row out."""


class ModelError(SureFitError):
    """A model directory or hub id is not usable."""


class MachineError(SureFitError):
    """The machine lacks something: a package, a permission, space, a device."""

    exit_code = EXIT_ENVIRONMENT


class LostProcess(MachineError):
    """Another process of this run is gone, so that this one cannot go on."""

    exit_code = EXIT_LOST


class ShortOfMemory(MachineError):
    """Memory ran out in this process, and all processes of the run are to start again with settings that need less."""

    exit_code = EXIT_SHORT


class GateError(SureFitError):
    """A check that stands between two stages did not pass."""

    exit_code = EXIT_FINDINGS


class Interrupted(SureFitError):
    """Stopped on request, with the work saved."""

    exit_code = EXIT_INTERRUPTED


@contextlib.contextmanager
def errors_at(where: str) -> Iterator[None]:
    """Add the place of a row to what is wrong with it, unless the error names one itself."""
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
    errno.ELOOP: "a link leads back to itself: name the file that it should lead to",
    errno.ENAMETOOLONG: "shorten the name",
    errno.ENOTDIR: "a part of the path is a file and no directory: correct the path",
    errno.EISDIR: "name a file in it",
    errno.ENOENT: "it is gone: put it back, or correct the path",
    errno.EIO: "the disk failed: copy the file to another",
    errno.ESTALE: "the network drive lost it: mount the drive again",
    errno.EMFILE: "raise the limit of open files: ulimit -n",
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EROFS: "name a place that can be written to",
}


def os_help(error: OSError) -> str:
    """Return what to do about a path that the operating system refuses.

    >>> os_help(PermissionError(errno.EACCES, "Permission denied")), os_help(OSError(errno.EROFS, "Read-only"))
    ('check its permissions', 'name a place that can be written to')
    """
    return _OS_HELP.get(error.errno or 0, "check its permissions")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` where something known is close to `word`, else the empty string.

    >>> did_you_mean("learnig_rate", ["learning_rate", "epochs"])
    "; did you mean 'learning_rate'?"
    """
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean '{close[0]}'?" if close else ""
