"""Prompts of rows, whatever the layout: the turns before the answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from surefit.core.errors import DataError
from surefit.data.rows.cloud_layouts import messages_from_contents
from surefit.data.rows.messages import (
    messages_from_sharegpt,
    parse_json_list,
    parse_messages,
    require_text,
    system_turn,
    tools_from_row,
)
from surefit.task import Message, Row

PROMPTS = ("messages", "conversations", "contents", "prompt")
"""Columns that hold a prompt, except Alpaca's."""
NO_INPUT = "<noinput>"
"""Self-Instruct's text for an empty input; Alpaca's rows follow the same format."""


def turns_of(value: Any, field: str, role: str) -> list[Message]:
    """Return a list of messages as it is, or a text as one message."""
    if isinstance(value, str):
        if not value.strip():
            raise DataError("empty", code="E4010", field=field)
        return [{"role": role, "content": value}]
    return parse_messages(value, field)


def text_row(row: Row) -> dict[str, Any]:
    """Return the text of a row of plain text."""
    value = require_text(row["text"], "text")
    if not value.strip():
        raise DataError("empty", code="E4011", field="text")
    return {"text": value}


def alpaca_prompt(row: Row) -> list[Message]:
    """Return the turns before the answer in a row of Alpaca's: system, history, and the instruction with its input."""
    instruction = require_text(row["instruction"], "instruction")
    # Dolly calls the input column context.
    name = "context" if "context" in row and "input" not in row else "input"
    context = require_text(row.get(name) or "", name)
    context = "" if context.strip().lower() == NO_INPUT else context
    question = "\n\n".join(part for part in (instruction, context) if part.strip())
    if not question:
        raise DataError("empty", code="E4013", field="instruction")
    messages = system_turn(row)
    for i, pair in enumerate(parse_json_list(row.get("history") or [], "history")):
        messages += _history_turns(pair, f"history[{i}]")
    return [*messages, {"role": "user", "content": question}]


def _history_turns(pair: Any, field: str) -> list[Message]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise DataError("expected a list of a question and an answer", code="E4014", field=field)
    return [{"role": role, "content": pair[i]} for i, role in enumerate(("user", "assistant"))]


def contents_turns(row: Row) -> list[Message]:
    """Return the turns of Vertex AI's `contents`, checked."""
    return parse_messages(messages_from_contents(parse_json_list(row["contents"], "contents")), "contents")


def prompt_row(row: Row) -> dict[str, Any]:
    """Return the prompt and the tools of a row that is only to be answered, or its text to continue."""
    if row.get("instruction") is not None and all(row.get(name) is None for name in PROMPTS):
        return {"messages": alpaca_prompt(row), "tools": tools_from_row(row)}
    if row.get("messages") is not None:
        messages = parse_messages(row["messages"], "messages")
    elif row.get("conversations") is not None:
        messages = parse_messages(*messages_from_sharegpt(row))
    elif row.get("contents") is not None:
        messages = contents_turns(row)
    elif row.get("prompt") is not None:
        messages = turns_of(row["prompt"], "prompt", "user")
    elif row.get("text") is not None:
        return text_row(row)
    else:
        help_text = "a row has messages, conversations, contents, prompt or instruction, or text to continue"
        raise DataError(f"no prompt among the columns {listed(list(row))}", code="E4021", help=help_text)
    return {"messages": [*system_turn(row, messages), *messages], "tools": tools_from_row(row)}


def listed(names: Sequence[str]) -> str:
    """Return the first names of columns, and how many more there are."""
    return ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "") or "none"
