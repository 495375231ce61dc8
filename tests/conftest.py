"""What every test stands on, however and wherever the suite was started."""

import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

# Scripts start background jobs with SIGINT ignored, and every child inherits that: Ctrl-C could not be tested there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A shared machine is at times thirty times slower: a deadline per example would measure the machine.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here: not measured")
