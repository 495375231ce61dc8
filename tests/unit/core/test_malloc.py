"""What a training process frees, the system gets back; whoever chose otherwise is left alone."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from typing import Any

import pytest

from surefit.core import env, malloc
from surefit.stages import training

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be set")
FREED = """
import sys
from contextlib import nullcontext
from surefit.core.malloc import return_freed_memory, keep_what_is_freed
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
def step():  # what it frees lies between what is kept
    kept, blocks = [], []
    for _ in range(100):
        blocks.append(bytes(1) * (2 << 20))
        kept.append(bytes(1) * 2000)
    return kept, resident()
before = resident()
with return_freed_memory() as done:
    if "small" in sys.argv:
        keep_what_is_freed()
    kept, full = step()
    left = resident()
after, _ = step()
print(done, full - before, left - before, resident() - before)
"""


def freed(small: bool = False, **variables: str) -> tuple[str, int, int, int]:
    """(whether it was set, MiB of 100 blocks of 2 MiB, MiB when they were freed, and freed once more afterwards)."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", FREED, *(["small"] if small else [])],
        env=plain | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    said, *sizes = done.stdout.split()
    full, left, after = map(int, sizes)
    return said, full, left, after


@GLIBC
def test_what_is_freed_goes_back_to_the_system_until_it_is_over() -> None:
    said, full, left, after = freed()
    assert said == "True"
    assert full >= 199
    assert left <= 4
    assert after >= 150, "then glibc keeps it again, which is faster"


@GLIBC
def test_a_small_process_keeps_blocks_of_a_few_mib() -> None:
    said, full, left, _ = freed(small=True)
    assert said == "True"
    assert full >= 199
    assert left >= 100, "they were cut from the heap, whose holes stay"


@pytest.mark.parametrize(
    ("planned", "kind", "small"),
    [
        ({"estimate": {"keeps_freed_memory": True}}, "cpu", True),
        ({"estimate": {"keeps_freed_memory": False}}, "cpu", False),
        ({"estimate": {"keeps_freed_memory": True}}, "cuda", False),
        ({"estimate": None}, "cpu", False),
        (None, "cpu", False),
    ],
)
def test_small_is_what_the_plan_says_of_this_process(planned: dict[str, Any] | None, kind: str, small: bool) -> None:
    assert training._stays_small(planned, kind) is small


@GLIBC
@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"}],
)
def test_what_the_user_has_set_counts(variables: dict[str, str]) -> None:
    said, full, left, _ = freed(**variables)
    assert said == "False"
    assert full >= 199
    assert left >= 100, "with their threshold all of it comes from the heap, whose end is kept"


@pytest.mark.parametrize(
    ("variables", "chosen"),
    [
        ({}, False),
        ({"MALLOC_ARENA_MAX": "2"}, True),
        ({"MALLOC_ARENA_MAX": ""}, False),
        ({"GLIBC_TUNABLES": "glibc.rtld.nns=4"}, False),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=128"}, True),
        ({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}, True),
        ({"LD_PRELOAD": "/usr/lib/libfaketime.so.1"}, False),
    ],
)
def test_whether_the_user_has_chosen(variables: dict[str, str], chosen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert env.malloc_chosen() is chosen


def test_elsewhere_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with malloc.return_freed_memory() as done:
        assert done is False


def test_the_verb_that_trains_sets_it_before_torch_works() -> None:
    """Also in the processes that `--gpus` starts, and in a dry run: they are the same verb."""
    script = (
        "import sys\n"
        "from contextlib import contextmanager\n"
        "from types import SimpleNamespace\n"
        "from surefit.stages import training\n"
        "@contextmanager\n"
        "def watched():\n"
        "    print('set', 'torch' in sys.modules)\n"
        "    yield True\n"
        "training.return_freed_memory = watched\n"
        "training._train = lambda *args: print('trained') or {}\n"
        "training.train_run(None, None, world=SimpleNamespace(is_first=False))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["set", "False", "trained"], done.stderr
