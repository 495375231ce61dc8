"""Columns that another tool's config names: `field_output` in Axolotl, `columns` in a dataset_info.json."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surefit.importers.axolotl_data import find_rows_source
from surefit.importers.result import ImportedConfig

MESSAGES = ("message_field_role", "message_field_content", "message_field_training", "message_field_training_detail")
"""Fields of a turn rather than of a row."""
OPTIONAL = ("field_system", "field_input", "field_output", "field_tools", "field_thinking")
"""Columns that Axolotl uses if a row has them and does not require (prompt_strategies/user_defined.py)."""


@dataclass(frozen=True)
class NamedColumn:
    """A column that rows must have: the source of the rows, the key that names the column, and the column."""

    source: str
    key: str
    column: str


def named_columns(found: ImportedConfig) -> Iterator[NamedColumn]:
    """Yield the columns that a config names, dataset by dataset."""
    if found.tool == "axolotl":
        datasets = found.values.get("datasets")
        for i, entry in enumerate(datasets if isinstance(datasets, list) else ()):
            if isinstance(entry, dict) and (source := find_rows_source(entry)):
                yield from _of_axolotl(entry, source, f"datasets[{i}]")
    elif found.tool == "trl":
        source, column = found.values.get("dataset_name"), found.values.get("dataset_text_field")
        if isinstance(source, str) and isinstance(column, str):
            yield NamedColumn(source, "dataset_text_field", column)
    elif found.tool == "python":
        for key, (source, column) in found.columns.items():
            yield NamedColumn(source, key, column)
    elif found.tool == "llamafactory":
        yield from _of_llamafactory(found)


def _of_axolotl(entry: Mapping[str, Any], source: str, at: str) -> Iterator[NamedColumn]:
    kind = entry.get("type")
    nested = {f"type.{name}": column for name, column in kind.items()} if isinstance(kind, dict) else {}
    for name, column in {**entry, **nested}.items():
        leaf = name.rpartition(".")[2]
        if leaf.startswith("field") and leaf not in (*MESSAGES, *OPTIONAL) and isinstance(column, str) and column:
            yield NamedColumn(source, f"{at}.{name}", column)


def _of_llamafactory(found: ImportedConfig) -> Iterator[NamedColumn]:
    from surefit.importers.llamafactory import (
        find_dataset_source,
        parse_dataset_names,
        read_dataset_info,
        resolve_dataset_dir,
    )

    folder = found.values.get("dataset_dir") or "data"
    if not isinstance(folder, str):
        return
    folder = resolve_dataset_dir(folder, found.path)
    info = read_dataset_info(folder)
    for name in parse_dataset_names(found.values.get("dataset")):
        entry = info.get(name)
        columns = entry.get("columns") if isinstance(entry, dict) else None
        for role, column in columns.items() if isinstance(columns, dict) else ():
            if isinstance(column, str) and column:
                yield NamedColumn(
                    find_dataset_source(name, folder, info)[0], f"{Path(folder) / 'dataset_info.json'}: {role}", column
                )
