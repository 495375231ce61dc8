"""Texts that begin an answer in the chat templates that Unsloth names, and in the templates of well-known models."""

from __future__ import annotations

import re

from surefit.importers.known import read_schema

_TABLE = read_schema("turn_markers.json")
MARKERS: list[str] = _TABLE["markers"]
UNSLOTH_TEMPLATES: dict[str, str | None] = _TABLE["unsloth_templates"]
"""Name of an Unsloth chat template (2026.10.9) → the text that begins an answer; None if it is not always the same."""
MODELS: list[tuple[str, str]] = _TABLE["models"]
"""(pattern of the names of chat models, the text that begins an answer in their chat template)."""


def marker_of(text: str) -> str | None:
    """Return the first of `MARKERS` that a text contains.

    >>> marker_of("<|im_start|>assistant\\n"), marker_of("Answer:")
    ('<|im_start|>assistant', None)
    """
    return next((marker for marker in MARKERS if marker in text), None)


def marker_of_model(name: str) -> str | None:
    """Return the text that begins an answer in a model's chat template, by the model's name.

    >>> marker_of_model("unsloth/Llama-3.2-3B-Instruct-bnb-4bit"), marker_of_model("meta-llama/Llama-3.1-8B")
    ('<|start_header_id|>assistant', None)
    """
    leaf = name.rpartition("/")[2].lower()
    markers = {marker for pattern, marker in MODELS if re.search(pattern, leaf)}
    return markers.pop() if len(markers) == 1 else None
