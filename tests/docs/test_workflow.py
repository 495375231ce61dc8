"""The GitHub workflow of docs/check.md: the commands of its `run:` steps, run as GitHub runs them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from light import ROOT, light_environment
from wheels import new_environment, require_registry

CONFIG = """\
output_dir: runs/x
model: {name_or_path: surefit/nano}
recipe: function_calling
data: {train: surefit/function-calling-train, eval: surefit/function-calling-eval}
train: {max_steps: 120, learning_rate: 1.0e-3}
"""


def workflow() -> dict[str, Any]:
    text = (ROOT / "docs/check.md").read_text()
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "runs-on" in block]
    return dict(yaml.safe_load(block))


def run_steps() -> list[str]:
    (job,) = workflow()["jobs"].values()
    return [step["run"] for step in job["steps"] if "run" in step]


def run_step(step: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run a step with GitHub's default shell."""
    return subprocess.run(
        ["bash", "-e", "-c", step], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


def write_config(folder: Path, text: str) -> None:
    (folder / "configs").mkdir(exist_ok=True)
    (folder / "configs/run.yaml").write_text(text)


def require_findings(folder: Path, environment: dict[str, str]) -> None:
    """Run the step that checks, on a good and on a broken config."""
    (check,) = [step for step in run_steps() if step.startswith("surefit check")]
    (job,) = workflow()["jobs"].values()
    (upload,) = [step for step in job["steps"] if "upload-sarif" in step.get("uses", "")]
    write_config(folder, CONFIG)
    done = run_step(check, folder, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    write_config(folder, CONFIG + "lora: {target_modules: [v_porj]}\n")
    assert run_step(check, folder, environment).returncode == 1, "the job fails"
    results = json.loads((folder / upload["with"]["sarif_file"]).read_text())["runs"][0]["results"]
    assert [result["ruleId"] for result in results if result["level"] == "error"] == ["MOD008"]
    assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "configs/run.yaml"


def test_the_check_step_finds_what_is_wrong_without_torch(tmp_path: Path) -> None:
    (tmp_path / "hide").mkdir()
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin/surefit"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m surefit "$@"\n')
    script.chmod(0o755)
    path = f"{script.parent}{os.pathsep}{os.environ['PATH']}"
    require_findings(tmp_path, light_environment(tmp_path / "hide", PATH=path))


@pytest.mark.slow
def test_the_steps_in_a_new_environment(tmp_path: Path) -> None:
    require_registry(tmp_path)
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (workspace / "surefit" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, workspace / "surefit" / name)
    environment = new_environment(tmp_path / "env")
    (install,) = [step for step in run_steps() if step.startswith("pip install")]
    done = run_step(install, workspace, environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    require_findings(workspace, environment)
