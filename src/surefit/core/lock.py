"""Locks so that one process at a time writes to a run directory.

The lock is the kernel's (`flock`), not the existence of the file: it ends with the process that held it, also after
`kill -9` and a crash of the machine, so that stale locks never have to be deleted.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from surefit.core.errors import MachineError


class DirectoryInUse(MachineError):
    """Another process holds the lock."""


_NOT_THERE = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Error numbers of file systems without `flock`."""
LOOK_AGAIN_SECONDS = 0.05
_held: dict[Path, int] = {}
"""Lock file → number of times that this process holds it: a stage may be part of another."""


@contextlib.contextmanager
def hold_lock(
    path: Path,
    stage: str,
    on_note: Callable[[str], None] = lambda text: None,
    *,
    wait: bool = False,
    shared: bool = False,
) -> Iterator[None]:
    """Hold the lock of a directory, whose lock file is `path`.

    Args:
        path: the lock file, which is created if it does not exist, and stays.
        stage: name of the work under the lock, for the message to a second process.
        on_note: called if the file system has no locks; the work continues without.
        wait: wait until the lock is free, for work that is short.
        shared: hold the lock together with other sharers; no process then holds it exclusively.

    Raises:
        DirectoryInUse: another process holds it; the message has its number and host.
        MachineError: the file cannot be written.
    """
    path = path.absolute()
    descriptor = None if path in _held else _open(path, on_note)
    try:
        if descriptor is not None:
            _take(
                descriptor,
                path,
                stage,
                on_note,
                (0 if wait else fcntl.LOCK_NB) | (fcntl.LOCK_SH if shared else fcntl.LOCK_EX),
            )
        _held[path] = _held.get(path, 0) + 1
        try:
            yield
        finally:
            _held[path] -= 1
            if _held[path] == 0:
                del _held[path]
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextlib.contextmanager
def hold_folder_lock(folder: Path) -> Iterator[None]:
    """Wait for the lock of a folder itself, which creates no file in it, and hold it, also against other threads.

    On a file system without locks the work continues without.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        yield
    finally:
        os.close(descriptor)


def lock_holder(path: Path) -> str | None:
    """Return in words which process holds a lock; None if it is free, or the file system has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _holder(descriptor)
    except OSError:
        return None
    finally:
        os.close(descriptor)  # which also releases it
    return None


def _open(path: Path, on_note: Callable[[str], None]) -> int | None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise MachineError(
                f"cannot write: {error.strerror}",
                code="E1057",
                path=path.parent,
                help="choose another output_dir, one that you may write to",
            ) from error
        on_note(f"{path.parent} has no space for a lock file: do not start a second process on it")
        return None


def _take(descriptor: int, path: Path, stage: str, on_note: Callable[[str], None], how: int) -> None:
    try:
        try:
            fcntl.flock(descriptor, how)
        except BlockingIOError:  # maybe only by `lock_holder`, for a moment
            time.sleep(LOOK_AGAIN_SECONDS)
            fcntl.flock(descriptor, how)
    except BlockingIOError:
        raise DirectoryInUse(
            f"in use by {_holder(descriptor)}",
            path=path.parent,
            help="wait for it, stop it, or choose another output_dir; nothing was touched",
        ) from None
    except OSError as error:
        if error.errno not in _NOT_THERE:
            raise
        on_note(f"{path.parent} does not support file locks ({error.strerror}): do not start a second process on it")
        return
    holder = {"pid": os.getpid(), "host": socket.gethostname(), "stage": stage, "since": time.time()}
    with contextlib.suppress(OSError):  # a full disk: the lock holds without the record
        os.ftruncate(descriptor, 0)  # remove the previous holder's record
        if not how & fcntl.LOCK_SH:  # a shared lock has several holders, and the file names none of them
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)


def _holder(descriptor: int) -> str:
    """Name the holder of the lock, as far as the file shows."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"`surefit {holder['stage']}`, process {holder['pid']} on {holder['host']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
