"""What an installer and a newcomer get: metadata, pins, the files in the wheel, configs that parse."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points, metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

import surefit
from surefit.config.load import load_config

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


def pins() -> dict[str, Version]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    return {normal(name): Version(version) for name, _, version in (line.partition("==") for line in lines)}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_installed_metadata_is_this_package() -> None:
    installed = metadata("surefit")
    assert installed["Version"] == surefit.__version__
    assert installed["License-Expression"] == "Apache-2.0"
    assert {"3.11", "3.12", "3.13"} == {
        version for version in ("3.11", "3.12", "3.13", "3.14") if python_allows(version)
    }
    (script,) = entry_points(group="console_scripts", name="surefit")
    assert callable(script.load())


def python_allows(version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(metadata("surefit")["Requires-Python"]).contains(version)


def test_the_changelog_knows_this_version() -> None:
    assert f"## [{surefit.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_every_dependency_is_pinned_inside_its_range() -> None:
    tested = pins()
    for line in requires("surefit") or []:
        wanted = Requirement(line)
        if wanted.name == "surefit":  # an extra that includes others
            continue
        extra = wanted.marker is not None and not wanted.marker.evaluate({"extra": ""})
        if extra and not any(wanted.marker.evaluate({"extra": name}) for name in ("dev", "docs")):  # type: ignore[union-attr]
            continue
        assert normal(wanted.name) in tested, f"{line} is missing from constraints.txt: make lock"
        assert wanted.specifier.contains(tested[normal(wanted.name)]), (
            f"constraints.txt is outside of {line}: make lock"
        )


def test_the_torch_pin_admits_the_cpu_build() -> None:
    version = pins()["torch"]
    assert version.local is None
    assert Requirement(f"torch=={version}").specifier.contains(f"{version}+cpu")


def test_the_core_stays_small() -> None:
    core = {Requirement(line).name for line in requires("surefit") or [] if "extra" not in line}
    assert core.isdisjoint(
        {"triton", "bitsandbytes", "deepspeed", "mlflow", "wandb", "prometheus-client", "xgrammar", "trl"}
    )


def test_the_wheel_carries_every_file_of_the_package(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=ROOT, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("surefit/")}
    files = (path for path in (ROOT / "src/surefit").rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    assert packed == {path.relative_to(ROOT / "src").as_posix() for path in files}
    assert {"surefit/py.typed", "surefit/nano/model.safetensors", "surefit/nano/README.md"} <= packed


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_every_config_parses(path: Path) -> None:
    load_config(path)


def test_there_is_no_secret_in_the_example_environment() -> None:
    lines = (ROOT / ".env.example").read_text().splitlines()
    values = [line for line in lines if line and not line.startswith("#")]
    assert values == [], "every line of .env.example is commented out: it explains, it sets nothing"


def test_pytest_markers_are_left_out_by_default() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    chosen = options["addopts"][options["addopts"].index("-m") + 1]
    for marker in options["markers"]:
        assert f"not {marker.partition(':')[0]}" in chosen
