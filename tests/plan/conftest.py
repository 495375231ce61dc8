"""Configs to plan for, and a model whose facts need no network."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surefit.config.load import load_config
from surefit.config.resolve import resolve_config
from surefit.facts.hardware import hardware_facts
from surefit.facts.model import model_facts
from surefit.plan.search import DeviceConfig

Made = tuple[DeviceConfig, Any]


@pytest.fixture
def place(tmp_path: Path) -> Callable[..., Made]:
    """place(*overrides, model=…, gpu=…, memory=…) → (the config on a device, the model's facts)."""

    def make(*overrides: str, model: str = "Qwen/Qwen3-0.6B", gpu: str = "t4", memory: int | None = None) -> Made:
        path = tmp_path / "run.yaml"
        path.write_text(
            "data: {train: some/rows, max_length: 512}\nmodel: {name_or_path: x, dtype: bfloat16}\n"
            "train: {max_steps: 10, global_batch_size: 8}\noutput_dir: runs/x\n"
        )
        loaded = load_config(path, [f"model.name_or_path={model}", f"hardware.gpu={gpu}", *overrides])
        facts, hardware = model_facts(model), hardware_facts(gpu, tmp_path)
        if memory is not None:
            hardware = replace(hardware, memory_bytes=memory)
        return DeviceConfig(hardware, resolve_config(loaded, facts, hardware, None)), facts

    return make
