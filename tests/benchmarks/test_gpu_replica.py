"""A replica of the GPU machine on a CPU: its transformers, and of the packages that it lacks only what the kit brings.

Torch is borrowed from the interpreter that runs the tests, so the replica has that one's version of Python. With the
GPU machine's own, 3.12, what needs no torch is tried as well.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
ITS_PYTHON = "3.12"
WITHOUT_TORCH = ("transformers==5.17.*", "jinja2", "pyarrow", "rich", "typer")
THERE = (
    *WITHOUT_TORCH, "accelerate", "hypothesis", "nvidia-ml-py", "peft", "prometheus-client", "pytest", "tensorboard",
)  # fmt: skip
MISSING = (
    "bitsandbytes", "datasets", "deepspeed", "liger-kernel", "mlflow", "pandas", "penman", "pydantic", "pydantic-core",
    "rouge-score", "smatch", "trl", "xgrammar",
)  # fmt: skip


def run(*command: object, seconds: float = 600, **more: Any) -> subprocess.CompletedProcess[str]:
    """Of the replica: nothing of the environment that runs the tests is in its path."""
    hidden = ("PYTHONPATH", "PYTEST_ADDOPTS", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"} | more
    return subprocess.run(
        [str(word) for word in command], env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
        timeout=seconds,
    )  # fmt: skip


def succeed(*command: object, **more: Any) -> str:
    done = run(*command, **more)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


def install(folder: Path, python: str, packages: tuple[str, ...], borrowed: tuple[str, ...] = ()) -> Path:
    """The interpreter of a new environment."""
    succeed(python, "-m", "venv", "--without-pip", folder)
    new = folder / "bin/python"
    site = Path(succeed(new, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in borrowed:
        distribution = metadata.distribution(name)
        for part in {file.parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}:
            (site / part).symlink_to(Path(str(distribution.locate_file(part))))
    pip = [sys.executable, "-m", "pip", "--python", new]
    succeed(*pip, "install", "--quiet", "--no-compile", *packages)
    succeed(*pip, "uninstall", "--quiet", "--yes", *MISSING)  # a new typer brings pydantic
    return new


@pytest.fixture(scope="module", autouse=True)
def _registry(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("registry")
    asked = ["download", "--quiet", "--no-deps", "--dest", str(folder), WITHOUT_TORCH[0]]
    if run(sys.executable, "-m", "pip", *asked, "--retries", "0").returncode != 0:
        pytest.skip(f"no package registry from which pip gets {WITHOUT_TORCH[0]}")


@pytest.fixture(scope="module")
def replica(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if "+cpu" not in metadata.version("torch"):
        pytest.skip("torch here is no CPU build, and its libraries are gigabytes")
    return install(tmp_path_factory.mktemp("replica") / "env", sys.executable, THERE, ("torch",))


def filled_kit(folder: Path, python: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `make gpu-kit` fills, without the predictions, which take a minute: no plan is compared without a GPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import gpu_kit

    gpu_kit.fetch(folder, python)
    (folder / gpu_kit.PREDICTIONS).write_text("{}")
    assert gpu_kit.check(folder) == []
    return folder


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def process_of(stage: str, out: Path) -> int:
    """Waits for it."""
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_text().split("\0")
            except OSError:
                continue
            if stage in words and str(out) in words and any(word.endswith("gpu_stages.py") for word in words):
                return int(entry.name)
        time.sleep(0.05)
    raise AssertionError(f"{stage} was not begun")


def wait_for(text: str, file: Path) -> None:
    deadline = time.monotonic() + 300
    while text not in file.read_text():
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_a_day_in_the_replica_with_a_stage_killed(
    replica: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit = filled_kit(tmp_path / "kit", f"{sys.version_info.major}.{sys.version_info.minor}", monkeypatch)
    out, driver = tmp_path / "day", BENCHMARKS / "gpu_day.py"
    own = [replica, driver, "--out", out, "--kit", kit, "--miniature", "--json", "--minutes", "20"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    day = subprocess.Popen(
        [str(word) for word in own], env=environment | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL
    )
    stage = process_of("lora-1b", out)
    wait_for('"ceiling"', out / "items.jsonl")
    os.kill(stage, signal.SIGKILL)
    assert day.wait(900) == 1
    failed = [(line["stage"], line["reason"][:8]) for line in read(out / "day.jsonl") if line["status"] == "failed"]
    assert failed == [("lora-1b", "signal 9")], "the next stages ran"

    # "To run a stage again, delete its line."
    kept = [line for line in (out / "day.jsonl").read_text().splitlines() if '"lora-1b"' not in line]
    (out / "day.jsonl").write_text("".join(f"{line}\n" for line in kept))
    stages = json.loads(succeed(*own, seconds=900).splitlines()[-1])["stages"]
    assert [(line["stage"], line["status"], line["reason"]) for line in stages] == [
        ("environment", "ended", ""),
        ("tests", "skipped", "no GPU"),
        ("attention", "ended", ""),
        ("calibration", "ended", ""),
        ("lora-1b", "ended", ""),
        ("lora-8b", "ended", ""),
        ("qlora-7b", "skipped", "no GPU"),
        ("trl", "ended", ""),
        ("dpo", "ended", ""),
        ("qlora-dpo", "ended", ""),
        ("dpo-plan", "ended", ""),
        ("shared", "ended", ""),
        ("plan", "skipped", "not measured: no GPU"),
        ("first-run", "ended", ""),
        ("long", "ended", ""),
    ]
    assert [line["stage"] for line in stages if line["again"]] == ["lora-1b"]

    items = {(item["stage"], item["item"]): item for item in read(out / "items.jsonl")}
    assert len(items) == len(read(out / "items.jsonl")), "what was measured before the kill was not measured again"
    assert items["environment", "record"]["versions"]["transformers"].startswith("5.17.")
    assert "collected" in items["tests", "collection"]["summary"]
    losses = [item["loss"] for (stage, _), item in items.items() if stage in ("lora-1b", "trl") and "loss" in item]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-3), "they train the same"
    assert "aten::" in (out / "profile-lora-1b-eager.txt").read_text()
    walked = items["first-run", "run"]
    assert (walked["exit_code"] in (0, 1, 5), walked["measured"]["steps"]) == (True, 2)
    assert {"train", "merge", "evaluate", "report"} <= walked["seconds_by_stage"].keys()
    assert 0 < walked["planned"]["low_bytes"] < walked["planned"]["high_bytes"]
    assert walked["measured"]["bytes"] > 0
    assert not (out / "first-run").exists()
    became = json.loads((out / "kit.json").read_text())
    assert all(word == "unpacked" or word.endswith("is installed") for word in became.values()), became
    unpacked = {name.partition("-")[0].lower().replace("_", "-") for name in became if became[name] == "unpacked"}
    assert unpacked >= {"pydantic", "datasets", "bitsandbytes", "trl", "pandas"}


def test_its_own_python_imports_what_the_kit_has_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = shutil.which(f"python{ITS_PYTHON}")
    if python is None or run(python, "-c", "import venv").returncode != 0:
        pytest.skip(f"no python{ITS_PYTHON} here; the day was tried with {sys.version.split()[0]}")
    filled_kit(tmp_path / "kit", ITS_PYTHON, monkeypatch)
    new, site = install(tmp_path / "env", python, WITHOUT_TORCH), tmp_path / "site"
    unpack = f"import gpu_site, json, pathlib as p; print(gpu_site.unpack(p.Path({str(tmp_path / 'kit')!r}), "
    said = succeed(new, "-c", f"{unpack}p.Path({str(site)!r})))", PYTHONPATH=str(BENCHMARKS))
    assert "not for this interpreter" not in said
    path = os.pathsep.join((str(ROOT / "src"), str(site)))
    names = "datasets, hypothesis, pandas, penman, pydantic, pytest, xxhash"
    succeed(new, "-c", f"import {names}", PYTHONPATH=path)
    config = ROOT / "configs/function-calling-llama-3.2-3b.yaml"
    planned = succeed(new, "-m", "surefit", "plan", config, "--quick", "--gpu", "h200", "--json", PYTHONPATH=path)
    assert json.loads(planned)["estimate"]["verdict"] == "fits"
