"""The core without its extras: it stays small, and what needs an extra says so and how to install it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from light import ROOT, core_distributions, light_environment, run_light

from surefit.core import packaging
from surefit.core.errors import MachineError
from surefit.core.packaging import EXTRAS, explain_import_error, install_extra, require_extra, require_import

MOST_PACKAGES = 30
ROWS = [{"prompt": f"What is {n} plus {n}?", "completion": f"It is {2 * n}."} for n in range(40)]
RUN = """\
output_dir: runs/light
model: {name_or_path: surefit/nano}
recipe: chat
data: {train: rows.jsonl, eval: 0.2}
train: {max_steps: 20, per_device_train_batch_size: 2, global_batch_size: 2}
"""
AXOLOTL = """\
base_model: Qwen/Qwen2.5-0.5B-Instruct
datasets:
  - {path: rows.jsonl, type: alpaca}
adapter: lora
lora_r: 8
lora_alpha: 16
lora_target_linear: true
learning_rate: 0.0002
lerning_rate: 0.0002
micro_batch_size: 2
gradient_accumulation_steps: 1
num_epochs: 1
sequence_len: 512
output_dir: out
"""
TRAINING = {
    "train": ["run.yaml"],
    "run": ["run.yaml"],
    "demo": [],
    "merge": ["run.yaml"],
    "certify": ["adapter", "merged"],
    "evaluate": ["run.yaml"],
    "predict": ["run.yaml", "-p", "Hello"],
    "chat": ["run.yaml", "-p", "Hello"],
    "prepare": ["run.yaml", "--set", "data.tokenized=shards"],
    "export": ["run.yaml"],
    "calibrate": [],
    "plan": ["run.yaml", "--optimize"],
}
"""Verbs that load a model, with arguments."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with rows in four formats, a config, and an Axolotl file with an unknown key."""
    folder = tmp_path_factory.mktemp("light")
    lines = "".join(json.dumps(row) + "\n" for row in ROWS)
    (folder / "rows.jsonl").write_text(lines)
    (folder / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    (folder / "rows.csv").write_text(
        "prompt,completion\n" + "".join(f"{r['prompt']},{r['completion']}\n" for r in ROWS)
    )
    (folder / "rows.parquet").write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")  # nothing reads it
    (folder / "run.yaml").write_text(RUN)
    (folder / "axolotl.yaml").write_text(AXOLOTL)
    return folder


@pytest.fixture(scope="module")
def light(folder: Path) -> dict[str, str]:
    (folder / "hide").mkdir()
    return light_environment(folder / "hide", HF_HUB_OFFLINE="1", SUREFIT_CACHE=str(folder / "cache"))


def surefit(folder: Path, light: dict[str, str], *arguments: object) -> tuple[int, dict[str, Any], str]:
    """Run a verb with `--json`; return its exit code, its object, and stderr."""
    done = run_light(folder, *arguments, "--json", environment=light)
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_the_core_has_few_packages() -> None:
    """Beside SureFit itself. What is installed here decides: a release of one of them may bring more."""
    core = core_distributions()
    assert len(core) <= MOST_PACKAGES, sorted(core)
    assert core >= {"tokenizers", "huggingface-hub", "jinja2", "numpy", "pydantic"}
    assert core.isdisjoint({"torch", "transformers", "peft", "accelerate", "datasets", "pyarrow", "pandas", "sympy"})


def test_the_other_packages_are_hidden(folder: Path, light: dict[str, str]) -> None:
    """Else every test below would pass in any case."""
    tried = ("torch", "transformers", "peft", "accelerate", "safetensors", "datasets", "pyarrow", "penman", "pandas")
    program = (
        "import importlib, importlib.metadata, sys\n"
        "for name in sys.argv[1:]:\n"
        "    for look in (importlib.import_module, importlib.metadata.version):\n"
        "        try: print(name, look(name))\n"
        "        except ImportError: pass\n"
        "import numpy, tokenizers; print(importlib.metadata.version('numpy') == numpy.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *tried], env=light, cwd=folder, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True"]


def test_check_and_import_another_tools_config(folder: Path, light: dict[str, str]) -> None:
    code, report, _ = surefit(folder, light, "check", "axolotl.yaml")
    assert code == 1
    assert ("ARG002", "lerning_rate") in {(found["code"], found["field"]) for found in report["findings"]}
    code, _, _ = surefit(folder, light, "import", "axolotl.yaml", "--output", "imported.yaml")
    assert code == 0
    assert "lora_alpha: 16" in (folder / "imported.yaml").read_text()


def test_check_looks_at_the_rows_and_counts_their_tokens(folder: Path, light: dict[str, str]) -> None:
    code, report, _ = surefit(folder, light, "check", "run.yaml", "--set", "data.max_length=12")
    assert code == 1
    assert "LAB010" in {found["code"] for found in report["findings"]}
    done = run_light(folder, "check", "run.yaml", "--show", 1, environment=light)
    assert done.returncode == 0, done.stderr
    assert "What is 0 plus 0?" in done.stdout


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.jsonl.gz", "rows.csv"])
def test_audit_reads_rows(folder: Path, light: dict[str, str], name: str) -> None:
    code, passport, _ = surefit(folder, light, "audit", name)
    assert (code, passport["rows"]) == (0, len(ROWS))


def test_audit_counts_the_same_tokens_as_with_transformers(folder: Path, light: dict[str, str]) -> None:
    config = ROOT / "configs/function-calling-nano.yaml"
    arguments = ["audit", config, "--max-rows", 200, "--passport"]
    _, _, notes = surefit(folder, light, *arguments, "light.json")
    assert "py3langid" in notes
    assert ".[data]" in notes
    command = [sys.executable, "-m", "surefit", *map(str, arguments), "whole.json"]
    subprocess.run(command, cwd=folder, capture_output=True, check=True)
    light_passport, whole = (json.loads((folder / name).read_text()) for name in ("light.json", "whole.json"))
    assert whole.pop("languages")
    assert light_passport.pop("languages") == {}
    assert whole["unit"] == "tokens"
    differing = {key for key in light_passport | whole if light_passport.get(key) != whole.get(key)}
    assert differing <= {"seconds"}


def test_init_explain_and_plan(folder: Path, light: dict[str, str]) -> None:
    code, _, _ = surefit(folder, light, "init", "--data", "rows.jsonl", "--model", "surefit/nano", "-o", "new.yaml")
    assert code == 0
    assert surefit(folder, light, "check", "new.yaml")[0] == 0
    done = run_light(folder, "explain", "SCH001", environment=light)
    assert (done.returncode, "## Why it is bad" in done.stdout) == (0, True)
    code, quick, _ = surefit(folder, light, "plan", "run.yaml", "--quick", "--gpu", "4090")
    assert (code, quick["estimate"]["verdict"]) == (0, "fits")
    code, plan, _ = surefit(folder, light, "plan", "run.yaml", "--gpu", "4090")
    assert (code, plan["memory_total_bytes"]) == (0, quick["memory_total_bytes"])
    assert any("torch" in text and "not installed" in text for text in plan["left_out"])


@pytest.mark.parametrize("verb", TRAINING)
def test_a_verb_that_loads_a_model_says_what_is_missing(folder: Path, light: dict[str, str], verb: str) -> None:
    code, error, _ = surefit(folder, light, verb, *TRAINING[verb])
    assert (code, error["code"], error["exit_code"]) == (3, "E1090", 3)
    assert [name for name in EXTRAS["train"] if name not in error["message"]] == []
    assert error["help"] == "in the clone of SureFit: pip install -c constraints.txt '.[train]'"
    assert not (folder / "runs/light/resolved.yaml").exists()


def test_the_functions_of_python(folder: Path, light: dict[str, str]) -> None:
    program = (
        "import surefit\n"
        "from surefit.core.errors import MachineError\n"
        "print(surefit.check('run.yaml').document['rules'] > 100, surefit.plan('run.yaml', gpu='4090').verdict)\n"
        "for function in (surefit.train, surefit.merge, surefit.evaluate):\n"
        "    try: function('run.yaml')\n"
        "    except MachineError as error: print(error.code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], env=light, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["True", "fits", "E1090", "E1090", "E1090"], done.stderr


@pytest.mark.parametrize(
    ("source", "package"),
    [("rows.parquet", "pyarrow"), ("rows.jsonl.zst", "pyarrow"), ("owner/name@train", "datasets")],
)
def test_rows_that_need_an_extra(folder: Path, light: dict[str, str], source: str, package: str) -> None:
    if source.endswith(".zst"):
        (folder / source).write_bytes(b"\x28\xb5\x2f\xfd" + b"\0" * 20)
    code, error, _ = surefit(folder, light, "audit", "run.yaml", "--set", f"data.train={source}")
    assert (code, error["code"], error["path"]) == (3, "E1090", source)
    assert error["message"].startswith(f"{package} is not installed")
    assert ".[data]" in error["help"]
    _, report, _ = surefit(folder, light, "check", "run.yaml", "--set", f"data.train={source}")
    if source != "owner/name@train":  # whose rows `check` does not download
        assert [(found["code"], found["path"]) for found in report["findings"]] == [("ENV003", source)]
        assert ".[data]" in report["findings"][0]["help"]


def test_a_recipe_that_needs_an_extra(folder: Path, light: dict[str, str]) -> None:
    config = ROOT / "configs/amr-parsing-nano.yaml"
    code, error, _ = surefit(folder, light, "audit", config, "--passport", "amr.json")
    assert (code, error["code"]) == (3, "E1090")
    assert ".[metrics]" in error["help"]


# Broken packages


@pytest.mark.parametrize("kind", ["ImportError", "OSError"])
def test_a_torch_whose_library_is_missing(tmp_path: Path, kind: str) -> None:
    """torch loads its libraries with ctypes, which raises OSError, and its extension, which raises ImportError."""
    reason = "libcudart.so.13: cannot open shared object file: No such file or directory"
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("import torch.lib\n")
    (tmp_path / "torch/lib.py").write_text(f"raise {kind}({reason!r})\n")
    environment = light_environment(tmp_path) | {"HIDDEN_MODULES": "[]", "HIDDEN_DISTRIBUTIONS": "[]"}
    done = run_light(tmp_path, "calibrate", "--json", environment=environment)
    error = json.loads(done.stdout.splitlines()[-1])
    assert (done.returncode, error["code"]) == (3, "E1091")
    assert "torch" in error["message"]
    assert reason in error["message"]
    assert "surefit doctor" in error["help"]
    assert "Traceback" not in done.stderr


def test_a_release_without_what_is_imported() -> None:
    with pytest.raises(ImportError) as raised:
        from transformers import NothingOfThisName  # type: ignore[attr-defined]  # noqa: F401
    error = explain_import_error(raised.value)
    assert error is not None
    assert (error.code, error.exit_code) == ("E1091", 3)
    assert "NothingOfThisName" in error.message


def test_errors_that_are_no_package_of_an_extra() -> None:
    assert explain_import_error(ModuleNotFoundError("No module named 'x'", name="x")) is None
    assert explain_import_error(ImportError("cannot import name 'y' from 'surefit'", name="surefit")) is None
    assert explain_import_error(OSError("disk")) is None
    torch_lacks_a_part = ModuleNotFoundError("No module named 'torch._C'", name="torch._C")
    error = explain_import_error(torch_lacks_a_part)
    assert error is not None
    assert error.code == "E1091", "it is installed, and broken"


def test_only_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packaging, "is_installed", lambda name: name != "peft")
    with pytest.raises(MachineError) as raised:
        require_extra("train")
    assert raised.value.message.startswith("peft is not installed")
    outer = RuntimeError("transformers could not import it")
    outer.__cause__ = ModuleNotFoundError("No module named 'peft.tuners'", name="peft.tuners")
    error = explain_import_error(outer)
    assert error is not None
    assert error.message == raised.value.message
    with pytest.raises(ModuleNotFoundError):  # no package of an extra: a bug stays a bug
        require_import("surefit.no_such_module")


def test_an_installed_wheel_is_named_with_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "the wheels/surefit-0.1.0-py3-none-any.whl"
    origin = {"url": wheel.as_uri(), "archive_info": {}}
    distribution = SimpleNamespace(read_text=lambda name: json.dumps(origin))
    monkeypatch.setattr(metadata, "distribution", lambda name: distribution)
    clone = "in the clone of SureFit: pip install -c constraints.txt '.[train]'"
    assert install_extra("train") == clone, "that file is gone"
    wheel.parent.mkdir()
    wheel.touch()
    assert install_extra("train") == f"pip install '{wheel}[train]'"
    origin["url"] = tmp_path.as_uri()
    assert install_extra("train") == clone


def test_every_extra_is_declared() -> None:
    import tomllib

    from packaging.requirements import Requirement

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        declared = {Requirement(line).name for line in extras[extra]} - {"surefit"}
        assert declared == {packaging._DISTRIBUTIONS.get(module, module) for module in modules}
