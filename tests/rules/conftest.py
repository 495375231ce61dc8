"""A fixture config → the context the rules would see, on a machine that is the same everywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from surefit import recipes
from surefit.config.load import load_config
from surefit.config.resolve import resolve
from surefit.core.errors import SureFitError
from surefit.core.units import GIB
from surefit.data.load import is_local, load_rows
from surefit.facts import hardware as hardware_module
from surefit.facts.dataset import dataset_facts
from surefit.facts.environment import EnvironmentFacts
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.facts.setup import setup_of
from surefit.facts.stack import StackFacts
from surefit.facts.tokenizer import TokenizerFacts
from surefit.lint.rule import LintContext

MACHINE = {"name": "a CPU", "memory_bytes": 64 * GIB, "ram_bytes": 64 * GIB, "disk_free_bytes": 1000 * GIB}


def stated_facts(path: Path) -> dict[str, Any]:
    """The mapping behind `# facts:` in a config's first lines: facts that differ from this machine's."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("# facts:")]
    return yaml.safe_load(lines[0].removeprefix("# facts:")) if lines else {}


@pytest.fixture
def gather(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """gather(config file) → `LintContext`, in the config's own directory, with no GPU, no cache and no network."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(hardware_module, "detect_gpus", list)

    def attempt(problems: list[SureFitError], look):
        try:
            return look()
        except SureFitError as error:
            problems.append(error)
            return None

    def build(path: Path, directory: Path | None = None) -> LintContext:
        monkeypatch.chdir(directory or path.parent)
        stated, problems = stated_facts(path), []
        loaded = load_config(path)
        config = loaded.config
        recipe = attempt(problems, lambda: recipes.get(config.recipe))
        model = attempt(problems, lambda: model_facts(config.model.name_or_path, config.model.revision))
        device = attempt(problems, lambda: hardware_facts(config.hardware.gpu))
        rows = attempt(problems, lambda: load_rows(config.data.train)) if is_local(config.data.train) else None
        if device is not None:
            device = replace(device, **{**(MACHINE if device.kind == "cpu" else {}), **stated.get("hardware", {})})
        if model is not None:
            model = replace(model, **stated.get("model", {}))
        count = len(rows) if rows is not None else None
        resolved = attempt(problems, lambda: resolve(loaded, model, device, count)) if model and device else None
        columns = recipe.columns if recipe else ()
        setup = replace(setup_of(config, resolved), **stated.get("setup", {}))
        stack = StackFacts(**stated["stack"]) if "stack" in stated else None
        tokenizer = TokenizerFacts(**stated["tokenizer"]) if "tokenizer" in stated else None
        return LintContext(
            config=config,
            path=loaded.path,
            lines=loaded.lines,
            setup=setup,
            tokenizer=tokenizer,
            stack=stack,
            resolved=resolved,
            model=model,
            hardware=device,
            dataset=dataset_facts(rows.source, rows, rows.where, expected=columns) if rows else None,
            environment=EnvironmentFacts(**stated.get("environment", {"hub_token": True})),
            columns=columns,
            problems=tuple(problems),
        )

    return build
