"""Another tool's config written as a SureFit config: each value with its original key, each lost key as a comment."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from surefit.config.resolve import iter_config_values, lookup, one_line_yaml
from surefit.config.schema import DataSection, ModelSection, SureFitConfig
from surefit.core.units import truncate_text
from surefit.importers.config_mapping import hide_secret
from surefit.importers.result import ImportedConfig, UnmappedKey

WIDTH = 100
"""The largest number of characters of a value that a comment quotes."""
NOTES = {
    "data.packing": "; SureFit packs within a step: a batch still counts whole, separate examples",
    "data.mix": "; rows are held out from data.train only",
    "checkpoint.metric_for_best_model": "; the held-out loss is measured at every checkpoint",
}
"""What a value means in SureFit and may not mean in the other tool."""


UNCHANGED = "turned off, or SureFit's default"
"""Why a key that was read is not in the written config."""


def to_config_yaml(found: ImportedConfig) -> str:
    """Return the YAML of a runnable SureFit config. `found.loaded` must not be None."""
    assert found.loaded is not None
    head = [
        f"# A SureFit config, made by `surefit import` of {_one_line(found.path.name)}. The comment after a value",
        f"# names its original key, or {found.tool}'s default if the file does not set it.",
        "",
    ]
    body = [*_values(found), *_comments(found)]
    return "\n".join([*head, *body, *_keys_without_effect(found, body)]) + "\n"


def _values(found: ImportedConfig) -> list[str]:
    """Return lines for the values set by the file or the tool's own defaults; SureFit's defaults are left out."""
    assert found.loaded is not None
    config = found.loaded.config
    minimal = SureFitConfig(model=ModelSection(name_or_path=""), data=DataSection(train=""), output_dir="")
    lines: list[str] = []
    section = ""
    for dotted, default in iter_config_values(minimal):
        value = lookup(config, dotted)
        if dotted not in found.names or (dotted not in found.loaded.lines and default == value):
            continue
        parent, _, leaf = dotted.rpartition(".")
        if parent != section and parent:
            lines.append(f"{parent}:")
        section = parent
        lines.append(f"{'  ' if parent else ''}{leaf}: {one_line_yaml(value)}  # {_origin(found, dotted, value)}")
    return lines


def _origin(found: ImportedConfig, dotted: str, value: Any) -> str:
    assert found.loaded is not None
    key = found.names[dotted]
    if not key:
        return f"not set in {_one_line(found.path.name)}"
    is_set = dotted in found.loaded.lines
    origin = f"{found.tool}: {key}" if is_set else f"{found.tool}'s default of {key}"
    return origin + (NOTES.get(dotted, "") if value else "")


def _comments(found: ImportedConfig) -> list[str]:
    lines: list[str] = []
    lines += _block("Not carried over:", [*found.judged, *found.lost, *found.parts])
    gone = [
        f"# {_one_line(key)}: {found.tool} removed it: {_one_line(instead)}"
        for key, instead in found.setup.gone.items()
    ]
    unknown = [f"# {_one_line(key)}: {found.tool} does not have this key" for key in found.setup.unknown]
    wrong = [f"# {_one_line(str(problem.field))}: {_one_line(problem.message)}" for problem in found.problems]
    if gone or unknown or wrong:
        lines += ["", "# Wrong in the original:", *gone, *unknown, *wrong]
    return lines


def _keys_without_effect(found: ImportedConfig, body: Iterable[str]) -> list[str]:
    """Return comments for keys that change nothing: switched off, equal to SureFit's behavior, or without effect."""
    words = set(re.findall(r"[\w.]+", "\n".join(body)))
    lines = [
        f"# {_one_line(key)}: {_quoted(hide_secret(key, value))}: {_one_line(found.setup.ignored.get(key, UNCHANGED))}"
        for key, value in found.values.items()
        if value is not None and key in found.mapped and not {key, key.rpartition(".")[2]} & words
    ]
    return ["", "# Read, with nothing to write:", *lines] if lines else []


def _block(title: str, keys: Iterable[UnmappedKey]) -> list[str]:
    ordered = sorted(keys, key=lambda lost: lost.line or 0)
    if not ordered:
        return []
    return [
        "",
        f"# {title}",
        *(f"# {_one_line(key.key)}: {_quoted(key.value)}: {_one_line(key.why)}" for key in ordered),
    ]


def _quoted(value: Any) -> str:
    return truncate_text(_one_line(one_line_yaml(value)), WIDTH * (4 if isinstance(value, dict | list) else 1))


def _one_line(text: str) -> str:
    return " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
