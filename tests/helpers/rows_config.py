"""A config about rows: their columns, roles and objective."""

from __future__ import annotations

from collections.abc import Mapping

from surefit.config.schema import SureFitConfig


def rows_config(
    columns: Mapping[str, str] | None = None, roles: Mapping[str, str] | None = None, objective: str = "sft"
) -> SureFitConfig:
    """Return a config with these names of columns and roles, and this objective."""
    data = {"train": "rows.jsonl", "columns": dict(columns or {}), "roles": dict(roles or {})}
    values = {"model": {"name_or_path": "surefit/nano"}, "data": data, "objective": objective, "output_dir": "runs/r"}
    return SureFitConfig.model_validate({"recipe": "chat", **values})
