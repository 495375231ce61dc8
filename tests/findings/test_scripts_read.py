"""What a review of the reader of scripts brought out: modules in a circle, values that double, argparse's types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefit.facts.job_script import read_job_script
from surefit.importers.python_source import COMPUTED, STEPS, parse_script, parser_option_value
from surefit.importers.requirements import read_project_requirements

LOCK = 'version = 1\n\n[[package]]\nname = "transformers"\nversion = "4.40.2"\n'
RANGE = '[project]\nname = "x"\nversion = "1"\ndependencies = ["transformers>=4.38"]\n'
PINNED = RANGE.replace(">=4.38", "==4.40.2")
CONDA = "dependencies:\n  - pip\n  - pip:\n    - transformers==4.40.2\n"


def chosen(script: str, name: str, passed: dict[str, set[str | None]] | None = None) -> Any:
    """The value of `args.NAME` in a script."""
    Path("train.py").write_text(f"import argparse\nparser = argparse.ArgumentParser()\n{script}\n")
    with Path("train.py").open("a") as file:
        file.write(f"args = parser.parse_args()\nprint(args.{name})\n")
    source = parse_script(Path("train.py"))
    source.passed = passed or {}
    (found,) = [
        (node, scope) for node, scope in source.nodes if getattr(node, "attr", "") == name and node.value.id == "args"
    ]
    return parser_option_value(source, found[0].value, found[1], name)


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


SPLIT = 'type=lambda text: text.split(",")'


@pytest.mark.parametrize(
    ("argument", "given", "value"),
    [
        pytest.param(f'{SPLIT}, default="q_proj"', None, COMPUTED, id="W2-function"),
        pytest.param(f'{SPLIT}, default=["q_proj"]', None, ["q_proj"], id="W2-default-that-is-no-text"),
        pytest.param(f"{SPLIT}, default=None", "q_proj", COMPUTED, id="W2-passed"),
        pytest.param('type=float, default="2e-4"', None, 2e-4, id="W2-text-converted"),
        pytest.param("type=str, default='8'", "16", "16", id="W2-stays-text"),
        pytest.param("type=int, default=8", "16", 16, id="W2-int"),
        pytest.param("type=bool, default=True", "False", True, id="W2-bool-of-a-text-is-true"),
        pytest.param("type=str2bool, default=True", "no", False, id="W2-reader-of-bools"),
        pytest.param('nargs="+", default=["q_proj"]', "v_proj", COMPUTED, id="W2-several"),
        pytest.param("default=8", "16", 16, id="W2-none"),
    ],
)
def test_what_argparse_makes_of_a_text(argument: str, given: str | None, value: Any) -> None:
    passed = None if given is None else {"size": {given}}
    assert chosen(f'parser.add_argument("--size", {argument})', "size", passed) == value


@pytest.mark.parametrize(
    ("other", "own"),
    [
        pytest.param("from train import LR\n", "from config import LR\n", id="W5-name"),
        pytest.param("from train import *\n", "from config import *\n", id="W5-star"),
        pytest.param("import train\nLR = train.LR\n", "import config\nLR = config.LR\n", id="W5-attribute"),
    ],
)
def test_modules_that_import_from_each_other(other: str, own: str) -> None:
    Path("config.py").write_text(other)
    Path("train.py").write_text(own + "print(LR)\n")
    source = parse_script(Path("train.py"))
    (name,) = [
        node for node, _ in source.nodes if getattr(node, "id", "") == "LR" and node.lineno == len(own.splitlines()) + 1
    ]
    assert source.value(name, source.module) is COMPUTED


@pytest.mark.parametrize("entry", ["[x{0}, x{0}, x{0}, x{0}]", "x{0} + x{0}"], ids=["W6-lists", "W6-sums"])
def test_values_that_double_are_given_up(entry: str) -> None:
    lines = ["x0 = ['q_proj']", *(f"x{n + 1} = {entry.format(n)}" for n in range(30)), "print(x30)"]
    Path("train.py").write_text("\n".join(lines))
    source = parse_script(Path("train.py"))
    name = next(node for node, _ in reversed(source.nodes) if getattr(node, "id", "") == "x30")
    assert source.value(name, source.module) is COMPUTED
    assert STEPS < source.evaluated[0] < 2 * STEPS


@pytest.mark.parametrize(
    ("beside", "file"),
    [
        pytest.param({"uv.lock": LOCK, "pyproject.toml": RANGE}, "uv.lock", id="W1-lock"),
        pytest.param(
            {"requirements.txt": "transformers==4.40.2\n", "pyproject.toml": RANGE}, "requirements.txt", id="W1-pin"
        ),
        pytest.param(
            {"requirements.txt": "transformers>=4.38\n", "pyproject.toml": PINNED}, "pyproject.toml", id="W1-pin-later"
        ),
        pytest.param(
            {"requirements.txt": "transformers>=4.38\n", "conda-list.yml": CONDA}, "conda-list.yml", id="W1-conda"
        ),
    ],
)
def test_an_exact_pin_counts_before_a_range(beside: dict[str, str], file: str) -> None:
    Path(".git").mkdir()
    for name, text in beside.items():
        Path(name).write_text(text)
    Path("train.py").write_text("import transformers\n")
    versions, source = read_project_requirements(Path("train.py"))
    assert (versions["transformers"].strip("="), source["transformers"]) == ("4.40.2", file)


@pytest.mark.parametrize(
    ("command", "redirected"),
    [
        pytest.param("pip install -q vllm>/dev/null 2>&1", False, id="V2-10-null"),
        pytest.param("pip install vllm>install.log", False, id="V2-10-log"),
        pytest.param("pip install bitsandbytes>=0.43", True, id="V2-10-version"),
        pytest.param("pip install torch>2.4", True, id="V2-10-greater"),
    ],
)
def test_a_redirection_is_no_version(command: str, redirected: bool) -> None:
    Path("run.sh").write_text(f"#!/bin/bash\n{command}\n")
    installs = read_job_script(Path("run.sh")).installs
    assert any(install.redirected for install in installs) is redirected
