"""Supervised fine-tuning on the general data formats: any conversation, or plain text to continue.

`surefit.data` has converted prompt/completion, Alpaca and ShareGPT rows into messages before.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from surefit.core.errors import DataError, did_you_mean
from surefit.facts.free_text import LIKELIHOOD
from surefit.facts.thinking import split_think_tags
from surefit.metrics.strict_json import json_kind
from surefit.task import Example, Prediction, Row, Scores, TaskRecipe

_ROLES = ("system", "user", "assistant", "tool")
_HELP = (
    'a row is {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}, with "tools" '
    'next to it if the row has tools, or {"text": "…"}'
)


def to_example(row: Row) -> Example:
    """Convert a row with `messages` (and `tools`, a list or null), or with `text`.

    The completion is the text of the last turn if that is the assistant's; a turn that only calls tools has no text, so
    it is trained on through the chat template but not scored.

    Raises:
        DataError: the row has neither column, or a turn has no known role or no text; `field` names it.
    """
    if row.get("messages") is not None:
        messages = _messages(row["messages"])
        last = messages[-1]
        completion = last["content"] if last["role"] == "assistant" and last.get("content") else None
        return Example(messages=messages, tools=_tools(row.get("tools")), completion=completion, reference=completion)
    text = row.get("text")
    if isinstance(text, str) and text.strip():
        return Example(text=text)
    if text is not None:
        raise DataError(
            f"text is {'empty' if isinstance(text, str) else json_kind(text)}", code="E7133", field="text", help=_HELP
        )
    columns = ", ".join(map(repr, row)) or "none"
    hint = did_you_mean("messages", row) or did_you_mean("text", row)
    raise DataError(
        f"the row has neither messages nor text, only {columns}{hint}", code="E7134", field="messages", help=_HELP
    )


def _messages(value: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(value, list) or not value:
        problem = "empty" if value == [] else f"{json_kind(value)}, not a list"
        raise DataError(f"messages is {problem}", code="E7135", field="messages", help=_HELP)
    for n, turn in enumerate(value):
        where = f"messages[{n}]"
        if not isinstance(turn, Mapping):
            raise DataError(f"a turn is {json_kind(turn)}, not an object", code="E7136", field=where, help=_HELP)
        if turn.get("role") not in _ROLES:
            problem = f"the role is {turn.get('role')!r}, not one of {', '.join(_ROLES)}"
            raise DataError(problem, code="E7137", field=f"{where}.role", help=_HELP)
        if not isinstance(turn.get("content"), str) and not turn.get("tool_calls"):
            problem = f"the content is {json_kind(turn.get('content'))}, not a string"
            raise DataError(problem, code="E7138", field=f"{where}.content", help=_HELP)
    return tuple(dict(turn) for turn in value)


def _tools(value: Any) -> tuple[dict[str, Any], ...] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise DataError("tools is not a list of objects", code="E7139", field="tools", help=_HELP)
    return tuple(dict(tool) for tool in value) or None


def _score(example: Example, prediction: Prediction) -> Scores:
    if example.reference is None:
        raise DataError("the row has no final answer to compare with", code="E7140", field="messages", help=_HELP)
    return {"exact_match": float(prediction.parsed == _parse(example.reference))}


def _parse(text: str) -> str:
    """Return the answer without the reasoning before it."""
    return split_think_tags(text)[1].strip()


RECIPE = TaskRecipe(
    name="chat",
    purpose="Answers as your rows do: support, style, any questions and answers. Most tasks begin here.",
    version=3,
    citation="likelihood of the row's answer, and exact match of the stripped answer, reasoning left out; no external "
    "scorer",
    columns=(),
    to_example=to_example,
    parse=_parse,
    score=_score,
    primary_metric="exact_match",
    metrics=("exact_match", LIKELIHOOD),
    free_text=True,
)
