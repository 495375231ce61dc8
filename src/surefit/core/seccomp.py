"""System calls denied to untrusted code, as a filter for the kernel (seccomp, classic BPF).

Everything a single-process calculation needs is allowed; new processes, programs, sockets, namespaces, mounts, tracing,
kernel objects that no limit bounds and rarely used parts of the kernel are not.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
from pathlib import Path

_DENIED: dict[str, tuple[int | None, int | None]] = {
    name: (numbers[0], numbers[1])
    for group in json.loads((Path(__file__).parent / "seccomp.json").read_text(encoding="utf-8")).values()
    for name, numbers in group.items()
}
"""Name → number on x86_64 and on aarch64; None if that machine has no such call."""

_MACHINES = {"x86_64": (0, 0xC000003E, 56), "aarch64": (1, 0xC00000B7, 220)}
"""Machine → column of `_DENIED`, AUDIT_ARCH_…, number of clone."""
_CLONE3 = 435
_PRLIMIT64 = (302, 261)
_CLONE_THREAD = 0x10000
_X32 = 0x40000000

_LOAD, _EQUAL, _AT_LEAST, _HAS_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCH, _FIRST_ARGUMENT = 0, 4, 16
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000


def supported(machine: str | None = None) -> bool:
    """Return whether this machine's system call numbers are known."""
    return (machine or platform.machine()) in _MACHINES


def denying_filter(machine: str | None = None) -> bytes:
    """Return the filter as an array of struct sock_filter: EPERM for denied calls, ENOSYS for clone3 (libc then uses
    clone).

    Args:
        machine: x86_64 or aarch64; this machine by default.
    """
    column, arch, clone = _MACHINES[machine or platform.machine()]
    code = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if column == 0:  # the x32 calls of x86_64 have other numbers: none of them is needed
        code += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL)]
    code += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    for numbers in _DENIED.values():
        if (number := numbers[column]) is not None:
            code += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ERRNO | errno.EPERM)]
    # A process may read and lower its own limits, but not the judge's, which is the same user.
    code += [
        (_EQUAL, 0, 4, _PRLIMIT64[column]),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_EQUAL, 1, 0, 0),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    code += [
        (_EQUAL, 0, 3, clone),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_HAS_BIT, 1, 0, _CLONE_THREAD),
        (_RETURN, 0, 0, _ERRNO | errno.EPERM),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
