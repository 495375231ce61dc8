"""Who may make shards in a directory at the same time: one process all of them, or the groups of one division.

DIR/.lock         held alone by whoever makes all shards, shared by groups
    .lock-I-of-N  held by group I of N; the files stay
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from surefit.core.lock import locked
from surefit.core.rundir import sweep
from surefit.stages.progress_listener import Watcher


@contextlib.contextmanager
def alone(directory: Path, group: tuple[int, int] | None, watcher: Watcher) -> Iterator[None]:
    """Be the only process that makes these shards; where it makes all of them, clear away what killed ones have left.

    Groups of one division work beside each other, and beside nobody else: two that make the same shard would take each
    other's away.

    Raises:
        MachineError: another process makes some of them.
    """
    held = [directory / ".lock-{}-of-{}".format(*group)] if group else sorted(directory.glob(".lock-*-of-*"))
    with contextlib.ExitStack() as stack:
        for lock in held:
            stack.enter_context(locked(lock, "prepare", watcher.note))
        if group is not None:
            _require_one_division(directory, group[1], watcher)
        stack.enter_context(locked(directory / ".lock", "prepare", watcher.note, shared=group is not None))
        if group is not None:
            yield
            return
        sweep(directory)
        yield
        sweep(directory)  # on a cluster a process may have been killed, and another have done its work


def _require_one_division(directory: Path, groups: int, watcher: Watcher) -> None:
    """Asked with the own lock held: of two divisions that start at once, one sees the other.

    Raises:
        MachineError: a group of another division is at work.
    """
    for lock in sorted({*directory.glob(".lock-*-of-*")} - {*directory.glob(f".lock-*-of-{groups}")}):
        with locked(lock, "prepare", watcher.note, shared=True):  # other groups ask too, maybe at this moment
            pass
