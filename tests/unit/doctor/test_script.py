"""The script of fixes: bash that can be read, run, and does only what was found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from surefit.cli.app import app
from surefit.doctor import probes
from surefit.doctor.probe import Probe
from surefit.doctor.script import fix_script

FOUND = [
    Probe("python", "3.11"),
    Probe("peft", "not installed (needs >=0.19)", "fail", "pip install 'peft>=0.19'", True),
    Probe("port", "taken", "warn", "export MASTER_PORT=40001", True),
    Probe("gpu", "busy", "warn", "another process uses its memory: nvidia-smi names it"),
]


def run(script: str) -> list[str]:
    return subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()


def test_commands_run_with_this_interpreter_and_the_rest_is_said() -> None:
    script = fix_script(FOUND, interpreter="/opt/my env/python")
    assert "'/opt/my env/python' -m pip install 'peft>=0.19'\n" in script
    assert "# gpu: busy\n#   by hand: another process uses its memory" in script
    assert "3.11" not in script
    echoing = fix_script(FOUND, interpreter="echo")
    assert run(echoing + "\necho $MASTER_PORT") == ["-m pip install peft>=0.19", "40001"]


def test_an_error_message_cannot_become_a_command() -> None:
    odd = Probe("torch works", "import fails: a\necho harm\r\nb", "warn", "look\necho harm")
    assert run(fix_script([odd])) == []


def test_nothing_to_mend() -> None:
    assert run(fix_script(FOUND[:1])) == []


def test_the_verb_prints_it_or_writes_a_new_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(probes, "GROUPS", (lambda: iter(FOUND),))
    monkeypatch.setattr("surefit.cli.doctor.installed_stack_probes", lambda: iter(()))

    def doctor(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["doctor", *arguments])
        return result.exit_code, result.stdout or result.stderr

    file = str(tmp_path / "fix.sh")
    code, script = doctor("--fix-script")
    assert (code, script.startswith("#!/usr/bin/env bash\n")) == (3, True)
    assert doctor("--fix-script", file)[0] == 3
    assert Path(file).read_text().rstrip() == script.rstrip()
    code, message = doctor("--fix-script", file)
    assert (code, "E1604" in message) == (2, True)
    code, message = doctor(str(tmp_path / "other.sh"))
    assert (code, "E1023" in message) == (2, True)
