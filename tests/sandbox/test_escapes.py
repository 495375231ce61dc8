"""Every way out in escapes.py is tried, as whoever runs the tests and, where that is root, as a normal user too."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from surefit.core import jail
from surefit.core.errors import MachineError
from surefit.core.jail import Program, run_program

SCRIPT = Path(__file__).with_name("escapes.py")
spec = importlib.util.spec_from_file_location("escapes", SCRIPT)
assert spec is not None
assert spec.loader is not None
escapes = importlib.util.module_from_spec(spec)
sys.modules["escapes"] = escapes
spec.loader.exec_module(escapes)

MEMORY = 256 * 2**20


def works(way: str) -> bool:
    try:
        return run_program(Program("x = 1"), 20.0, MEMORY, way).status == "passed"
    except MachineError:
        return False


WAYS = [way for way in jail.sandbox_kinds_to_try() if works(way)]
pytestmark = pytest.mark.skipif(not WAYS, reason="this machine has no user namespaces and no bubblewrap")


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Iterator[Path]:
    """A secret in a file that anybody may read, and in the environment."""
    file = tmp_path_factory.mktemp("home") / "id_rsa"
    file.write_text(escapes.SECRET)
    file.chmod(0o644)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("API_KEY", escapes.SECRET)
        yield file


@pytest.fixture(scope="module")
def outcomes(planted: Path) -> dict[str, dict[str, tuple[str, str]]]:
    """Way → name → status and output."""
    library = Path(os.__file__).read_bytes()
    found = {way: escapes.try_all(str(planted), way) for way in WAYS}
    assert Path(os.__file__).read_bytes() == library
    assert planted.read_text() == escapes.SECRET
    return found


def held(name: str, status: str, output: str) -> None:
    assert "ESCAPED" not in output, output
    assert escapes.SECRET not in output
    assert status in escapes.ESCAPES[name].status, (status, output)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", escapes.ESCAPES)
def test_held(name: str, way: str, outcomes) -> None:
    held(name, *outcomes[way][name])


def python_for_nobody() -> str | None:
    """An interpreter that the user nobody may start: root's own may lie in root's home."""
    for python in (sys.executable, shutil.which("python3", path="/usr/local/bin:/usr/bin")):
        if python and sys.version_info >= (3, 11):
            check = [python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))"]
            try:
                if (
                    subprocess.run(check, user=65534, group=65534, extra_groups=[], cwd="/", check=False).returncode
                    == 0
                ):
                    return python
            except OSError:
                continue
    return None


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="the tests above have run as a normal user")
def test_held_as_a_normal_user_too(planted: Path) -> None:
    python = python_for_nobody()
    if python is None:
        pytest.skip("no Python that the user nobody may start")
    with subprocess.Popen(
        [python, str(SCRIPT), str(planted)],
        env={"PYTHONPATH": str(Path(jail.__file__).parents[2]), "PYTHONDONTWRITEBYTECODE": "1"},
        stdout=subprocess.PIPE,
        user=65534,
        group=65534,
        extra_groups=[],
        cwd="/",
    ) as process:
        found, _ = process.communicate(timeout=120)
    if process.returncode != 0:
        pytest.skip("the user nobody may not read this checkout, or has no user namespaces")
    results = json.loads(found)
    assert results.keys() == escapes.ESCAPES.keys()
    for name, (status, output) in results.items():
        held(name, status, output)


def test_each_attempt_succeeds_without_the_sandbox(planted: Path) -> None:
    """The attempts themselves are sound: outside, the harmless ones do what they are refused inside."""
    for name in ("another program", "memory file", "this machine's ports", "unix socket", "home", "proc"):
        source = escapes.source_of(name, str(planted))
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
        assert "ESCAPED" in done.stdout, name


@pytest.mark.parametrize("way", WAYS)
def test_nothing_is_left_behind(way: str) -> None:
    before = set(os.listdir("/tmp")), processes()
    for source in ("import time\ntime.sleep(100)", "print(1)"):
        run_program(Program(f"open('/tmp/left', 'w').write('x')\n{source}"), 0.3, MEMORY, way)
    last = time.monotonic() + 30
    while processes() - before[1] and time.monotonic() < last:
        time.sleep(0.1)
    assert not (processes() - before[1])
    assert not Path("/tmp/left").exists()


def processes() -> set[str]:
    """Processes that run the sandbox's inside, by number."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if jail.INSIDE.name.encode() in entry.read_bytes():
                found.add(entry.parent.name)
        except OSError:
            continue
    return found


def test_without_a_way_in_nothing_is_run(monkeypatch) -> None:
    """Where the kernel refuses, the answer is an error that says what to do, not a run without the sandbox."""
    monkeypatch.setattr(
        jail,
        "_command",
        lambda way, verdict, first: [
            sys.executable,
            "-c",
            f'import os; os.write({verdict}, b\'{{"status": "refused", "detail": "new namespaces: no"}}\')',
        ],
    )
    jail.find_working_sandbox.cache_clear()
    try:
        with pytest.raises(MachineError, match="new namespaces: no") as caught:
            jail.find_working_sandbox()
        assert "bubblewrap" in caught.value.help
    finally:
        jail.find_working_sandbox.cache_clear()


def test_other_systems_are_refused(monkeypatch) -> None:
    jail.find_working_sandbox.cache_clear()
    monkeypatch.setattr(jail.sys, "platform", "darwin")
    with pytest.raises(MachineError, match="Linux only"):
        jail.find_working_sandbox()
    monkeypatch.undo()
    jail.find_working_sandbox.cache_clear()
