"""What a process frees, the system gets back; whoever chose otherwise is left alone; verbs set it before torch."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from surefit.core import env, malloc

GLIBC = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc can be set")
FREED = """
import sys
from surefit.core.malloc import give_back_freed
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 >> 20
set_ = give_back_freed() if sys.argv[1] == "set" else None
kept, blocks, before = [], [], resident()
for _ in range(100):  # as a step does: what it frees lies between what is kept
    blocks.append(bytes(1) * (2 << 20))
    kept.append(bytes(1) * 2000)
full = resident() - before
del blocks
print(set_, full, resident() - before)
"""


def freed(how: str, **variables: str) -> tuple[str, int, int]:
    """(what setting it said, MiB of 100 blocks of 2 MiB, MiB when they were freed)."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", FREED, how], env=plain | variables, capture_output=True, text=True, check=True
    )
    said, full, left = done.stdout.split()
    return said, int(full), int(left)


@GLIBC
def test_what_is_freed_goes_back_to_the_system() -> None:
    said, full, left = freed("set")
    assert said == "True"
    assert full >= 199
    assert left <= 4


@GLIBC
@pytest.mark.parametrize(
    "variables",
    [{"MALLOC_MMAP_THRESHOLD_": str(32 << 20)}, {"GLIBC_TUNABLES": f"glibc.malloc.mmap_threshold={32 << 20}"}],
)
def test_what_the_user_has_set_counts(variables: dict[str, str]) -> None:
    said, full, left = freed("set", **variables)
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
    assert malloc.give_back_freed() is False


def test_a_verb_sets_it_before_torch_is_imported() -> None:
    """Also in the processes that `--gpus` starts: they are the same command."""
    script = (
        "import sys\n"
        "from surefit.core import malloc\n"
        "malloc.give_back_freed = lambda: print('set', 'torch' in sys.modules)\n"
        "from surefit.cli.app import main\n"
        "sys.argv = ['surefit', 'explain', 'MEM001', '--json']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines()[0] == "set False", done.stderr
