"""Writes docs/reference/ from what the code says of itself: the config from its schema, the rules from their pages,
what does not go together from its table.

python scripts/reference.py          (or `make reference`; a test compares the pages with the code)
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from surefit.config.capabilities import CONFLICTS, Trait
from surefit.config.load import expected_text
from surefit.config.modes import MODES
from surefit.config.schema import Config
from surefit.core.rundir import write_atomic
from surefit.lint.engine import all_rules

OUTPUT = Path(__file__).parents[1] / "docs" / "reference"


def config_page() -> str:
    """Every key: what it takes, its default, what it does."""
    lines = [
        "# The config",
        "",
        "YAML, read by the 1.2 core rules: `2e-4` is a number, `no` is a text. Unknown keys are refused. Any value can",
        "be set for one call: `surefit train run.yaml --set train.epochs=2`. `auto` is decided from model, data",
        "and machine; `resolved.yaml` in the run directory says what was decided, and why.",
        "",
    ]
    top = {name: field for name, field in Config.model_fields.items() if not _is_section(field.annotation)}
    lines += ["## At the top", "", *_table(top, "")]
    for name, field in Config.model_fields.items():
        if _is_section(field.annotation):
            lines += [f"## {name}", "", field.description or "", "", *_section(field.annotation, f"{name}.")]
    return "\n".join(lines).rstrip() + "\n"


def _section(section: Any, prefix: str) -> list[str]:
    lines = _table(section.model_fields, prefix)
    for name, field in section.model_fields.items():
        inner = next((option for option in getattr(field.annotation, "__args__", ()) if _is_section(option)), None)
        if inner is not None:
            lines += [f"### {prefix}{name}", "", field.description or "", "", *_section(inner, f"{prefix}{name}.")]
    return lines


def _table(fields: Any, prefix: str) -> list[str]:
    lines = ["| key | takes | default | what it does |", "|---|---|---|---|"]
    for name, field in fields.items():
        default = field.get_default(call_default_factory=True)
        shown = "required" if default is PydanticUndefined else f"`{_yaml(default)}`"
        takes = expected_text(f"{prefix}{name}").replace("|", "\\|")
        lines.append(f"| `{name}` | {takes} | {shown} | {field.description} |")
    return [*lines, ""]


def _yaml(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value)


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def rules_page() -> str:
    """Every rule, as `surefit explain CODE` shows it."""
    rules = all_rules()
    lines = ["# The rules of `surefit check`", "", "| code | severity | what it finds |", "|---|---|---|"]
    lines += [f"| [{r.code}](#{r.code.lower()}) | {r.severity} | {r.summary} |" for r in rules]
    for rule in rules:
        page = rule.doc.replace("\n## ", "\n### ")
        lines += ["", f"## {rule.code}", "", f"*{rule.name}, {rule.severity}.* {page}"]
    return "\n".join(lines) + "\n"


def combinations_page() -> str:
    """The modes, and what does not go together, rows of one reason in one line."""
    lines = [
        "# The parallel modes, and what does not go together",
        "",
        "| `parallel.mode` | what each process has | the same examples are read by | `parallel.offload` moves |",
        "|---|---|---|---|",
        *(
            f"| `{name}` | {mode.holds} | {f'`parallel.{name}` processes' if mode.grouped else 'one process'} | "
            f"{_OFFLOADED[mode.divided] if mode.sharded else '–'} |"
            for name, mode in MODES.items()
        ),
        "",
        "`fsdp` goes with `parallel.cp`: as many processes then read the same examples.",
        "",
        "## What does not go together",
        "",
        "Everything else does: `tests/combinations` trains two steps of combinations in which every two values of",
        "thirteen settings meet, with what is `auto` decided for seven kinds of hardware. `check` names each row that",
        "a config meets, `auto` and the search of `surefit plan` choose none, and training refuses by the same table",
        "(`config/capabilities.py`).",
        "",
        "| with | not | why | rule |",
        "|---|---|---|---|",
    ]
    refused: dict[tuple[str, str, Trait], list[Trait]] = {}
    for row in CONFLICTS:
        refused.setdefault((row.code, row.why, row.other), []).append(row.one)
    alike: dict[tuple[str, str, tuple[Trait, ...]], list[Trait]] = {}
    for (code, why, other), ones in refused.items():
        alike.setdefault((code, why, tuple(ones)), []).append(other)
    for (code, why, first), others in alike.items():
        lines.append(f"| {_words(first)} | {_words(others)} | {why} | [{code}](rules.md#{code.lower()}) |")
    return "\n".join(lines) + "\n"


_OFFLOADED = {"optimizer state": "optimizer state", "weights": "weights and optimizer state"}


def _words(names: Iterable[Trait]) -> str:
    return ", ".join(f"`{name}`" if name.islower() and name.isidentifier() else name for name in names)


PAGES = {"config.md": config_page, "rules.md": rules_page, "combinations.md": combinations_page}


def main() -> None:
    for name, page in PAGES.items():
        write_atomic(OUTPUT / name, page())


if __name__ == "__main__":
    main()
