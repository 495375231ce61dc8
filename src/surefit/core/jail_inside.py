"""Program that runs in a fresh interpreter: it enters the sandbox, then runs untrusted code and judges it.

`core.jail` starts it as `python -I -S jail_inside.py own|bwrap VERDICT_FD FIRST_BYTES`. Standard input is the job, two
JSON texts one after the other; the first one is FIRST_BYTES long. It becomes three processes:

    launcher   unshares the namespaces, waits
    judge      process 1 of the namespaces: builds the file system, drops every privilege, runs the tests, judges
    program    runs the untrusted code, answers the judge's calls

The program never has the tests or the pipe for the verdict: the judge reads the second text after it has forked the
program, and the results of its calls are plain data or numbered references. So no exit status, no output, no patched
builtin and no object with an accommodating `__eq__` can fake a pass.

Only the standard library, nothing of surefit: nothing else exists inside the sandbox.
"""

import builtins
import ctypes
import json
import os
import resource
import signal
import sys
import types
from collections.abc import Callable
from typing import Any, NoReturn

OTHER_NAMESPACES = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x20000000 | 0x40000000
"""Namespaces of mounts, control groups, host name, IPC, processes, network."""
USER_NAMESPACE = 0x10000000
NOBODY = 65534
STAGE = "/proc"  # a folder that always exists and holds nothing that the program should see
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_RECURSIVE, READ_ONLY_NOSUID = 442, 0x8000, 1 | 2
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, FILTER_MODE = 1, 4, 22, 38, 2
CAPABILITY_VERSION = 0x20080522
MAX_MESSAGE = 32 * 2**20
libc = ctypes.CDLL(None, use_errno=True)


class SandboxUnavailable(Exception):
    """The machine does not allow the sandbox."""


# ---------------------------------------------------------------- entering the sandbox


def check_syscall(result: int, what: str) -> None:
    if result != 0:
        raise SandboxUnavailable(f"{what}: {os.strerror(ctypes.get_errno())}")


def enter_namespaces() -> None:
    """Enter new namespaces. Real root needs no user namespace for the others; `give_up_rights` makes its own."""
    if os.geteuid() == 0 and libc.unshare(OTHER_NAMESPACES) == 0:
        return
    uid, gid = os.geteuid(), os.getegid()
    check_syscall(libc.unshare(USER_NAMESPACE | OTHER_NAMESPACES), "new namespaces")
    write_text_file("/proc/self/setgroups", "deny")
    write_text_file("/proc/self/gid_map", f"{NOBODY} {gid} 1")
    write_text_file("/proc/self/uid_map", f"{NOBODY} {uid} 1")


