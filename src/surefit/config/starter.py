"""`surefit init`: a commented starter config, generated from the schema so that both agree."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from surefit.config.resolve import one_line_yaml
from surefit.config.schema import ObjectiveSection, SureFitConfig

STARTERS: dict[str, dict[str, Any]] = {
    "amr_parsing": {
        "model.name_or_path": "surefit/nano",
        "train.method": "full",  # the model has never seen a Vietnamese letter
        "data.train": "surefit/amr-tiny-train",
        "data.eval": "surefit/amr-tiny-eval",
        "data.max_length": 256,
        "train.num_train_epochs": 8.0,
        "train.max_steps": 300,
        "train.learning_rate": 2e-3,
        "train.global_batch_size": 16,
        "evaluate.max_new_tokens": 128,
        "output_dir": "runs/amr-parsing",
    },
    "code_generation": {
        "model.name_or_path": "surefit/nano",
        "train.method": "full",  # the model has never written Python's signs, and an adapter keeps its embedding
        "data.train": "surefit/code-generation-train",
        "data.eval": "surefit/code-generation-eval",
        "data.max_length": 512,
        "train.num_train_epochs": 10.0,
        "train.max_steps": 200,
        "train.learning_rate": 2e-3,
        "train.global_batch_size": 16,
        "evaluate.max_new_tokens": 64,
        "output_dir": "runs/code-generation",
    },
    "long_summarization": {
        "model.name_or_path": "surefit/nano",
        "data.train": "surefit/summaries-train",
        "data.eval": "surefit/summaries-eval",
        "data.max_length": 384,
        "data.too_long": "truncate",
        "train.num_train_epochs": 10.0,
        "train.max_steps": 150,
        "train.learning_rate": 5e-3,
        "train.global_batch_size": 16,
        "evaluate.max_new_tokens": 96,
        "output_dir": "runs/long-summarization",
    },
    "math_reasoning": {
        "model.name_or_path": "surefit/nano",
        "data.train": "surefit/math-reasoning-train",
        "data.eval": "surefit/math-reasoning-eval",
        "data.max_length": 256,
        "train.num_train_epochs": 10.0,
        "train.max_steps": 200,
        "train.learning_rate": 5e-3,
        "train.global_batch_size": 32,
        "evaluate.max_new_tokens": 32,
        "output_dir": "runs/math-reasoning",
    },
    "function_calling": {
        "model.name_or_path": "surefit/nano",
        "data.train": "surefit/function-calling-train",
        "data.eval": "surefit/function-calling-eval",
        "data.max_length": 1024,
        "train.num_train_epochs": 10.0,
        "train.max_steps": 120,
        "train.learning_rate": 1e-2,  # right for a model of a million parameters only
        "train.global_batch_size": 32,
        "evaluate.max_new_tokens": 96,
        "output_dir": "runs/function-calling",
    },
    "rec_ranking": {
        "model.name_or_path": "surefit/nano",
        "data.train": "surefit/rec-tiny-train",
        "data.eval": "surefit/rec-tiny-eval",
        "data.max_length": 512,
        "train.num_train_epochs": 6.0,
        "train.max_steps": 200,
        "train.learning_rate": 1e-2,
        "train.global_batch_size": 32,
        "output_dir": "runs/rec-ranking",
    },
}
"""Recipe → values of a config that runs as written; other recipes get `GENERAL`."""

OWN_ROWS = "train.jsonl"
"""File that a starter without bundled rows names: the user replaces it with a file of their own."""
GENERAL: dict[str, Any] = {
    "model.name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
    "data.train": OWN_ROWS,
    "data.eval": 0.02,
    "train.num_train_epochs": "auto",
    "train.global_batch_size": "auto",
    "output_dir": "runs/my-run",
}


def has_bundled_rows(recipe: str) -> bool:
    """Return whether the recipe's starter has bundled rows; the others name a file of the user's."""
    return recipe in STARTERS


def short_starter(recipe: str) -> str:
    """Return a config for `recipe` with only the values that it sets, each with what the setting is."""
    values = {"recipe": recipe, **(STARTERS.get(recipe) or GENERAL)}
    rows = "sample rows: name yours" if has_bundled_rows(recipe) else "your rows"
    comments = {"model.name_or_path": "a hub id, a directory or a GGUF file", "data.train": rows}
    lines = [(key, value, comments.get(key) or _first_sentence(key)) for key, value in values.items()]
    return commented_yaml(lines)


def commented_yaml(lines: Iterable[tuple[str, Any, str]]) -> str:
    """Return YAML of (dotted key, value, comment), whose sections stand together."""
    written, section = [], ""
    for key, value, comment in lines:
        head, _, name = key.rpartition(".")
        if head != section and head:
            written.append(f"{head}:")
        section = head
        setting = f"{'  ' if head else ''}{name}: {one_line_yaml(value)}"
        written.append(f"{setting:<40} # {comment}" if comment else setting)
    return "\n".join(written) + "\n"


def _first_sentence(dotted: str) -> str:
    """Return what a setting is, by its description in the schema, in a few words."""
    model: Any = SureFitConfig
    for name in dotted.split("."):
        field = model.model_fields[name]
        model = field.annotation
    text = " ".join((field.description or "").split())
    return re.split(r"[.;:](?:\s|$)", text, maxsplit=1)[0]


def starter_config(recipe: str) -> str:
    """Return a config for `recipe` as commented YAML: the values that everyone has to check are set, the others are
    comments.

    The file parses as it is; uncommenting a line sets that value.
    """
    values = {"recipe": recipe, **(STARTERS.get(recipe) or GENERAL)}
    lines = [
        "# A SureFit config. Lines such as '#  r: 16' show the defaults: remove the '#' to change one (and the one of",
        "# its section). `surefit check` says what is wrong with the config, `surefit run` runs it.",
        *([] if has_bundled_rows(recipe) else [f"# First name your own rows: data.train, here {OWN_ROWS}."]),
        "",
    ]
    return "\n".join(lines + _section(SureFitConfig, "", values)) + "\n"


def _section(section: type[BaseModel], prefix: str, values: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    indent = "  " * prefix.count(".")
    for name, field in section.model_fields.items():
        dotted = f"{prefix}{name}"
        inner = field.annotation
        lines += [f"{indent}# {text}" for text in textwrap.wrap(field.description or "", 110)]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            has_values = any(key.startswith(f"{dotted}.") for key in values)
            lines.append(f"{'' if has_values else '#'}{indent}{name}:")
            lines += _section(inner, f"{dotted}.", values)
        elif dotted in values:
            lines.append(f"{indent}{name}: {one_line_yaml(values[dotted])}")
        else:
            default = field.get_default(call_default_factory=True)
            unread = "# " if section is ObjectiveSection and name not in ObjectiveSection().read_keys else ""
            lines.append(f"#{indent}{unread}{name}: {one_line_yaml(None if default is PydanticUndefined else default)}")
        if not prefix:
            lines.append("")
    return lines
