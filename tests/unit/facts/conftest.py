"""Resolved configs for tests of the arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from surefit.config.load import load_config
from surefit.config.resolve import ResolvedConfig, resolve_config
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts


@pytest.fixture
def make_resolved(tmp_path: Path) -> Callable[..., ResolvedConfig]:
    """make_resolved(model, *overrides, gpu="h100", rows=None): a config on that model, every "auto" decided."""

    def make(model: str, *overrides: str, gpu: str = "h100", rows: int | None = None) -> ResolvedConfig:
        path = tmp_path / "run.yaml"
        path.write_text("model: {name_or_path: surefit/nano}\ndata: {train: rows.jsonl}\noutput_dir: runs/x\n")
        loaded = load_config(path, [f"model.name_or_path={model}", *overrides])
        return resolve_config(loaded, model_facts(model), hardware_facts(gpu, tmp_path), rows)

    return make
