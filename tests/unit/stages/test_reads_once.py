"""Before the first step a run reads each source once, converts each row once and validates the config once."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from typer.testing import CliRunner

from surefit import recipes
from surefit.cli.app import app
from surefit.config.schema import SureFitConfig
from surefit.train import step

TOOLS = '[{"name": "ring", "description": "Call", "parameters": {"who": {"description": "Name", "type": "str"}}}]'


@dataclass
class Counts:
    """The counts up to the first step.

    Attributes:
        reads: file → how often it was opened, except to hash it.
        conversions: name of a row → how often it was converted to an example.
        validations: how often a whole config was validated.
    """

    reads: Counter[str] = field(default_factory=Counter)
    conversions: Counter[str] = field(default_factory=Counter)
    validations: int = 0
    stopped: bool = False


_active: list[tuple[Path, Counts]] = []


def _on_open(event: str, arguments: tuple[Any, ...]) -> None:
    """Count the opening of a data file; an audit hook cannot be removed, so it does nothing without a recording."""
    if event != "open" or not _active or not isinstance(arguments[0], (str, bytes)):
        return
    directory, counts = _active[-1]
    path = Path(os.path.abspath(os.fsdecode(arguments[0])))
    if path.suffix != ".jsonl" or directory not in path.parents or "runs" in path.relative_to(directory).parts:
        return
    functions = set()
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        functions.add((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        frame = frame.f_back
    reads = any(module.startswith("surefit.data.read.") for module, _ in functions)
    if reads and ("surefit.core.rundir", "file_sha256") not in functions and not counts.stopped:
        counts.reads[str(path.relative_to(directory))] += 1


@contextmanager
def recording(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Counts]:
    """Count what happens between the start and the first optimizer step, which the dry pass does not count as."""
    counts = Counts()
    get_recipe, validate, train_step = recipes.get_recipe, SureFitConfig.model_validate, step.train_step

    def counting_recipe(name: str) -> Any:
        recipe = get_recipe(name)

        def to_example(row: Mapping[str, Any]) -> Any:
            if not counts.stopped:
                counts.conversions[str(row["query"])] += 1
            return recipe.to_example(row)

        return replace(recipe, to_example=to_example)

    def counting_validate(*arguments: Any, **options: Any) -> SureFitConfig:
        counts.validations += not counts.stopped
        return validate(*arguments, **options)

    def first_step(*arguments: Any, **options: Any) -> Any:
        counts.stopped = True
        return train_step(*arguments, **options)

    monkeypatch.setattr(recipes, "get_recipe", counting_recipe)
    monkeypatch.setattr(SureFitConfig, "model_validate", counting_validate)
    monkeypatch.setattr("surefit.train.loop.train_step", first_step)
    if not _installed:
        sys.addaudithook(_on_open)
        _installed.append(True)
    _active.append((directory, counts))
    try:
        yield counts
    finally:
        _active.pop()


_installed: list[bool] = []


def write_rows(path: Path, name: str, count: int) -> None:
    """Write rows of calls to people who are numbered."""
    rows = [
        {
            "query": f"Ring {name} {n}",
            "tools": TOOLS,
            "answers": json.dumps([{"name": "ring", "arguments": {"who": f"{name} {n}"}}]),
        }
        for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Write a config of a run that takes seconds, with these entries under `data`, and its rows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUREFIT_CACHE", str(tmp_path / "cache"))
    for name, count in (("train", 40), ("held", 12), ("mixed", 10), ("extra", 8)):
        write_rows(tmp_path / f"{name}.jsonl", name, count)

    def write(data: str) -> Path:
        path = tmp_path / "run.yaml"
        path.write_text(
            "recipe: function_calling\n"
            "model: {name_or_path: surefit/nano}\n"
            f"data: {{train: train.jsonl, max_length: 256, {data}}}\n"
            "train: {max_steps: 3, global_batch_size: 4, learning_rate: 5e-3}\n"
            "checkpoint: {save_steps: 3}\n"
            "evaluate: {max_new_tokens: 24, extra_sets: {extra: extra.jsonl}}\n"
            "output_dir: runs/one\n",
            encoding="utf-8",
        )
        return path

    return write


def call(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output


def show(counts: Counts) -> None:
    """Print the counts: pytest shows them where an assertion fails, and with -s."""
    by_source: dict[str, list[int]] = {}
    for name, count in counts.conversions.items():
        by_source.setdefault(name.split()[1], []).append(count)
    for file, count in sorted(counts.reads.items()):
        print(f"{file}: read {count} times")
    for source, numbers in by_source.items():
        print(
            f"{source}: {len(numbers)} rows, {sum(numbers) / len(numbers):.2f} conversions each, at most {max(numbers)}"
        )
    print(f"config: validated {counts.validations} times")


@pytest.mark.parametrize(
    ("verb", "data"),
    [
        ("train", "eval: 0.3"),
        ("train", "eval: held.jsonl, mix: {mixed.jsonl: 1}"),
        ("run", "eval: held.jsonl"),
    ],
)
def test_a_run_from_rows_reads_each_source_once(
    config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str, data: str
) -> None:
    path = config(data)
    with recording(tmp_path, monkeypatch) as counts:
        call(verb, path)
    show(counts)
    assert counts.stopped
    assert counts.reads == dict.fromkeys(
        ["train.jsonl", "extra.jsonl", *(f"{name}.jsonl" for name in ("held", "mixed") if name in data)], 1
    )
    assert set(counts.conversions.values()) == {1}
    assert counts.validations == 1


@pytest.mark.parametrize("data", ["eval: 0.3", "eval: held.jsonl"], ids=["share", "file"])
def test_a_run_from_shards_reads_each_source_once(
    config: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
) -> None:
    path = config(data)
    call("prepare", path, "--set", "data.tokenized=shards")
    with recording(tmp_path, monkeypatch) as counts:
        call("train", path, "--set", "data.tokenized=shards")
    show(counts)
    assert counts.stopped
    assert set(counts.reads.values()) == {1}
    assert set(counts.conversions.values()) == {1}
    assert counts.validations == 1
