"""`surefit init` writes a config that parses as it is, and with every default uncommented."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from surefit.config.load import load_config
from surefit.config.schema import SureFitConfig
from surefit.config.starter import STARTERS, starter_config

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("recipe", ["function_calling", "chat"])
def test_starter_parses_and_shows_every_setting(tmp_path: Path, recipe: str) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(starter_config(recipe), encoding="utf-8")
    config = load_config(path).config
    assert config.recipe == recipe
    path.write_text(re.sub(r"(?m)^#(?=[a-z_]+:)|^#(?=  +[a-z_]+:)", "", starter_config(recipe)), encoding="utf-8")
    assert load_config(path).config == config


@pytest.mark.parametrize("recipe", sorted(STARTERS))
def test_a_starter_trains_as_the_shipped_config_that_its_page_reports(tmp_path: Path, recipe: str) -> None:
    path = tmp_path / "start.yaml"
    path.write_text(starter_config(recipe), encoding="utf-8")
    ours, shipped = (load_config(one).config for one in (path, CONFIGS / f"{recipe.replace('_', '-')}-nano.yaml"))
    assert ours.train.method == shipped.train.method
    assert ours.data.train == shipped.data.train
    for field in ("max_steps", "learning_rate", "global_batch_size"):
        assert getattr(ours.train, field) == getattr(shipped.train, field), field


def test_every_field_has_a_docstring() -> None:
    def walk(section: type) -> None:
        for name, field in section.model_fields.items():  # type: ignore[attr-defined]
            assert field.description, f"{section.__name__}.{name} has no docstring"
            if isinstance(field.annotation, type) and hasattr(field.annotation, "model_fields"):
                walk(field.annotation)

    walk(SureFitConfig)
    sections = [field for field in SureFitConfig.model_fields.values() if hasattr(field.annotation, "model_fields")]
    assert len(sections) <= 13
