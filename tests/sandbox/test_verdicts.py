"""What counts as passed: tests that have run to their end against what the program returns, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from surefit.core import jail
from surefit.core.errors import MachineError
from surefit.core.jail import OUTPUT_BYTES, JailResult, find_working_sandbox
from surefit.evaluate import sandbox
from surefit.evaluate.sandbox import Program, require_sandbox, run_many, run_python, run_tests

try:
    require_sandbox()
except MachineError as error:
    pytestmark = pytest.mark.skip(reason=error.message)

TESTS = "assert double(2) == 4\nassert double([1, 'a']) == [1, 'a', 1, 'a']\n"
RIGHT = "def double(x):\n    return x * 2\n"


def status(program: str, tests: str = TESTS, names: tuple[str, ...] = ("double",), before: str = "") -> str:
    return run_tests(program, tests, names, before, timeout_s=2.0).status


def test_right_and_wrong() -> None:
    assert status(RIGHT) == "passed"
    wrong = run_tests(RIGHT.replace("2", "3"), TESTS, ("double",))
    assert (wrong.status, wrong.detail) == ("failed", "AssertionError")
    missing = run_tests("x = 1", TESTS, ("double",))
    assert missing.status == "failed"
    assert "no attribute 'double'" in missing.detail
    assert status("def double(x:") == "failed"


ARBITRARY = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    def __len__(self): return 4
    def __hash__(self): return 0
"""
CHEATS = {
    "sys.exit at once": "import sys\nsys.exit(0)",
    "sys.exit in the call": "import sys\ndef double(x):\n    sys.exit(0)",
    "os._exit at once": "import os\nos._exit(0)",
    "os._exit in the call": "import os\ndef double(x):\n    os._exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\nraise SystemExit(0)",
    "print a verdict": 'print(\'{"status": "passed", "detail": ""}\', flush=True)\nimport os\nos._exit(0)',
    "write a verdict everywhere": (
        "import os\nfor fd in range(64):\n    try:\n"
        '        os.write(fd, b\'{"status": "passed", "detail": ""}\')\n    except OSError:\n        pass\nos._exit(0)'
    ),
    "equal to everything": f"{ARBITRARY}\ndef double(x):\n    return Equal()",
    "a list equal to everything": (
        "class L(list):\n    def __eq__(self, other): return True\ndef double(x):\n    return L()"
    ),
    "an int equal to everything": (
        "class N(int):\n    def __eq__(self, other): return True\ndef double(x):\n    return N()"
    ),
    "patch the builtins": (
        "import builtins\nbuiltins.AssertionError = type('E', (Exception,), {})\nbuiltins.exec = lambda *a: None\n"
        "def double(x):\n    return 0"
    ),
    "patch the harness": (
        "import sys\nframe = sys._getframe()\nwhile frame:\n    for name in ('judge', 'answered', 'say', 'packed'):\n"
        "        if name in frame.f_globals:\n"
        "            frame.f_globals[name] = lambda *a, **k: {'status': 'passed'}\n"
        "    frame = frame.f_back\ndef double(x):\n    return 0"
    ),
    "find the tests in memory": (
        "import gc, sys\ndef double(x):\n"
        "    for thing in gc.get_objects():\n"
        "        texts = [v for v in thing.values() if isinstance(v, str)] if isinstance(thing, dict) else []\n"
        "        if any('assert' + ' double' in v for v in texts):\n"
        "            raise SystemError('ESCAPED')\n    return 0"
    ),
    "speak the harness's language": (
        "import os, struct\ndef double(x):\n"
        "    body = b'[\"value\", null]'\n    for fd in range(3, 20):\n        try:\n"
        "            os.write(fd, struct.pack('>I', len(body)) + body)\n        except OSError:\n            pass\n"
        "    return 0"
    ),
    "a type for an answer": "def double(x):\n    return type",
    "recursion without end": "def double(x):\n    y = []\n    y.append(y)\n    return y",
    "an assertion of its own": "def double(x):\n    raise StopIteration",
}


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_no_pass(name: str) -> None:
    result = run_tests(CHEATS[name], TESTS, ("double",), timeout_s=2.0)
    assert result.status == "failed", result
    assert "ESCAPED" not in result.detail


def test_values_cross_as_they_are() -> None:
    values = [
        None, True, 0, -1, 10**4000, 1.5, float("inf"), "", "a\u2028\ud800é", b"\x00\xff", 2j, [], (), (1,), {1, 2},
        frozenset({1}), {}, {"a": [1, (2, {3})], (1, 2): {"b": None}, 1: int}, [[1], [[]]], str,
    ]  # fmt: skip
    before = "inf = float('inf')\nnan = float('nan')"
    tests = "\n".join(
        f"x = same({text})\nassert x == {text} and type(x) is type({text}), x"
        for text in (repr(v) if not isinstance(v, type) else v.__name__ for v in values)
        if "class" not in text
    )
    tests += "\nassert same(nan) != same(nan)\nassert same(x=(1, 2)) == (1, 2)\n"
    result = run_tests(
        "def same(x):\n    return x", "import sys\nsys.set_int_max_str_digits(0)\n" + tests, ("same",), before
    )
    assert result.status == "passed", result.detail


def test_objects_stay_with_the_program() -> None:
    program = (
        "class Node:\n    def __init__(self, data):\n        self.data, self.left = data, None\n"
        "def depth(node):\n    return 0 if node is None else 1 + depth(node.left)\n"
        "def numbers(n):\n    yield from range(n)\n"
        "import re\ndef found(text):\n    return re.search('b', text)\n"
    )
    tests = (
        "root = Node(1)\nroot.left = Node(2)\nassert depth(root) == 2 and root.left.data == 2\n"
        "assert list(numbers(3)) == [0, 1, 2]\nassert root != Node(1)\n"
        "assert found('abc') and not found('xyz')\nassert found('abc').span() == (1, 2)\n"
    )
    assert status(program, tests, ("Node", "depth", "numbers", "found")) == "passed"


