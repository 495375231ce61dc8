"""The rows of config/trackers.py: what they name is there."""

from __future__ import annotations

import importlib
import tomllib
from pathlib import Path

import pytest

from surefit.config.trackers import TRACKERS, TelemetrySection, enabled_trackers

EXTRAS = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.mark.parametrize("name", TRACKERS)
def test_what_a_row_names_is_there(name: str) -> None:
    row = TRACKERS[name]
    assert {row.setting, *row.axolotl_values.values()} <= TelemetrySection.model_fields.keys()
    assert not row.packages or any(wanted.startswith(row.packages[0]) for wanted in EXTRAS[name])
    module, _, sink = row.sink.partition(":")
    made = getattr(importlib.import_module(f"surefit.telemetry.{module}"), sink)
    assert all(callable(getattr(made, method)) for method in ("start", "log", "finish"))


def test_only_what_is_asked_for_is_on() -> None:
    assert not enabled_trackers(TelemetrySection())
    assert list(enabled_trackers(TelemetrySection(prometheus_port=0, wandb="offline"))) == ["wandb", "prometheus"]
    assert not TRACKERS["wandb"].asks(TelemetrySection(wandb="offline"))
    assert TRACKERS["wandb"].asks(TelemetrySection(wandb="online"))
