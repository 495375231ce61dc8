"""Chat templates by name: some models have one for conversations with tools beside the usual one (Command R, Hermes).

transformers keeps the usual one as `chat_template.jinja` and the others in `additional_chat_templates/`; older releases
wrote a list into tokenizer_config.json. A tokenizer has a text, or a mapping where there are several.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from surefit.core.errors import ModelError
from surefit.core.reading import read_bytes
from surefit.facts.validate_model_files import MAX_TEMPLATE_BYTES, read_json_object, templates_of

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_DIR = "additional_chat_templates"
DEFAULT, TOOL_USE = "default", "tool_use"


def to_template_dict(templates: str | Mapping[str, str] | None) -> dict[str, str]:
    """Return the templates of a tokenizer by their names; a text alone is the default one."""
    if not templates:
        return {}
    return {DEFAULT: templates} if isinstance(templates, str) else dict(templates)


def template_for(templates: str | Mapping[str, str] | None, tools: Any) -> str | None:
    """Return the template that a conversation with these tools is rendered with, as transformers chooses it."""
    by_name = to_template_dict(templates)
    return by_name[TOOL_USE] if tools and TOOL_USE in by_name else by_name.get(DEFAULT)


def to_chat_template_attribute(templates: Mapping[str, str]) -> str | dict[str, str]:
    """Return the templates as the attribute `chat_template` of a tokenizer: a text where there is only the default."""
    return templates[DEFAULT] if set(templates) == {DEFAULT} else dict(templates)


def template_files(directory: Path) -> dict[str, Path]:
    """Return the files of a folder that hold one template each, by the template's name."""
    single = directory / TEMPLATE_FILE
    additional = sorted((directory / TEMPLATE_DIR).glob("*.jinja"))
    return ({DEFAULT: single} if single.is_file() else {}) | {path.stem: path for path in additional if path.is_file()}


def templates_in(directory: Path) -> dict[str, str]:
    """Return the templates that a tokenizer of this folder would have: those in files of their own, else those in
    tokenizer_config.json.

    Raises:
        ModelError: a file cannot be read.
    """
    templates = {name: _read(path) for name, path in template_files(directory).items()}
    config = directory / "tokenizer_config.json"
    return templates or (templates_of(read_json_object(config)) if config.is_file() else {})


def _read(path: Path) -> str:
    try:
        return read_bytes(path, MAX_TEMPLATE_BYTES).decode("utf-8", "replace")
    except OSError as error:
        raise ModelError(
            f"cannot be read: {error.strerror}", code="E2086", path=path, help="download the file again"
        ) from None
