"""Who may make shards in a directory at the same time: one process all of them, or the groups of one division.

DIR/.lock         held alone by whoever makes all shards, shared by groups
    .lock-I-of-N  held by group I of N; the files stay
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from surefit.core.lock import hold_lock
from surefit.core.rundir import remove_leftovers
from surefit.stages.progress_listener import ProgressListener


@contextlib.contextmanager
def lock_shard_directory(directory: Path, group: tuple[int, int] | None, watcher: ProgressListener) -> Iterator[None]:
    """Be the only process that makes these shards; where it makes all of them, clear away what killed ones have left.

    Groups of one division work beside each other, and beside nobody else: two that make the same shard would take each
    other's away.

    Raises:
        MachineError: another process makes some of them.
    """
    held = [directory / ".lock-{}-of-{}".format(*group)] if group else sorted(directory.glob(".lock-*-of-*"))
    with contextlib.ExitStack() as stack:
        for lock in held:
            stack.enter_context(hold_lock(lock, "prepare", watcher.note))
        if group is not None:
            _require_one_division(directory, group[1], watcher)
        stack.enter_context(hold_lock(directory / ".lock", "prepare", watcher.note, shared=group is not None))
        if group is not None:
            yield
            return
        remove_leftovers(directory)
        yield
        remove_leftovers(directory)  # on a cluster a process may have been killed, and another have done its work


def _require_one_division(directory: Path, groups: int, watcher: ProgressListener) -> None:
    """Asked with the own lock held: of two divisions that start at once, one sees the other.

    Raises:
        MachineError: a group of another division is at work.
    """
    for lock in sorted({*directory.glob(".lock-*-of-*")} - {*directory.glob(f".lock-*-of-{groups}")}):
        with hold_lock(lock, "prepare", watcher.note, shared=True):  # other groups ask too, maybe at this moment
            pass
