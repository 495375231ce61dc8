"""Stopping on request: Ctrl-C, SIGTERM (a scheduler's end of time), SIGUSR1 (its warning before that) and SIGHUP (the
terminal or the connection is gone)."""

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
    """While it is open, the first stop signal only leaves a note, to be acted on between two steps.

    A second Ctrl-C raises `KeyboardInterrupt` at once. Signals go to the main thread alone, so in any other thread
    this does nothing.

    Args:
        any_of: whether something is true in any process of the run: the signal may come to one alone.
    """

    def __init__(self, any_of: Callable[[bool], bool] = lambda flag: flag) -> None:
        self.any_of = any_of
        self.signal_name: str | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether a stop signal has come to this process."""
        return self.signal_name is not None

    def agreed(self) -> bool:
        """Whether one has come to any process; all must ask at the same place, and then all have the same answer."""
        if self.any_of(self.requested) and self.signal_name is None:
            self.signal_name = "a signal to another process"
        return self.requested

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            # What whoever started us has had ignored stays so: `nohup` means that SIGHUP stops nothing.
            heard = [number for number in STOP_SIGNALS if _heard(number)]
            self._before = {number: signal.signal(number, self._note) for number in heard}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal_name = signal.Signals(number).name
