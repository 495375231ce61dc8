"""Files that another tool's config names and that are missing, as far as this machine can tell."""

from __future__ import annotations

import contextlib
import json
import os.path
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from surefit.core.units import GIB
from surefit.importers.known import key_set

KEYS = key_set("""
    deepspeed deepspeed_config.deepspeed_config_file deepspeed_config_file fsdp_config config_file dataset_info
    chat_template_path chat_template_jinja new_special_tokens_config accelerate_config hatchery
""")
ENDINGS = (".json", ".jsonl", ".yaml", ".yml", ".parquet", ".csv", ".tsv", ".txt", ".jinja", ".arrow")
COUNTED_BYTES = GIB
SAMPLED_ROWS, SAMPLED_CHARACTERS = 50, 400_000
"""The largest number of rows, and of characters, of a file that are read to find its columns."""
LEVELS = 6
"""The number of parent folders that a relative path may start from: examples are run from their repository's root."""


def find_missing_files(values: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str]]:
    """Yield (key, path) of files that are missing although the folder they should be in exists.

    If that folder is missing too, the config was written for another machine, and the file may exist there.
    """
    for key, value in values.items():
        if key in KEYS and isinstance(value, str):
            yield from ((key, value) for _ in [0] if _is_missing(value, path))
        elif key in ("datasets", "test_datasets", "pretraining_dataset") and isinstance(value, list):
            for i, entry in enumerate(value):
                yield from _of_entry(key, i, entry, path) if isinstance(entry, dict) else ()


def _of_entry(key: str, i: int, entry: Mapping[str, Any], path: Path) -> Iterator[tuple[str, str]]:
    for name in ("path", "data_files"):
        files = entry.get(name)
        for file in files if isinstance(files, list) else [files]:
            if isinstance(file, str) and _is_missing(file, path):
                yield f"{key}[{i}].{name}", file


def _is_missing(name: str, path: Path) -> bool:
    if not name.endswith(ENDINGS) or "://" in name or any(sign in name for sign in "*?${}\n"):
        return False
    folder = path.resolve().parent
    bases = [Path.cwd(), folder, *list(folder.parents)[:LEVELS]]
    candidates = [os.path.join(base, os.path.expanduser(name)) for base in bases]
    if any(os.path.isfile(file) for file in candidates):
        return False
    no_folder = not os.path.dirname(name.removeprefix("./"))
    folders = {os.path.dirname(file) for file in (candidates[:2] if no_folder else candidates)}
    return any(os.path.isdir(parent) for parent in folders)


def first_rows(path: Path) -> list[dict[str, Any]]:
    """Return the first rows of a local JSON or JSON Lines file; none if it cannot be read."""
    rows: list[dict[str, Any]] = []
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(SAMPLED_CHARACTERS).lstrip("\ufeff \t\r\n")
    except (OSError, ValueError):
        return rows
    place, decoder = int(text.startswith("[")), json.JSONDecoder()
    with contextlib.suppress(ValueError, RecursionError):
        while len(rows) < SAMPLED_ROWS:
            place += len(text[place:]) - len(text[place:].lstrip(" ,\t\r\n"))
            row, place = decoder.raw_decode(text, place)
            rows += [row] if isinstance(row, dict) else []
    return rows


def count_rows(path: Path) -> int | None:
    """Return the number of rows of a local JSON Lines file; None for any other file, or a very large one."""
    try:
        if path.suffix != ".jsonl" or path.stat().st_size > COUNTED_BYTES:
            return None
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    except OSError:
        return None
