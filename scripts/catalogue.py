"""Brings the catalogue of known models up to date from config.json files: adds entries, updates them, prints the diff.

python scripts/catalogue.py NAME=PATH ... [--dry-run]

NAME is the model's hub id. PATH is its config.json, or a directory with it: a download, a clone. Of a directory in the
Hugging Face cache (models--OWNER--NAME/snapshots/…) the name may be left out. Weights are not needed; where the index
or the header of the safetensors files is there, their size is kept and compared with what config.json amounts to.
Whether a model is gated no file says: an entry keeps what it had.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError, SureFitError
from surefit.core.rundir import write_atomic
from surefit.facts.model import CATALOGUE, HUB_ID, build_facts, read_model_config
from surefit.facts.named_templates import DEFAULT, templates_in
from surefit.facts.safetensors import INDEX, SINGLE, read_header
from surefit.facts.validate_model_files import read_json_object

LEFT_OUT = (
    "_name_or_path", "_commit_hash", "transformers_version", "torch_dtype", "auto_map", "use_cache", "prefix",
    "initializer_range", "id2label", "label2id", "task_specific_params", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip
"""What says nothing about shapes or memory, or is somebody's text. `torch_dtype` is kept under its new name."""
CACHED = re.compile(r"models--([^/]+)--([^/]+)")


def named(argument: str) -> tuple[str, Path]:
    """(hub id, path) of one argument.

    Raises:
        ModelError: there is no name, or it is none of the hub's.
    """
    name, equals, place = argument.partition("=")
    path = Path(place if equals else argument).expanduser()
    if not equals:
        found = CACHED.search(str(path.absolute()))
        name = f"{found[1]}/{found[2]}" if found else ""
    if not HUB_ID.fullmatch(name) or "/" not in name:
        raise ModelError(
            "the model's hub id is missing", path=path, help=f"write OWNER/NAME={path}, with the model's hub id"
        )
    return name, path


def entry_of(name: str, path: Path, before: Mapping[str, Any] | None) -> dict[str, Any]:
    """The catalogue's entry of a model.

    Args:
        path: its config.json, or the directory with it.
        before: the entry that the catalogue has.

    Raises:
        ModelError: no config.json, or one that the facts cannot be read from.
    """
    directory = path if path.is_dir() else path.parent
    if not path.exists():
        raise ModelError("no such file or directory", path=path, help="name a config.json, or the folder that has it")
    config = read_model_config(path) if path.is_dir() else read_json_object(path)
    old = before or {}
    kept = kept_of(config, old.get("config", {}))
    facts = build_facts(name, kept, None, where=path, source="catalogue")
    if not facts.architecture:
        raise ModelError("it names no architecture", path=path, help="take the config.json of a language model")
    size = weight_bytes(directory)
    if size and facts.parameters and facts.weight_bytes and abs(size / facts.weight_bytes - 1) > 0.01:
        print(f"{name}: {size:,} bytes of weights, and config.json amounts to {facts.weight_bytes:,}", file=sys.stderr)
    template: bool | None = DEFAULT in templates_in(directory)
    if not template and not (directory / "tokenizer_config.json").is_file():
        template = old.get("chat_template")  # no tokenizer is here to say so
    return {
        "name": name,
        "gated": old.get("gated"),
        "chat_template": template,
        **({"weight_bytes": size} if size and not facts.weight_bytes else {}),
        "config": kept,
    }


def kept_of(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a config.json, in the order that the entry had, so that a diff shows what has changed."""
    kept = {
        key: kept_of(value, own if isinstance(own := before.get(key), dict) else {})
        if isinstance(value, dict)
        else value
        for key, value in config.items()
        if key not in LEFT_OUT
    }
    if "dtype" not in kept and config.get("torch_dtype"):
        kept["dtype"] = config["torch_dtype"]
    order = [key for key in before if key in kept]
    return {key: kept[key] for key in dict.fromkeys([*order, *kept])}


def weight_bytes(directory: Path) -> int | None:
    """The size of the safetensors files, by their index or by the header of the one there is; None without either."""
    if (directory / INDEX).is_file():
        size = (read_json_object(directory / INDEX).get("metadata") or {}).get("total_size")
        return size if type(size) is int and size > 0 else None
    single = directory / SINGLE
    return sum(tensor.bytes for tensor in read_header(single).values()) if single.is_file() else None


def as_text(entry: Mapping[str, Any]) -> str:
    return json.dumps(entry, indent=2, ensure_ascii=False) + "\n"


def update(argument: str, catalogue: Path, dry_run: bool) -> list[str]:
    """Add or update one model; the lines of the diff.

    Raises:
        ModelError: as `named` and `entry_of`.
    """
    name, path = named(argument)
    file = catalogue / f"{name.replace('/', '--')}.json"
    before = file.read_text(encoding="utf-8") if file.is_file() else ""
    after = as_text(entry_of(name, path, json.loads(before) if before else None))
    if after != before and not dry_run:
        write_atomic(file, after)
    labels = (f"{file.name} (before)" if before else "/dev/null", file.name)
    return list(difflib.unified_diff(before.splitlines(), after.splitlines(), *labels, lineterm=""))


def main(arguments: list[str] | None = None, catalogue: Path = CATALOGUE) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="[NAME=]PATH")
    parser.add_argument("--dry-run", action="store_true", help="print the diff alone")
    options = parser.parse_args(arguments)
    failed = 0
    for argument in options.models:
        try:
            lines = update(argument, catalogue, options.dry_run)
        except SureFitError as error:
            failed += 1
            print(f"error {error.path or argument}: {error.message}\n  help: {error.help}", file=sys.stderr)
            continue
        print("\n".join(lines) or f"{argument}: as it was")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
