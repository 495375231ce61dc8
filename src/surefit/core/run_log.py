"""RUN/log.txt: what a command has said, with times, as plain text. It is no reason to end anything."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

WAITING_BYTES = 64 * 1024
"""Of what is said before a run directory is known, or while its disk is full: the oldest lines beyond it are lost."""


class RunLog:
    """Appends lines to a file, once it is known which. Any process may append to it; each line is written at once.

    Where it cannot be written (no room, no right), the lines wait, and are tried again with the next one.
    """

    def __init__(self) -> None:
        self._path: Path | None = None
        self._waiting = b""

    def open(self, path: Path) -> None:
        """Write what was said so far, and everything from now on, to the end of this file."""
        self._path = path
        self._write()

    def say(self, text: str) -> None:
        """Add a text with the time; its further lines are indented.

        Args:
            text: without secrets and control characters.
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
