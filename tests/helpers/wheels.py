"""SureFit's wheel, and new environments to install it into."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OF_THE_TESTS = ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV", "PYTHONDONTWRITEBYTECODE", "PYTHONSAFEPATH")


def build_wheel(folder: Path) -> Path:
    """Build the wheel as `make wheel` does, and return its file."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def require_registry(folder: Path) -> None:
    """Skip the test if pip gets no package."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--retries", "0", "-d", str(folder)]
    done = subprocess.run([*command, "mdurl"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip(f"no package registry answers: {done.stderr.strip().splitlines()[-1:]}")


def new_environment(folder: Path) -> dict[str, str]:
    """Create a virtual environment; return the variables of a process in it."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    variables = {name: value for name, value in os.environ.items() if name not in OF_THE_TESTS}
    return variables | {"PATH": f"{folder / 'bin'}{os.pathsep}{variables['PATH']}", "VIRTUAL_ENV": str(folder)}


def borrow(environment: dict[str, str], name: str) -> None:
    """Link a distribution of the environment that runs the tests into another one: pip finds it installed there."""
    program = "import sysconfig; print(sysconfig.get_path('purelib'))"
    done = subprocess.run(
        ["python", "-c", program], env=environment, executable=python_in(environment), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    distribution = metadata.distribution(name)
    for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
        (Path(done.stdout.strip()) / part).symlink_to(Path(str(distribution.locate_file(part))))


def python_in(environment: dict[str, str]) -> str:
    """Return the interpreter of an environment from `new_environment`."""
    return str(Path(environment["VIRTUAL_ENV"]) / "bin/python")
