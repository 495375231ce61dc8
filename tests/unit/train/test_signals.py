"""The first stop signal leaves a note, a second Ctrl-C stops at once, and the old handlers come back."""

import os
import signal
import threading

import pytest

from surefit.train.signals import STOP_SIGNALS, StopRequest


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_is_noted_and_handlers_restored(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopRequest() as stop:
        assert not stop.requested
        os.kill(os.getpid(), number)
        assert stop.requested
        assert stop.signal_name == number.name
    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_aborts() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopRequest() as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_in_another_thread_it_does_nothing() -> None:
    found: list[bool] = []

    def work() -> None:
        with StopRequest() as stop:
            found.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [False]


def test_a_closed_terminal_stops_it_unless_nohup_said_otherwise() -> None:
    assert signal.SIGHUP in STOP_SIGNALS
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