def write_text_file(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    texts = [text.encode() if text is not None else None for text in (source, target, kind)]
    data = options.encode() if options is not None else None
    check_syscall(libc.mount(*texts, ctypes.c_ulong(flags), data), f"mounting {target}")


def read_only(path: str) -> None:
    """Make a mount and every one below it read-only, without set-user-id programs."""
    attributes = (ctypes.c_uint64 * 4)(READ_ONLY_NOSUID, 0, 0, 0)
    size = ctypes.c_size_t(ctypes.sizeof(attributes))
    path_bytes = path.encode()
    result = libc.syscall(ctypes.c_long(MOUNT_SETATTR), -100, path_bytes, AT_RECURSIVE, ctypes.byref(attributes), size)
    check_syscall(int(result), f"making {path} read-only (Linux 5.12 or newer)")


def build_file_system(job: dict[str, Any]) -> None:
    """Build an empty root with some read-only paths, folders in them hidden, and a small /tmp: nothing else is
    visible.
    """
    mount("none", "/", None, MS_REC | MS_PRIVATE)
    mount("root", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,mode=755")
    for path in job["visible"]:
        target = STAGE + path
        if os.path.isdir(path):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
        mount(path, target, None, MS_BIND | MS_REC)
    for path in job["hidden"]:
        mount("hidden", STAGE + path, "tmpfs", MS_NOSUID | MS_NODEV, "size=4k,mode=755")
    for link, target in job["links"].items():
        os.symlink(target, STAGE + link)
    os.mkdir(STAGE + "/tmp")
    os.chdir(STAGE)
    check_syscall(int(libc.syscall(ctypes.c_long(PIVOT_ROOT[os.uname().machine]), b".", b".")), "changing the root")
    check_syscall(libc.umount2(b".", 2), "leaving the old root")
    os.chdir("/")
    read_only("/")
    options = f"size={job['disk_bytes']},nr_inodes=1024,mode=1777"
    mount("tmp", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, options)


def give_up_rights(limits: dict[str, int]) -> None:
    """Drop the user, all capabilities and any way to gain one; limit everything that can be counted."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
        # The kernel counts processes by user and user namespace: do not share the count with other processes of nobody.
        check_syscall(libc.unshare(USER_NAMESPACE), "a user namespace")
    header, no_capabilities = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION, 0), (ctypes.c_uint32 * 6)()
    check_syscall(libc.capset(ctypes.byref(header), ctypes.byref(no_capabilities)), "giving up capabilities")
    check_syscall(libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "giving up new privileges")
    check_syscall(libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "closing the process to tracers")
    for name, value in limits.items():
        hard_limit = value + 1 if name == "CPU" else value  # first a signal that identifies the limit, then the kill
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, hard_limit))
    os.chdir("/tmp")


def deny_calls(filter_hex: str) -> None:
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_void_p))

    code = bytes.fromhex(filter_hex)
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Program(len(code) // 8, ctypes.cast(buffer, ctypes.c_void_p))
    check_syscall(libc.prctl(PR_SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0), "filtering system calls")


# ---------------------------------------------------------------- messages between judge and program


class PeerDisconnected(Exception):
    """The other end has closed its pipe."""


class Channel:
    """Messages over two pipes: four bytes of length, then JSON."""

    def __init__(self, incoming: int, outgoing: int) -> None:
        self.incoming, self.outgoing = incoming, outgoing

    def send(self, message: Any) -> None:
        body = json.dumps(message).encode()
        unsent = memoryview(len(body).to_bytes(4, "big") + body)
        try:
            while unsent:
                unsent = unsent[os.write(self.outgoing, unsent) :]
        except BrokenPipeError:
            raise PeerDisconnected from None

    def receive(self) -> Any:
        length = int.from_bytes(self._exactly(4), "big")
        if length > MAX_MESSAGE:
            raise ValueError(f"an answer of {length} bytes")
        return json.loads(self._exactly(length))

    def _exactly(self, count: int) -> bytes:
        parts = []
        while count:
            part = os.read(self.incoming, min(count, 2**20))
            if not part:
                raise PeerDisconnected
            parts.append(part)
            count -= len(part)
        return b"".join(parts)


BUILT_IN = frozenset(thing for thing in vars(builtins).values() if isinstance(thing, type))
CONTAINERS: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


def encode_value(value: Any, keep: Callable[[Any], Any]) -> Any:
    """Encode plain data as JSON, and anything else as the reference that `keep` returns for it."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, list):
        return [encode_value(item, keep) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode_value(key, keep), encode_value(item, keep)] for key, item in value.items()]}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).hex()}
    for name, container in CONTAINERS.items():
        if isinstance(value, container):
            return {name: [encode_value(item, keep) for item in value]}
    if isinstance(value, type) and value in BUILT_IN:
        return {"type": value.__name__}
    return {"reference": keep(value)}


