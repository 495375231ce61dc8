"""Writes the keys that each of TRL's commands takes (`trl sft`, `trl dpo`, …) to importers/schemas/trl_stages.json.

python scripts/trl_stages.py

They are the fields of the classes that the command's own parser is made of, in the TRL of this environment.
"""

from __future__ import annotations

import json
from dataclasses import fields
from importlib import import_module, metadata
from pathlib import Path

STAGES = ("sft", "dpo", "kto", "grpo", "rloo", "reward", "distillation")
TARGET = Path(__file__).parents[1] / "src/surefit/importers/schemas/trl_stages.json"


def keys_of(stage: str) -> list[str]:
    """The keys of one command's config file."""
    parser = import_module(f"trl.scripts.{stage}").make_parser()
    return sorted({field.name for kind in parser.dataclass_types for field in fields(kind) if field.init})


def main() -> None:
    """Write the file."""
    found = {stage: keys_of(stage) for stage in STAGES}
    shared = sorted(set.intersection(*map(set, found.values())))
    table = {
        "tool": "trl_stages",
        "version": metadata.version("trl"),
        "shared": " ".join(shared),
        "stages": {stage: " ".join(key for key in keys if key not in shared) for stage, keys in found.items()},
    }
    TARGET.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
