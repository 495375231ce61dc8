"""RUN/log.txt: the output of commands, with times, as plain text. A failure to write it never ends a command."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

WAITING_BYTES = 64 * 1024
"""Bytes of output that are buffered before a run directory is known, or while its disk is full; beyond it the oldest
lines are lost.
"""


class RunLog:
    """Log that appends lines to a file once its path is known. Any process may append; each line is written at once.

    Where it cannot be written (disk space, permission), the lines are buffered, and written with the next one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting = b""

    def open(self, path: Path) -> None:
        """Write the buffered lines, and all later ones, to the end of this file."""
        self._path = path
        self._write()

    def say(self, text: str) -> None:
        """Append a text with the time; its further lines are indented.

        Args:
            text: text without secrets and control characters.
        """
        if not text.strip():
            return
        stamp = time.strftime("%Y-%m-%d %H:%M:%S%z  ")
        lines = text.rstrip().replace("\n", "\n" + " " * len(stamp))
        self._waiting += f"{stamp}{lines}\n".encode(errors="backslashreplace")
        if len(self._waiting) > WAITING_BYTES:
            self._waiting = self._waiting[-WAITING_BYTES:].partition(b"\n")[2]
        self._write()

    def _write(self) -> None:
        if self._path is None or not self._waiting:
            return
        with contextlib.suppress(OSError):
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644)
            try:
                self._waiting = self._waiting[os.write(file, self._waiting) :]
            finally:
                os.close(file)