def decode_value(value: Any, refer: Any) -> Any:
    if isinstance(value, list):
        return [decode_value(item, refer) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "reference":
        return refer(inner)
    if kind == "dict":
        return {decode_value(key, refer): decode_value(item, refer) for key, item in inner}
    if kind == "complex":
        return complex(*inner)
    if kind == "bytes":
        return bytes.fromhex(inner)
    if kind == "type" and isinstance(builtin := getattr(builtins, inner), type):
        return builtin
    return CONTAINERS[kind](decode_value(item, refer) for item in inner)


# ---------------------------------------------------------------- the program's process


def serve_program(job: dict[str, Any], channel: Channel) -> NoReturn:
    """Run the untrusted source, then answer calls of its definitions until the judge disconnects."""
    module = types.ModuleType(job["name"])
    sys.modules[job["name"]] = module
    sys.argv = [""]
    objects: list[Any] = []

    def keep(value: Any) -> int:
        objects.append(value)
        return len(objects) - 1

    def find(key: Any) -> Any:
        return getattr(module, key) if isinstance(key, str) else objects[key]

    def load() -> None:
        exec(compile(job["program"], "<program>", "exec"), module.__dict__)

    def call(key: Any, args: Any, named: Any) -> Any:
        return find(key)(*decode_value(args, find), **decode_value(named, find))

    actions: dict[str, Callable[..., Any]] = {
        "load": load,
        "call": call,
        "get": lambda key, name: getattr(find(key), name),
        "set": lambda key, name, value: setattr(find(key), name, decode_value(value, find)),
        "items": lambda key: list(find(key)),
        "truth": lambda key: bool(find(key)),
    }
    while True:
        try:
            action, *details = channel.receive()
        except PeerDisconnected:
            os._exit(0)
        try:
            answer = ["value", encode_value(actions[action](*details), keep)]
        except BaseException as error:
            answer = ["error", type(error).__name__, shortened(error)]
        flush()
        channel.send(answer)


def flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            continue  # the program has replaced the stream


def shortened(error: BaseException) -> str:
    try:
        return str(error)[:500]
    except BaseException:
        return ""


# ---------------------------------------------------------------- the judge's process


class ProgramError(Exception):
    """An exception of the program that is not one of Python's own classes."""


class RemoteReference:
    """The judge's reference to an object in the program: its name or its number.

    Equal to nothing but itself, whatever the program's class defines as equality.
    """

    def __init__(self, channel: Channel, key: int | str) -> None:
        object.__setattr__(self, "_channel", channel)
        object.__setattr__(self, "_key", key)

    def _ask(self, action: str, *details: Any) -> Any:
        channel: Channel = object.__getattribute__(self, "_channel")
        channel.send([action, object.__getattribute__(self, "_key"), *(encode_value(part, key_of) for part in details)])
        return receive_answer(channel)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return RemoteReference._ask(self, "call", list(args), named)

    def __getattr__(self, name: str) -> Any:
        return RemoteReference._ask(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        RemoteReference._ask(self, "set", name, value)

    def __iter__(self) -> Any:
        return iter(RemoteReference._ask(self, "items"))

    def __bool__(self) -> bool:
        return RemoteReference._ask(self, "truth") is True

    def __getitem__(self, key: Any) -> Any:
        return RemoteReference._ask(self, "get", "__getitem__")(key)

    def __len__(self) -> int:
        try:
            return int(RemoteReference._ask(self, "get", "__len__")())
        except AttributeError as error:
            raise TypeError(str(error)) from None

    def __str__(self) -> str:
        return str(RemoteReference._ask(self, "get", "__str__")())


def key_of(value: Any) -> Any:
    if isinstance(value, RemoteReference):
        return object.__getattribute__(value, "_key")
    raise TypeError(f"a {type(value).__name__} cannot be passed to the program")


def receive_answer(channel: Channel) -> Any:
    kind, *details = channel.receive()
    if kind == "value":
        return decode_value(details[0], lambda number: RemoteReference(channel, int(number)))
    name, message = map(str, details)
    if name == "MemoryError":
        raise MemoryError
    builtin = getattr(builtins, name, None)
    if isinstance(builtin, type) and issubclass(builtin, Exception):
        if issubclass(
            builtin, (StopIteration, StopAsyncIteration)
        ):  # would end a loop of the tests as if it were complete
            raise RuntimeError(f"{name}: {message}")
        raise builtin(message)
    raise ProgramError(f"{name}: {message}")


def judge_program(channel: Channel, tests: dict[str, Any], program: int, seconds: int) -> dict[str, str]:
    """Load the program and run the tests against it. Only tests that have run to their end pass."""
    try:
        channel.send(["load"])
        receive_answer(channel)
        names = {name: RemoteReference(channel, name) for name in tests["names"]}
        space: dict[str, Any] = {"__name__": "tests", "__builtins__": builtins}
        exec(compile(tests["before"], "<before the tests>", "exec"), space)
        space.update(names)
        exec(compile(tests["tests"], "<tests>", "exec"), space)
    except PeerDisconnected:
        return program_end_status(program, seconds)
    except MemoryError:
        return {"status": "memory", "detail": "MemoryError"}
    except BaseException as error:
        return {"status": "failed", "detail": f"{type(error).__name__}: {shortened(error)}".removesuffix(": ")}
    return {"status": "passed", "detail": ""}


def program_end_status(program: int, seconds: int) -> dict[str, str]:
    """Return why the program has ended."""
    _, status, usage = os.wait4(program, 0)
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    if number == signal.SIGXCPU or usage.ru_utime + usage.ru_stime >= seconds:
        return {"status": "timeout", "detail": "the limit on processor time"}
    if number:
        return {"status": "failed", "detail": f"the program was killed by {signal.Signals(number).name}"}
    return {"status": "failed", "detail": f"the program exited with status {os.WEXITSTATUS(status)}"}


def run_judge_process(job: dict[str, Any], own: bool, first: int) -> dict[str, str]:
    """Enter the sandbox as the judge, fork the program, read the tests, judge. The program's process does not
    return.
    """
    if own:
        build_file_system(job)
    give_up_rights(job["limits"])
    end_with_the_parent()
    end_in(job["seconds"])
    (program_in, judge_out), (judge_in, program_out) = os.pipe(), os.pipe()
    dev_null = os.open("/dev/null", os.O_RDONLY)
    program = os.fork()
    if program == 0:
        os.dup2(dev_null, 0)
        kept_fds = sorted((program_in, program_out))
        for start, stop in ((3, kept_fds[0]), (kept_fds[0] + 1, kept_fds[1]), (kept_fds[1] + 1, 4096)):
            os.closerange(start, stop)
        deny_calls(job["filter"])
        serve_program(job, Channel(program_in, program_out))
    os.close(program_in)
    os.close(program_out)
    deny_calls(job["filter"])
    tests = json.loads(os.pread(0, os.fstat(0).st_size, first))
    return judge_program(Channel(judge_in, judge_out), tests, program, job["limits"]["CPU"])


def end_with_the_parent() -> None:
    """Let the kernel kill this process when its parent ends for any reason; must be repeated after a change of user."""
    check_syscall(libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "ending with the caller")


def end_in(seconds: int) -> None:
    """Set an alarm after which process 1 ends in any case, and with it everything inside."""
    signal.signal(signal.SIGALRM, lambda number, frame: os._exit(1))
    signal.alarm(seconds)


def send_verdict(verdict: int, message: dict[str, str]) -> None:
    os.write(verdict, json.dumps(message).encode())


def main() -> None:
    own_namespaces, inherited, first = sys.argv[1] == "own", int(sys.argv[2]), int(sys.argv[3])
    # A caller with thousands of open files passes it under a high number. Under the lowest free one it is among the
    # file descriptors that the program's process closes.
    verdict = os.dup(inherited)
    os.close(inherited)
    job = json.loads(os.pread(0, first, 0))
    sys.set_int_max_str_digits(0)
    try:
        end_with_the_parent()
        if own_namespaces:
            enter_namespaces()
            child = os.fork()
            if child:
                os.waitpid(child, 0)
                os._exit(0)
        message = run_judge_process(job, own_namespaces, first)
    except (SandboxUnavailable, OSError) as error:
        message = {"status": "refused", "detail": str(error)}
    send_verdict(verdict, message)
    os._exit(0)


if __name__ == "__main__":
    main()
