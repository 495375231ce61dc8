"""Reasoning in a conversation: where rows have it, and what a chat template makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefit.facts.chat_template import SPECIAL
from surefit.facts.template import TemplateRefused, render

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which an assistant's message holds its reasoning: DeepSeek's and Qwen's, OpenRouter's and vLLM's, and
gpt-oss's."""
OPENING, CLOSING = "<think>", "</think>"
_TAGGED = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_EMPTY = re.compile(r"\s*(<think>)?\s*</think>")
_MARK = "surefit"
_QUESTION = {"role": "user", "content": "?"}


@dataclass(frozen=True)
class Reads:
    """What a chat template makes of the reasoning in the last answer.

    Attributes:
        fields: the names, of `FIELDS`, under which it finds it and writes it.
        tags: it writes reasoning that stands in the content as `<think>…</think>`, as that or in its own way.
        moves: it takes those tags for reasoning, so that the two ways are written alike.
        opens: its generation prompt ends with an opened `<think>`: the model always thinks.
        empties: of an answer without reasoning it writes an empty thought, which the model has to write.
    """

    fields: tuple[str, ...] = ()
    tags: bool = False
    moves: bool = False
    opens: bool = False
    empties: bool = False


def split_thoughts(text: str) -> tuple[str, str]:
    """(reasoning, answer) of a text that a model wrote. The opening tag may be missing: it often stands in the prompt.

    >>> split_thoughts("<think>\\n2 and 2\\n</think>\\n\\n4"), split_thoughts("4")
    (('\\n2 and 2\\n', '4'), ('', '4'))
    """
    found = _TAGGED.match(text)
    return (found[1], text[found.end() :]) if found else ("", text)


def has_field(message: Mapping[str, Any]) -> bool:
    """Whether a field of the message holds reasoning."""
    return any(isinstance(value := message.get(name), str) and value.strip() for name in FIELDS)


def thoughts_of(message: Mapping[str, Any]) -> str:
    """The reasoning of an assistant's message, from a field of its own or from its content; empty where it has none."""
    if has_field(message):
        return next(value for name in FIELDS if isinstance(value := message.get(name), str) and value.strip())
    thoughts, _ = split_thoughts(str(message.get("content") or ""))
    return thoughts if thoughts.strip() else ""


def without_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its answer alone."""
    kept = {name: value for name, value in message.items() if name not in FIELDS}
    if isinstance(content := kept.get("content"), str):
        kept["content"] = split_thoughts(content)[1]
    return kept


def as_read(message: dict[str, Any], reads: Reads) -> dict[str, Any]:
    """The message with its reasoning where the template looks for it; one that the template never writes stays where it
    is (TPL009)."""
    if message["role"] != "assistant" or not reads.fields or any(message.get(name) for name in reads.fields):
        return message
    own = next((message[name] for name in FIELDS if message.get(name)), None)
    if own is not None:
        return {**message, reads.fields[0]: own}
    thoughts, answer = split_thoughts(str(message.get("content") or ""))
    if reads.moves or not thoughts.strip():
        return message
    return {**message, reads.fields[0]: thoughts.strip("\n"), "content": answer}


@lru_cache(maxsize=8)
def how_read(template: str) -> Reads:
    """What the template makes of reasoning, found by rendering an answer that has some; nothing where it refuses that.

    Args:
        template: its text, the switches of the run among it (`chat_template.with_defaults`).
    """
    tagged = _written(template, content=f"{OPENING}\n{_MARK}\n{CLOSING}\n\n!")
    by_field = {name: _written(template, content="!", **{name: _MARK}) for name in FIELDS}
    fields = tuple(name for name, text in by_field.items() if _MARK in text)
    try:
        asked = render(template, [_QUESTION], add_generation_prompt=True, special=SPECIAL)
    except TemplateRefused:
        asked = ""
    plain = _written(template, content="!")
    return Reads(
        fields,
        tags=_MARK in tagged,
        moves=bool(fields) and tagged == by_field[fields[0]],
        opens=asked.rstrip().endswith(OPENING),
        empties=bool(asked) and plain.startswith(asked) and bool(_EMPTY.match(plain[len(asked) :])),
    )


def _written(template: str, **answer: str) -> str:
    try:
        return render(template, [_QUESTION, {"role": "assistant", **answer}], special=SPECIAL)
    except TemplateRefused:
        return ""
