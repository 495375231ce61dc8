"""How an assistant's turn ends where its chat template writes nothing behind it: with the token that the next turn
begins with.

GLM has no end of turn: it writes `<|user|>` or, behind a call, `<|observation|>`, and generation stops there. Others
write the end of a turn only once another follows (Apertus, Hy3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

from surefit.facts.template import TemplateRefused, render_chat_template
from surefit.facts.thinking import message_as_template_reads, probe_template_reasoning

_MARK = "surefit"
_ASKED = {"role": "user", "content": "?"}
_ANSWER = {"role": "assistant", "content": _MARK}
_CALL = {"id": "surefit01", "type": "function", "function": {"name": "look", "arguments": {"word": "x"}}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "look", "tool_call_id": "surefit01", "content": "found"}
_NEXT: Mapping[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "user": ([_ASKED, _ANSWER], _ASKED), "tool": ([_ASKED, _CALLING], _RESULT)
}  # fmt: skip


def ends_of_turn(template: str, special: Mapping[str, str], tokens: Callable[[], Iterable[str]]) -> dict[str, str]:
    """What ends an answer ("user") and a call ("tool"), where that is the beginning of the turn behind it; empty for a
    template that ends its turns.

    Args:
        template: its text.
        special: `bos_token` and the others, by name.
        tokens: gives the tokenizer's added tokens, of which some have thousands; only such a template needs them.
    """
    named = tuple(sorted(special.items()))
    return _ends(template, named, frozenset(tokens())) if _writes_no_end(template, named) else {}


def turn_end_text(message: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    """What the model has to write behind this turn of its own."""
    return ends.get("tool" if message.get("tool_calls") else "user", "")


@lru_cache(maxsize=8)
def _writes_no_end(template: str, special: tuple[tuple[str, str], ...]) -> bool:
    answered = _rendered(template, special, [_ASKED, _ANSWER])
    return _MARK in answered and not answered.rpartition(_MARK)[2].strip()


@lru_cache(maxsize=8)
def _ends(template: str, special: tuple[tuple[str, str], ...], tokens: frozenset[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for role, (turns, following) in _NEXT.items():
        before, whole = (_rendered(template, special, each) for each in (turns, [*turns, following]))
        ended = "user" in found and before.endswith(found["user"])  # Hy3 ends its calls, and no answer
        if before and whole.startswith(before) and not ended and (end := _opening(whole[len(before) :], tokens)):
            found[role] = end
    return found


def _rendered(template: str, special: tuple[tuple[str, str], ...], turns: list[dict[str, Any]]) -> str:
    reads = probe_template_reasoning(template)
    try:
        return render_chat_template(
            template, [message_as_template_reads(turn, reads) for turn in turns], special=dict(special)
        )
    except TemplateRefused:
        return ""


def _opening(text: str, tokens: frozenset[str]) -> str:
    """The text up to the end of its first token, where nothing but white space stands before that."""
    token = first_in(text, tokens)
    before = text.partition(token)[0] if token else text
    return before + token if token and not before.strip() else ""


def first_in(text: str, tokens: Iterable[str]) -> str | None:
    """The token that stands first in a text; of two that start at the same place the longer one."""
    places = [(text.find(token), -len(token), token) for token in tokens if token.strip() and token in text]
    return min(places)[2] if places else None
