"""Locks for making shards in one directory: either one process makes all of them, or the groups of one division do.

DIR/.lock         held exclusively by a process that makes all shards, shared by groups
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
    """Lock the shards that this process makes; if it makes all of them, remove the leftovers of killed processes.

    Groups of one division work at the same time, but exclude all others: two processes that make the same shard would
    delete each other's.

    Raises:
        MachineError: another process makes some of them.
    """
    lock_files = [directory / ".lock-{}-of-{}".format(*group)] if group else sorted(directory.glob(".lock-*-of-*"))
    with contextlib.ExitStack() as stack:
        for lock in lock_files:
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
    """Raise if another division is at work. Called with the group's own lock held, so that of two divisions that start
    at once, one sees the other.

    Raises:
        MachineError: a group of another division is at work.
    """
    for lock in sorted({*directory.glob(".lock-*-of-*")} - {*directory.glob(f".lock-*-of-{groups}")}):
        with hold_lock(
            lock, "prepare", watcher.note, shared=True
        ):  # other groups also test this lock, maybe at this moment
            pass
