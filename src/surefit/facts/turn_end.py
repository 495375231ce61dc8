"""End of an assistant's turn where its chat template writes nothing behind it: the token that the next turn begins
with.

GLM has no end of turn: it writes `<|user|>` or, behind a tool call, `<|observation|>`, and generation stops there.
Others write the end of a turn only once another follows (Apertus, Hy3).
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
    """Return the texts that end an answer ("user") and a tool call ("tool"), where the next turn's beginning does;
    empty for a template that ends its turns.

    Args:
        template: the template's text.
        special: `bos_token` and the other special tokens, by name.
        tokens: returns the tokenizer's added tokens, which can be thousands; only such a template needs them.
    """
    special_tokens = tuple(sorted(special.items()))
    return _ends(template, special_tokens, frozenset(tokens())) if _writes_no_end(template, special_tokens) else {}


def turn_end_text(message: Mapping[str, Any], ends: Mapping[str, str]) -> str:
    """Return the text that the model has to write at the end of this turn of its own."""
    return ends.get("tool" if message.get("tool_calls") else "user", "")


@lru_cache(maxsize=8)
def _writes_no_end(template: str, special: tuple[tuple[str, str], ...]) -> bool:
    answered = _rendered(template, special, [_ASKED, _ANSWER])
    return _MARK in answered and not answered.rpartition(_MARK)[2].strip()


@lru_cache(maxsize=8)
def _ends(template: str, special: tuple[tuple[str, str], ...], tokens: frozenset[str]) -> dict[str, str]:
    ends: dict[str, str] = {}
    for role, (turns, following) in _NEXT.items():
        before, longer = (_rendered(template, special, messages) for messages in (turns, [*turns, following]))
        already_ended = "user" in ends and before.endswith(ends["user"])  # Hy3 ends its tool calls, but not its answers
        if (
            before
            and longer.startswith(before)
            and not already_ended
            and (end := _opening(longer[len(before) :], tokens))
        ):
            ends[role] = end
    return ends


def _rendered(template: str, special: tuple[tuple[str, str], ...], turns: list[dict[str, Any]]) -> str:
    reads = probe_template_reasoning(template)
    try:
        return render_chat_template(
            template, [message_as_template_reads(turn, reads) for turn in turns], special=dict(special)
        )
    except TemplateRefused:
        return ""


def _opening(text: str, tokens: frozenset[str]) -> str:
    """Return the text up to the end of its first token, where only white space precedes that."""
    token = first_in(text, tokens)
    before = text.partition(token)[0] if token else text
    return before + token if token and not before.strip() else ""


def first_in(text: str, tokens: Iterable[str]) -> str | None:
    """Return the token that occurs first in a text; of two that start at the same place the longer one."""
    positions = [(text.find(token), -len(token), token) for token in tokens if token.strip() and token in text]
    return min(positions)[2] if positions else None
