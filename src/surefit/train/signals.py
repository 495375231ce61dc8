"""Stopping on request: Ctrl-C, SIGTERM (a scheduler's time limit), SIGUSR1 (its warning before that) and SIGHUP (the
terminal or connection was closed)."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)


def _heard(number: signal.Signals) -> bool:
    return number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN


class StopRequest:
    """Context manager in which the first stop signal is only recorded, to be handled between two steps.

    A second Ctrl-C raises `KeyboardInterrupt` at once. Signals reach only the main thread, so in any other thread this
    does nothing.

    Args:
        any_of: returns whether a flag is true in any process of the run: a signal may reach only one of them.
    """

    def __init__(self, any_of: Callable[[bool], bool] = lambda flag: flag) -> None:
        self.any_of = any_of
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Return whether this process has received a stop signal."""
        return self.signal_name is not None

    def agreed(self) -> bool:
        """Return whether any process has received a stop signal; collective, so that all processes get the same
        answer."""
        if self.any_of(self.requested) and self.signal_name is None:
            self.signal_name = "a signal to another process"
        return self.requested

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # A signal that the parent process ignored stays ignored: under `nohup` SIGHUP must not stop the run.
            handled = [number for number in STOP_SIGNALS if _heard(number)]
            self._before = {number: signal.signal(number, self._note) for number in handled}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