def test_exceptions_cross_by_name() -> None:
    program = "class Own(Exception): pass\ndef f(x):\n    raise {1: ValueError, 2: Own}[x]('why')"
    caught = "try:\n    f(1)\nexcept ValueError as error:\n    assert str(error) == 'why'\nelse:\n    assert False\n"
    assert status(program, caught, ("f",)) == "passed"
    assert run_tests(program, "f(2)", ("f",)).detail == "ProgramError: Own: why"


def test_tests_may_need_more_than_the_program() -> None:
    assert (
        status("def f(x):\n    return x + 1", "assert f(one) == isqrt(4)", ("f",), "from math import isqrt\none = 1")
        == "passed"
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("print(6 * 7)", "passed"),
        ("raise ValueError('no')", "failed"),
        ("import sys\nsys.exit(0)", "failed"),
        ("x = bytearray(2**40)", "memory"),
        ("while True: pass", "timeout"),
        ("input()", "failed"),
    ],
)
def test_run_python(source: str, expected: str) -> None:
    assert run_python(source, timeout_s=1.0 if expected == "timeout" else 20.0).status == expected


def test_output_is_bounded_and_kept() -> None:
    assert run_python("print('héllo')").output == "héllo\n"
    long = run_python("for _ in range(10**6):\n    print('x' * 100)", timeout_s=5.0)
    assert long.status == "passed"
    assert len(long.output) == OUTPUT_BYTES
    assert run_python("import sys\nsys.stderr.write('to the other stream')").output == "to the other stream"
    assert run_python("import sys\nsys.stdout.buffer.write(b'\\xff\\n')").output == "\ufffd\n"


def test_a_test_without_end_is_a_timeout() -> None:
    assert run_tests(RIGHT, "while True: double(1)", ("double",), timeout_s=0.5).status == "timeout"


def test_many_at_once_keep_their_order_and_ends() -> None:
    seen = []
    jobs = [Program(RIGHT, f"assert double({n}) == {n if n % 3 else 2 * n}", ("double",)) for n in range(12)]
    results = run_many(jobs, workers=4, on_result=lambda number, result: seen.append(number))
    assert [result.status == "passed" for result in results] == [n % 3 == 0 for n in range(12)]
    assert seen == list(range(12))


@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM])
def test_a_program_ends_with_its_caller_however_that_ends(signal_: int) -> None:
    """SIGKILL leaves the caller no time for a `finally`: the kernel ends what it started."""
    mark = f"{os.getpid()}{time.monotonic_ns()}"
    script = (
        "from surefit.evaluate.sandbox import run_python\n"
        f"run_python('import time\\nx = {mark}\\ntime.sleep(60)', timeout_s=20)\n"
    )
    caller = subprocess.Popen([sys.executable, "-c", script])
    inside: set[int] = set()
    limit = time.monotonic() + 60
    while len(inside) < 3 and time.monotonic() < limit:
        inside = descendants(caller.pid)
        time.sleep(0.05)
    assert len(inside) >= 3
    caller.send_signal(signal_)
    caller.wait()
    limit = time.monotonic() + 10
    while any(alive(number) for number in inside) and time.monotonic() < limit:
        time.sleep(0.05)
    assert not [number for number in inside if alive(number)]


def descendants(number: int) -> set[int]:
    found: set[int] = set()
    waiting = [number]
    while waiting:
        parent = waiting.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(child) for child in task.read_text().split()]
            except OSError:
                continue
            found |= set(children)
            waiting += children
    return found


def alive(number: int) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except OSError:
        return False


def test_an_interruption_does_not_wait_for_the_programs() -> None:
    def stop(number: int, result: object) -> None:
        raise KeyboardInterrupt

    jobs = [Program("pass"), Program("import time\ntime.sleep(60)")]
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_many(jobs, timeout_s=20, workers=2, on_result=stop)
    assert time.monotonic() - started < 15


def test_an_interruption_ends_what_is_only_just_being_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def late(job: Program, *limits: object) -> JailResult:
        if job.program != "pass":
            time.sleep(0.5)  # not among the running ones yet when the interruption comes
        return jail.run_program(job, *limits)

    def stop(number: int, result: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox, "run_program", late)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_many([Program("pass"), Program("import time\ntime.sleep(60)")], timeout_s=20, workers=2, on_result=stop)
    assert time.monotonic() - started < 15


@pytest.mark.parametrize(
    ("program", "told"),
    [("x = 1\n" * 900_000, "the program has 5,400,000 characters"), ("x = '\ud800'", "a lone surrogate")],
)
def test_a_source_that_no_judge_should_read_is_a_failure_of_the_program(program: str, told: str) -> None:
    result = run_python(program)
    assert result.status == "failed"
    assert told in result.detail


def test_the_judges_limits_are_not_the_programs_to_lower() -> None:
    lower = "import resource\nresource.prlimit(1, resource.RLIMIT_NOFILE, (0, 0))"
    assert run_python(lower).detail.startswith("PermissionError")
    own = "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (8, 8))\nprint(resource.getrlimit(7)[0])"
    assert run_python(own).output == "8\n"


def test_a_machine_without_files_in_memory_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> int:
        raise PermissionError(1, "Operation not permitted")

    find_working_sandbox()
    monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(MachineError, match="it cannot create a file in memory"):
        run_python("pass")


def test_a_python_under_tmp_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jail, "library_paths", lambda: (("/tmp/python/lib",), (), {}))
    with pytest.raises(MachineError, match="under /tmp"):
        jail.find_working_sandbox.__wrapped__()
