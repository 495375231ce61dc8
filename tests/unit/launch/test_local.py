"""The launcher's own decisions; with real processes in tests/distributed."""

from __future__ import annotations

import os
import signal
from contextlib import nullcontext
from typing import Any

import pytest

from surefit.core import env
from surefit.core.errors import EXIT_INTERRUPTED, EXIT_LOST, EXIT_SHORT, Interrupted
from surefit.launch import local


class Ended:
    """A group of which rank 1 has run out of memory."""

    codes, ended_by_us = {0: EXIT_LOST, 1: EXIT_SHORT}, list[int]()
    stopped_by: signal.Signals | None = None

    def __init__(self, *given: Any) -> None: ...

    def handing_on_signals(self) -> Any:
        return nullcontext()

    def wait(self) -> None: ...


def test_a_run_that_is_asked_to_stop_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LocalProcessGroup", Ended)
    assert local.launch_processes(["train"], 2, "") == EXIT_SHORT
    monkeypatch.setattr(Ended, "stopped_by", signal.SIGTERM)
    with pytest.raises(Interrupted, match="stopped by SIGTERM, after memory had run out") as caught:
        local.launch_processes(["train"], 2, "surefit train x --resume")
    assert caught.value.exit_code == EXIT_INTERRUPTED
    assert "surefit train x --resume" in str(caught.value.help)


def test_a_process_is_told_what_was_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert env.read_oom_adaptations() == {}
    changes = {"train.per_device_train_batch_size": 4, "train.gradient_checkpointing": "selective"}
    told = env.child_env(1, 2, 29_500, changes)
    assert (told["RANK"], told["WORLD_SIZE"], told["MASTER_PORT"]) == ("1", "2", "29500")
    monkeypatch.setattr(os, "environ", told)
    assert env.read_oom_adaptations() == changes
    assert env.launched_here()
