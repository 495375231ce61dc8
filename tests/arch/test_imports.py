"""Who imports whom: the contracts in pyproject.toml, the declared dependencies, what a running `surefit` imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "datasets", "peft", "accelerate"}
TORCH_FREE = (
    "core",
    "config",
    "facts",
    "importers",
    "task",
    "metrics",
    "recipes",
    "lint",
    "doctor",
    "cli.app",
    "data.read.load",
)
DISTRIBUTIONS = {
    "amr": "smatch",
    "huggingface_hub": "huggingface-hub",
    "liger_kernel": "liger-kernel",
    "markupsafe": "jinja2",  # its string type, and always installed with it
    "prometheus_client": "prometheus-client",
    "pydantic_core": "pydantic",
    "pynvml": "nvidia-ml-py",
    "rouge_score": "rouge-score",
    "yaml": "pyyaml",
}


def test_import_contracts_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exit_code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), cache_dir=str(tmp_path))
    assert exit_code == 0, capsys.readouterr().out


def heavy_modules(stderr: str) -> set[str]:
    """The heavy packages among the modules that `python -X importtime` lists."""
    rows = [line for line in stderr.splitlines() if line.startswith("import time:")]
    assert len(rows) > 50, stderr
    return {row.rpartition("|")[2].strip().partition(".")[0] for row in rows} & HEAVY


@pytest.mark.parametrize(
    "arguments", [["--help"], ["check", "configs/function-calling-llama-3.2-3b.yaml"]], ids=" ".join
)
def test_a_torch_free_command_imports_nothing_heavy(arguments: list[str]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "surefit", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr[-2000:]
    assert heavy_modules(done.stderr) == set()


@pytest.mark.parametrize(
    "arguments", ["runs show RUN", "runs diff RUN RUN", "push RUN owner/name", "serve-check --help"]
)
def test_a_look_at_a_run_imports_no_torch(tmp_path: Path, arguments: str) -> None:
    run = tmp_path / "run"
    (run / "checkpoints/step-1").mkdir(parents=True)
    (run / "resolved.yaml").write_text(
        "recipe: chat\nmodel: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: run\n"
    )
    (run / "export/hub").mkdir(parents=True)
    command = [sys.executable, "-X", "importtime", "-m", "surefit", *arguments.replace("RUN", str(run)).split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "torch" not in heavy_modules(done.stderr), arguments


def test_torch_would_be_noticed(tmp_path: Path) -> None:
    """The counter-example to the test above: `-X importtime` does list a heavy import made inside a function."""
    (tmp_path / "torch.py").touch()  # its name is what is looked for
    program = "import json, http.client, email.parser\ndef late():\n    import torch\nlate()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert heavy_modules(done.stderr) == {"torch"}


def test_torch_free_rooms_import_nothing_heavy() -> None:
    """Every module of these rooms at once: `check` need not take each of their paths for this to hold."""
    program = (
        "import importlib, sys\n"
        f"for name in {sorted(modules_of(TORCH_FREE))!r}:\n"
        "    importlib.import_module(name)\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def modules_of(rooms: tuple[str, ...]) -> Iterator[str]:
    for room in rooms:
        path = ROOT / "src/surefit" / room.replace(".", "/")
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        for file in files:
            parts = file.relative_to(ROOT / "src").with_suffix("").parts
            yield ".".join(parts).removesuffix(".__init__")


def test_what_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = distributions(project["dependencies"])
    brought = {name: lines for name, lines in project["optional-dependencies"].items() if name not in ("dev", "docs")}
    extras = distributions(line for lines in brought.values() for line in lines) - {"surefit"}
    training = distributions(brought["train"]) - {"surefit"}
    trees = {file: ast.parse(file.read_text(encoding="utf-8")) for file in (ROOT / "src").rglob("*.py")}
    imported = outside(node for tree in trees.values() for node in ast.walk(tree))
    assert imported - extras == declared, "pyproject.toml's dependencies are what src imports, no more and no less"
    assert training | distributions(brought["data"] + brought["metrics"]) <= imported
    # These are imported as a whole or not at all: the page by its verb, Triton's kernels by a tensor on a GPU. So
    # is what trains, by verbs that need it all: tests/arch/test_light_install.py runs the others without it.
    page, kernels = ROOT / "src/surefit/ui", set((ROOT / "src/surefit/model").glob("triton_*.py"))
    everywhere = [tree for file, tree in trees.items() if not (file.is_relative_to(page) or file in kernels)]
    at_once = outside(node for tree in everywhere for node in tree.body)
    assert not at_once & (extras - training), "what an extra brings is imported where it is used, not by every user"
    names = {node.module for tree in everywhere for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert not {name for name in names if name and name.startswith(("surefit.ui", "surefit.model.triton"))}


def distributions(requirements: Iterable[str]) -> set[str]:
    return {re.split(r"[^A-Za-z0-9_-]", line)[0] for line in requirements}


def outside(nodes: Iterable[ast.AST]) -> set[str]:
    """The distributions, neither Python's nor ours, that import statements name."""
    names = {DISTRIBUTIONS.get(name, name) for name in imports_of(nodes)}
    return names - set(sys.stdlib_module_names) - {"surefit"}


def imports_of(nodes: Iterable[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield (node.module or "").partition(".")[0]
