"""What every test stands on, however and wherever the suite was started."""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from typer import testing

sys.path.insert(0, str(Path(__file__).parent / "helpers"))

if find_spec("liger_kernel") is None:  # of the extra `kernels`; doctests import what they look through
    collect_ignore = ["helpers/triton_ahead.py", "helpers/triton_interpreted.py"]

# Scripts start background jobs with SIGINT ignored, and every child inherits that: Ctrl-C could not be tested there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# And whoever starts the suite with nohup has the same of SIGHUP.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A shared machine is at times thirty times slower: a deadline per example would measure the machine.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")

# A command line of thirty verbs is put together from their signatures: once, not for each of a thousand calls.
testing._get_command = cache(testing._get_command)  # type: ignore[attr-defined]

# What is on the disk and what only in its cache differs where the power fails, which no test can try: processes are
# killed at most. Waiting for the disk, some thousand times, was a good part of the suite. Child processes do wait.
os.fsync = lambda descriptor: None


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small matrices are quicker on one thread, and sums are added in one order."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB; `small_disk.room` makes it smaller."""
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode:
        pytest.skip("mounting a small tmpfs needs root")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="write tests/golden/expected anew")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Deal the tests by file under `--dist loadscope`, because they share its fixtures; families share nothing.

    (`--dist loadgroup` deals nothing together with pytest 9.2: xdist 3.8 writes the group into an attribute that pytest
    no longer reads. Two workers each started the one SLURM controller.)
    """
    if config.getvalue("dist") != "loadscope":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid if "/families/" in nodeid else nodeid.partition("::")[0]

    return ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with SLURM's tests, which mostly wait, so that the end does not wait for them."""
    items.sort(key=lambda item: item.get_closest_marker("slurm") is None)


def pytest_collection_finish() -> None:
    """What is loaded now stays: looking through it for garbage, again and again, costs half a second each time."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # extensions complain about what is left when the interpreter ends


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device here: not measured")
