"""What a chat template writes between the turns of a conversation, as six texts: enough for a template in another
language, such as Ollama's."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product

Conversation = Sequence[Mapping[str, str]]
Render = Callable[[Conversation], str]
"""A conversation that ends with a user's turn → the prompt for its answer.

Raises:
    ValueError: the template does not take such a conversation.
"""


@dataclass(frozen=True)
class TurnTexts:
    """The texts around a conversation's turns.

    Attributes:
        before_user: before the first user's turn, where there is no system turn.
        before_system, after_system: around the system turn; both None where the template takes none.
        before_answer, after_answer: around each answer that another turn follows.
        end: after the last user's turn, for an answer to follow.
    """

    before_user: str
    before_system: str | None
    after_system: str | None
    before_answer: str
    after_answer: str
    end: str

    def render(self, messages: Conversation) -> str:
        """Return the prompt for the answer to a conversation: perhaps a system turn, then user and assistant in turn,
        ending with the user."""
        system = messages[0]["content"] if messages[0]["role"] == "system" else None
        turns = [message["content"] for message in messages if message["role"] != "system"]
        between = [self.before_answer, self.after_answer] * len(turns)
        text = self.before_user if system is None else f"{self.before_system}{system}{self.after_system}"
        return text + "".join(a + b for a, b in zip(turns, [*between[: len(turns) - 1], self.end], strict=True))

    def without_start(self, start: str) -> TurnTexts:
        """Return the texts without one that begins every conversation, such as `<s>`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("before_user", "before_system"):
            values[name] = values[name].removeprefix(start) if values[name] is not None else None
        return TurnTexts(**values)

    def go_template(self) -> str:
        """Return the template that writes the same in Go's text/template, with Ollama's variables."""
        quoted = {
            field.name: "" if not (text := getattr(self, field.name)) else f"{{{{ {go_string(text)} }}}}"
            for field in fields(self)
        }
        start = quoted["before_user"]
        if self.before_system is not None:
            system = f"{quoted['before_system']}{{{{ .System }}}}{quoted['after_system']}"
            start = f"{{{{ if .System }}}}{system}{{{{ else }}}}{start}{{{{ end }}}}"
        return (
            start + "{{- range $i, $_ := .Messages }}{{ $last := eq (len (slice $.Messages $i)) 1 }}\n"
            '{{- if eq .Role "user" }}{{ .Content }}{{ if $last }}' + quoted["end"] + "{{ end }}\n"
            '{{- else if eq .Role "assistant" }}' + quoted["before_answer"] + "{{ .Content }}"
            "{{ if not $last }}" + quoted["after_answer"] + "{{ end }}\n"
            "{{- end }}\n"
            "{{- end }}"
        )


def go_string(text: str) -> str:
    """Return a string literal of Go's: JSON's escapes are valid in it, and a brace cannot end the action.

    >>> print(go_string('<|im_start|>user' + chr(10)))
    "<|im_start|>user\\n"
    """
    quoted = json.dumps(text, ensure_ascii=False)
    return "".join(c if c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)  # a Modelfile drops what is not


_SYSTEM, _ASKED, _ANSWERED, _AGAIN = "surefit-system", "surefit-first", "surefit-answer", "surefit-second"
_TEXTS = ("Hi", 'Two paragraphs,\n\nand a list:\n- {{ braces }}, "quotes" and <b>marks</b>', "ß, 日本, 1 + 1 = 2?")


def find_turn_texts(render: Render) -> TurnTexts | None:
    """Return the texts of a chat template, if it writes every conversation that is tried exactly as they do: with and
    without a system turn, of one to four questions. None otherwise: it shortens, numbers or moves turns."""
    try:
        return _find(render)
    except ValueError:
        return None


def _find(render: Render) -> TurnTexts | None:
    user, answer, again = ({"role": r, "content": c} for r, c in (("user", _ASKED), ("assistant", _ANSWERED),
                                                                  ("user", _AGAIN)))  # fmt: skip
    system = {"role": "system", "content": _SYSTEM}
    before_user, before_answer, after_answer, end = _cut(render([user, answer, again]), _ASKED, _ANSWERED, _AGAIN)
    before_system, after_system = None, None
    with contextlib.suppress(ValueError):  # some take no system turn, such as Gemma's first
        before_system, after_system, _ = _cut(render([system, user]), _SYSTEM, _ASKED)
    texts = TurnTexts(before_user, before_system, after_system, before_answer, after_answer, end)
    systems = (None, *_TEXTS) if before_system is not None else (None,)
    tried = (_conversation(content, questions) for content, questions in product(systems, range(1, 5)))
    return texts if all(render(messages) == texts.render(messages) for messages in tried) else None


def _cut(text: str, *marks: str) -> list[str]:
    """Return the text before, between and after marks that occur once each, in this order."""
    parts = []
    for mark in marks:
        if text.count(mark) != 1:
            raise ValueError(f"{mark} is written {text.count(mark)} times")
        part, _, text = text.partition(mark)
        parts.append(part)
    return [*parts, text]


def _conversation(system: str | None, questions: int) -> list[dict[str, str]]:
    turns = [{"role": "system", "content": system}] if system is not None else []
    for number in range(2 * questions - 1):
        role = "assistant" if number % 2 else "user"
        turns.append({"role": role, "content": _TEXTS[number % len(_TEXTS)]})
    return turns
