"""The Python code that comes with a model, beside its config.json."""

from __future__ import annotations

from pathlib import Path

from transformers.dynamic_module_utils import get_relative_import_files

from surefit.core.reading import read_json_file
from surefit.facts.model import code_files


def remote_code_files(directory: Path) -> list[Path]:
    """Return the files that `auto_map` of config.json and tokenizer_config.json points to, and the files of the
    directory that these import. Other Python files there do not belong to the model."""
    files: set[Path] = set()
    for config in ("config.json", "tokenizer_config.json"):
        if (directory / config).is_file():
            mapped_files = (directory / name for name in code_files(read_json_file(directory / config)))
            files |= {file for file in mapped_files if file.parent == directory and file.is_file()}
    imported = {Path(name) for file in files for name in get_relative_import_files(file) if Path(name).is_file()}
    return sorted(files | {file for file in imported if file.parent == directory})
