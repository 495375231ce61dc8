"""Ways out that a program tries. Each prints ESCAPED where it gets out; what it expects to happen stands beside it.

Run as `python escapes.py HOME_FILE`, it tries them all as whoever runs it and prints {name: [status, output]}: needs
nothing but Python and surefit's sources, so that it also runs as a user who has no more.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surefit.core.jail import SandboxKind

SECRET = "sesame-5f1c"
"""Planted in a file and in the environment; stands in no program, so that printing it is finding it."""


@dataclass(frozen=True)
class Escape:
    source: str
    status: frozenset[str] = frozenset({"passed"})
    """What may come of it; "passed" where the program is refused what it asks for and goes on."""


def tried(body: str, *errors: str) -> Escape:
    """`body` in a try: an OSError (or other) is the refusal that is hoped for."""
    indented = "\n".join("    " + line for line in body.strip().splitlines())
    names = ", ".join(("OSError", *errors))
    return Escape(f"try:\n{indented}\n    print('ESCAPED')\nexcept ({names}) as error:\n    print('held', error)\n")


def ends(source: str, *status: str) -> Escape:
    return Escape(source, frozenset(status))


CALL = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *arguments):
    if libc.syscall(number, *arguments) == -1:
        raise OSError(ctypes.get_errno(), "refused")
"""

ESCAPES: dict[str, Escape] = {
    "fork bomb": ends("import os\nwhile True:\n    os.fork()", "failed"),
    "fork bomb that goes on": ends(
        "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass", "timeout"
    ),
    "thread bomb": ends(
        "import threading, time\nthreading.stack_size(32768)\n"
        "while True:\n    threading.Thread(target=time.sleep, args=(9,)).start()",
        "failed",
    ),
    "another program": tried("import subprocess\nsubprocess.run(['/bin/sh', '-c', 'true'])"),
    "exec": tried("import os\nos.execv('/usr/bin/python3', ['python3', '-c', 'print(1)'])"),
    "memory bomb": ends("x = []\nwhile True:\n    x.append(bytearray(2**24))", "memory"),
    "shared memory bomb": tried(f"{CALL}\ncall(29 if os.uname().machine == 'x86_64' else 194, 0, 2**24, 0o600)"),
    "memory file": tried("import os\nos.memfd_create('x')"),
    "infinite loop": ends("while True: pass", "timeout"),
    "endless sleep": ends("import time\ntime.sleep(1000)", "timeout"),
    "loop that ignores signals": ends(
        "import signal\nfor number in range(1, 65):\n    try:\n        signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError):\n        pass\nwhile True: pass",
        "timeout",
        "failed",
    ),
    "stack overflow": ends(
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f.__call__()\nf()", "failed", "memory", "timeout"
    ),
    "internet": tried("import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=1)"),
    "this machine's ports": tried("import socket\nsocket.socket().bind(('127.0.0.1', 0))"),
    "unix socket": tried("import socket\nsocket.socket(socket.AF_UNIX)"),
    "home": tried("print(open(HOME_FILE).read())"),
    "password file": tried("print(open('/etc/passwd').read())"),
    "environment": Escape("import os\nprint(dict(os.environ))"),
    "proc": tried("print(open('/proc/self/environ').read(), open('/proc/1/cmdline').read())"),
    "own proc": tried(
        f"{CALL}\nos.mkdir('/tmp/p')\nif libc.mount(b'proc', b'/tmp/p', b'proc', 0, None): raise OSError"
    ),
    "write to the library": tried("import os\nopen(os.__file__, 'a').write('x = 1')"),
    "write to the root": tried("open('/x', 'w').write('x')"),
    "write through a link": tried("import os\nos.symlink(os.__file__, '/tmp/l')\nopen('/tmp/l', 'a').write('x')"),
    "read through a link": tried("import os\nos.symlink(HOME_FILE, '/tmp/m')\nprint(open('/tmp/m').read())"),
    "up and out": tried("import os\nos.chdir('/tmp')\nprint(open('../../../../..' + HOME_FILE).read())"),
    "chroot": tried("import os\nos.mkdir('/tmp/r')\nos.chroot('/tmp/r')"),
    "full disk": tried(
        "for n in range(64):\n    with open(f'/tmp/{n}', 'wb') as file:\n        file.write(bytes(2**20))",
        "MemoryError",
    ),
    "many files": tried("for n in range(5000): open(f'/tmp/n{n}', 'w').close()"),
    "open files": tried("files = [open('/dev/null') for _ in range(1000)]"),
    "run what it wrote": tried(
        "import _ctypes, ctypes, shutil\nshutil.copy(_ctypes.__file__, '/tmp/x.so')\nctypes.CDLL('/tmp/x.so')"
    ),
    "kill its parent": Escape(
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(1, signal.SIGKILL)\nprint('still here')"
    ),
    "kill everybody": Escape(
        "import os, signal\ntry:\n    os.kill(-1, signal.SIGKILL)\nexcept ProcessLookupError:\n    pass\n"
        "print('still here')",
        frozenset({"passed", "failed"}),
    ),
    "trace its parent": tried(f"{CALL}\ncall(101 if os.uname().machine == 'x86_64' else 117, 16, os.getppid(), 0, 0)"),
    "read its parent's memory": tried(
        f"{CALL}\ncall(310 if os.uname().machine == 'x86_64' else 270, os.getppid(), 0, 0, 0, 0, 0)"
    ),
    "take its parent's pipe": tried(f"{CALL}\nfd = call(434, 1, 0)\ncall(438, fd, 3, 0)"),
    "new user namespace": tried(f"{CALL}\nif libc.unshare(0x10000000): raise OSError"),
    "become root": tried("import os\nos.setuid(0)"),
    "other numbers of system calls": ends(f"{CALL}\ncall(0x40000000 + 39)", "failed"),
    "raise its limits": tried("import resource\nresource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))", "ValueError"),
    "device": tried("import os\nos.mknod('/tmp/d', 0o020666, os.makedev(1, 1))"),
    "leave a daemon": tried("import os\nif os.fork() == 0:\n    os.setsid()\n    import time\n    time.sleep(100)"),
}


def source_of(name: str, home_file: str) -> str:
    return f"HOME_FILE = {home_file!r}\n{ESCAPES[name].source}"


def try_all(home_file: str, way: SandboxKind | None = None) -> dict[str, tuple[str, str]]:
    """Name → status and whatever was said, of every attempt; several at once, as most of the time is waiting."""
    from surefit.core.jail import Program, run_program

    def attempt(name: str) -> tuple[str, str]:
        # What ends by itself may take its time on a busy machine; what does not is stopped soon.
        seconds = 1.0 if "timeout" in ESCAPES[name].status else 20.0
        outcome = run_program(Program(source_of(name, home_file), module="__main__"), seconds, 256 * 2**20, way)
        return outcome.status, outcome.detail + outcome.output

    with ThreadPoolExecutor(6) as pool:
        return dict(zip(ESCAPES, pool.map(attempt, ESCAPES), strict=True))


if __name__ == "__main__":
    print(json.dumps(try_all(sys.argv[1])))
