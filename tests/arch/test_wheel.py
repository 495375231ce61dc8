"""The wheel in an empty environment: how much the core installs, what it does, and that the extra trains."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from wheels import ROOT, borrow, build_wheel, new_environment, python_in, require_registry

pytestmark = pytest.mark.slow

MOST_WHEEL_BYTES = 8_000_000
MOST_PACKAGES, MOST_BYTES = 30, 150_000_000
"""Of the core, SureFit itself not counted as a package."""
SIZES = """
import json
from importlib import metadata
print(json.dumps({
    found.metadata["Name"].lower(): sum(file.size or 0 for file in found.files or ())
    for found in metadata.distributions() if found.metadata["Name"] not in ("pip", "setuptools")
}))
"""
AXOLOTL = """\
base_model: Qwen/Qwen2.5-0.5B-Instruct
datasets:
  - {path: rows.jsonl, type: alpaca}
adapter: lora
lora_r: 8
lerning_rate: 0.0002
"""
Surefit = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("dist"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A new environment with the wheel and the packages of its core."""
    folder = tmp_path_factory.mktemp("wheel")
    require_registry(folder)
    variables = new_environment(folder / "env") | {"SUREFIT_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1"}
    install(variables, str(wheel))
    return variables


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    rows = [{"instruction": f"What is {n} plus {n}?", "output": f"It is {2 * n}."} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    return folder


@pytest.fixture
def surefit(environment: dict[str, str], folder: Path) -> Surefit:
    """Runs a verb with `--json`; returns its exit code and its object."""

    def run(*arguments: object) -> tuple[int, dict[str, Any]]:
        script = Path(environment["VIRTUAL_ENV"]) / "bin/surefit"
        done = subprocess.run(
            [str(script), *map(str, arguments), "--json"], cwd=folder, env=environment, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr
        return done.returncode, json.loads(done.stdout.splitlines()[-1])

    return run


def install(environment: dict[str, str], *arguments: str) -> None:
    pip = [python_in(environment), "-m", "pip", "install", "--quiet", "--no-compile", "-c", ROOT / "constraints.txt"]
    done = subprocess.run([*pip, *arguments], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_wheel_is_small_and_the_same_every_time(wheel: Path, tmp_path: Path) -> None:
    assert wheel.stat().st_size < MOST_WHEEL_BYTES
    assert build_wheel(tmp_path).read_bytes() == wheel.read_bytes()


def test_the_core_is_small(environment: dict[str, str]) -> None:
    done = subprocess.run(
        [python_in(environment), "-c", SIZES], env=environment, capture_output=True, text=True, check=True
    )
    sizes: dict[str, int] = json.loads(done.stdout)
    assert len(sizes) - 1 <= MOST_PACKAGES, sorted(sizes)
    assert sum(sizes.values()) <= MOST_BYTES, sizes
    assert "surefit" in sizes
    assert not {"torch", "transformers", "pyarrow"} & set(sizes)


def test_the_core_checks_audits_imports_and_writes_configs(surefit: Surefit, folder: Path) -> None:
    code, report = surefit("check", "axolotl.yaml")
    assert (code, "ARG002" in {found["code"] for found in report["findings"]}) == (1, True)
    code, passport = surefit("audit", "rows.jsonl")
    assert (code, passport["rows"]) == (0, 40)
    assert surefit("import", "axolotl.yaml", "--output", "imported.yaml")[0] == 0
    assert surefit("explain", "SCH001")[0] == 0
    assert surefit("init", "--data", "rows.jsonl", "--model", "surefit/nano", "--output", "own.yaml")[0] == 0
    assert surefit("check", "own.yaml")[0] == 0
    code, planned = surefit("plan", "own.yaml", "--gpu", "4090")
    assert (code, planned["estimate"]["verdict"]) == (0, "fits")
    code, machine = surefit("doctor")
    assert (code, machine["failed"]) == (0, [])
    assert {probe["name"]: probe["verdict"] for probe in machine["probes"]}["torch works"] == "warn"


def test_the_error_without_torch_names_the_command_after_which_it_trains(
    surefit: Surefit, environment: dict[str, str], wheel: Path, folder: Path
) -> None:
    """Last in this file: it adds the extra to the environment."""
    config = ROOT / "src/surefit/samples/demo.yaml"
    run = folder / "runs/demo"
    train = ["train", config, "--set", f"output_dir={run}", "--set", "train.max_steps=4"]
    code, error = surefit(*train)
    assert (code, error["code"], error["exit_code"]) == (3, "E1090", 3)
    assert not run.exists()
    pip, command, requirement = shlex.split(error["help"])
    assert (pip, command, requirement) == ("pip", "install", f"{wheel}[train]")
    if "+cpu" not in metadata.version("torch"):
        pytest.skip("torch here is no CPU build: what would be installed is gigabytes")
    borrow(environment, "torch")
    install(environment, requirement)
    code, trained = surefit(*train)
    assert (code, trained["steps"]) == (0, 4)
    code, certificate = surefit("merge", run)
    assert (code, certificate["passed"]) == (0, True)
