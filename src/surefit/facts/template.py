"""Chat templates, rendered as transformers renders them, without importing it."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2 import Environment, Template

# The tag is transformers' own. `if true` stands where it stood, so that the dashes go on to mean what they meant.
_OPENING = re.compile(r"(\{%-?\s*)generation(\s*-?%\})")
_CLOSING = re.compile(r"(\{%-?\s*)endgeneration(\s*-?%\})")


class TemplateRefused(Exception):
    """The template raised on these messages, or is no valid template."""


def render(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    special: Mapping[str, str] | None = None,
) -> str:
    """The text that the template makes of a conversation.

    Args:
        template: its text.
        messages: the conversation, as `apply_chat_template` takes it.
        tools: JSON-schema functions.
        add_generation_prompt: end with what asks for an answer.
        special: `bos_token` and the others, by name.

    Raises:
        TemplateRefused: with the template's own reason.
    """
    try:
        return _compiled(template).render(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **(special or {})
        )
    except Exception as error:  # a template is somebody's program: it can fail in any way
        raise TemplateRefused(str(error)) from error


@lru_cache(maxsize=4)
def _compiled(template: str) -> Template:
    return _environment().from_string(_CLOSING.sub(r"\1endif\2", _OPENING.sub(r"\1if true\2", template)))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _refuse(message: str) -> NoReturn:
    raise TemplateRefused(message)
