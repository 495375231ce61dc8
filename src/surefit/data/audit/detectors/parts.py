"""Access to a row's parts for the detectors: its texts, its answer, its turns.

A row comes from an unknown file: every function here accepts any value, and raises nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from surefit.facts.dataset import GENERAL, TARGETS

ANSWERS = (*TARGETS, "code", "gold", "reference_summary", "highlights", "canonical_solution")
"""Columns that hold an answer, in the order of the search."""
CONVERSATIONS = ("messages", "conversations", "contents")
_DEEPEST = 40
"""The deepest nesting that is followed; the readers accept at most 100 levels."""


def iterate_texts(value: Any, depth: int = 0) -> Iterator[str]:
    """Yield every text inside a JSON value; keys are not included."""
    if isinstance(value, str):
        yield value
    elif depth < _DEEPEST and isinstance(value, (dict, list)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from iterate_texts(inner, depth + 1)


def find_answer(row: Mapping[str, Any]) -> tuple[str, Any]:
    """Return (column, value) of the row's training target, in a conversation the last assistant turn; ("", None) for
    none.
    """
    for turn in reversed(conversation_turns(row)):
        if _role(turn) == "assistant":
            column = next(name for name in (*CONVERSATIONS, "question") if name in row)
            return column, next((turn[name] for name in ("content", "value", "parts") if name in turn), None)
    for columns, target in GENERAL:
        if target and row.keys() >= set(columns):
            return target, row[target]
    return next(((name, row[name]) for name in ANSWERS if name in row), ("", None))


def answer_text(row: Mapping[str, Any]) -> str:
    """Return the answer as text, also from a list of one text; "" for anything else."""
    value = find_answer(row)[1]
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, dict):
        value = value.get("content", value.get("text"))
    return value if isinstance(value, str) else ""


def conversation_turns(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the turns of a conversation that are objects; for a file with several rounds the turns of the first."""
    value = next((row[name] for name in CONVERSATIONS if isinstance(row.get(name), list)), None)
    if value is None and isinstance(row.get("question"), list):  # the function-calling leaderboard's rounds
        value = next((item for item in row["question"] if isinstance(item, list)), None)
    return [turn for turn in value or () if isinstance(turn, dict)]


def turn_roles(row: Mapping[str, Any]) -> list[str]:
    """Return the role of each turn."""
    return [_role(turn) for turn in conversation_turns(row)]


def _role(turn: Mapping[str, Any]) -> str:
    role = turn.get("role", turn.get("from"))
    aliases = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant"}
    return aliases.get(role, role) if isinstance(role, str) else ""


def excerpt_around(text: str, start: int, end: int, margin: int = 12) -> str:
    """Return a part of a text with the characters around it, as `repr` shows it.

    >>> excerpt_around("a long text with a cafÃ© in it", 22, 24)
    "'…t with a cafÃ© in it'"
    """
    left, right = max(0, start - margin), min(len(text), end + margin)
    return repr(("…" if left else "") + text[left:right] + ("…" if right < len(text) else ""))
