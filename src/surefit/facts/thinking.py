"""Reasoning in a conversation: where rows have it, and what a chat template makes of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from surefit.facts.chat_template import SPECIAL
from surefit.facts.template import TemplateRefused, render_chat_template

FIELDS = ("reasoning_content", "reasoning", "thinking")
"""Names under which an assistant's message holds its reasoning: DeepSeek's and Qwen's, OpenRouter's and vLLM's, and
gpt-oss's."""
OPENING, CLOSING = "<think>", "</think>"
_TAGGED = re.compile(r"\s*(?:<think>)?(.*?)</think>\s*", re.DOTALL)
_EMPTY = re.compile(r"\s*(<think>)?\s*</think>")
_FORMS = {
    OPENING: r"</think>\s*",
    "<|channel|>analysis<|message|>": r"(?:<\|end\|>)?(?:<\|start\|>assistant)?"
    r"<\|channel\|>final[^<]*(?:<\|constrain\|>[^<]*)?<\|message\|>",
    "to=self<|message|>": r"(?:<\|eom\|>)?(?:<\|start\|>assistant)?\s*to=user<\|message\|>",
    "<|channel>thought": r"<channel\|>\s*",
    "<|START_THINKING|>": r"<\|END_THINKING\|>\s*(?:<\|START_(?:RESPONSE|TEXT)\|>)?",
    "[THINK]": r"\[/THINK\]\s*",
    "<seed:think>": r"</seed:think>\s*",
    "<mm:think>": r"</mm:think>\s*",
    "<|think|>": r"(?:<\|end\|>)?<\|begin\|>assistant<\|content\|>",
}
"""How a thought begins, and where the answer behind it does: Qwen's and DeepSeek's, gpt-oss's channels, Muse's
recipients, Google's, Cohere's, Mistral's, ByteDance's, MiniMax's, Upstage's. The start is often in the prompt."""
_DIVIDED = [re.compile(rf"\s*(?:{re.escape(start)})?(.*?){end}", re.DOTALL) for start, end in _FORMS.items()]
_DIVIDED.append(re.compile(r"\s*analysis(.*?)assistantfinal", re.DOTALL))  # gpt-oss's, its special tokens removed
_ENDS = re.compile(r"(?:<\|(?:return|end|END_RESPONSE|END_TEXT|END_OF_TURN_TOKEN)\|>)+\s*\Z")
_OTHER_TAG = re.compile(
    r"<(think(?:ing|_process)|thoughts?|reason(?:ing)?|reflection|scratchpad|analysis|cot|chain_of_thought|"
    r"\|begin_of_thought\||seed:think|mm:think)>",
    re.IGNORECASE,
)
"""Tags around reasoning that chat templates with `<think>` do not know."""
_MARK = "surefit"


@dataclass(frozen=True)
class TemplateReasoning:
    """What a chat template makes of the last answer, and of the reasoning in it.

    Attributes:
        fields: the names, of `FIELDS`, under which it finds it and writes it.
        tags: it writes reasoning that stands in the content as `<think>…</think>`, as that or in its own way.
        moves: it takes those tags for reasoning, so that the two ways are written alike.
        opens: its generation prompt ends with an opened `<think>`: the model always thinks.
        parts: it writes contents that are lists of parts, and no text (Idefics 3, LLaVA-NeXT).
        empties: of an answer without reasoning it writes an empty thought, which the model has to write.
    """

    fields: tuple[str, ...] = ()
    tags: bool = False
    moves: bool = False
    opens: bool = False
    empties: bool = False
    parts: bool = False


def split_think_tags(text: str) -> tuple[str, str]:
    """(reasoning, answer) of a text that a model wrote. The opening tag may be missing: it often stands in the prompt.

    >>> split_think_tags("<think>\\n2 and 2\\n</think>\\n\\n4"), split_think_tags("4")
    (('\\n2 and 2\\n', '4'), ('', '4'))
    """
    found = _TAGGED.match(text)
    return (found[1], text[found.end() :]) if found else ("", text)


def split_reasoning(text: str) -> tuple[str, str] | None:
    """(reasoning, answer) of what a model wrote, in any form that models think in; None without a closed thought.

    >>> harmony = "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    >>> split_reasoning(harmony)
    ('2 and 2', '4')
    """
    found = next((match for form in _DIVIDED if (match := form.match(text))), None)
    return (found[1], _ENDS.sub("", text[found.end() :])) if found else None


def strip_reasoning(text: str) -> str:
    """What a model says once it has thought: nothing where its thought never ends, the whole text where it has none.

    >>> strip_reasoning("<think>2 and 2</think>4"), strip_reasoning("<think>2 and"), strip_reasoning("4")
    ('4', '', '4')
    """
    if found := split_reasoning(text):
        return found[1]
    return "" if begins_with_thought(text) else text


def begins_with_thought(text: str) -> bool:
    """Whether it starts with a thought, ended or not."""
    return text.lstrip().startswith(tuple(_FORMS))


def has_field(message: Mapping[str, Any]) -> bool:
    """Whether a field of the message holds reasoning."""
    return any(isinstance(value := message.get(name), str) and value.strip() for name in FIELDS)


def reasoning_of_message(message: Mapping[str, Any]) -> str:
    """The reasoning of an assistant's message, from a field of its own or from its content; empty where it has none."""
    if has_field(message):
        return next(value for name in FIELDS if isinstance(value := message.get(name), str) and value.strip())
    thoughts, _ = split_think_tags(str(message.get("content") or ""))
    return thoughts if thoughts.strip() else ""


def other_tag(text: str) -> str | None:
    """Return the tag with which an answer begins its reasoning, where it is another than `<think>` and is closed.

    >>> other_tag("<thought>\\nlong\\n</thought>\\n4"), other_tag("<think>long</think>4"), other_tag("4 <cot>")
    ('<thought>', None, None)
    """
    found = _OTHER_TAG.match(text.lstrip()[:40])
    if found is None:
        return None
    closing = "<|end_of_thought|>" if found[1].startswith("|") else f"</{found[1]}>"
    return found[0] if closing in text else None


def remove_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its answer alone."""
    kept = {name: value for name, value in message.items() if name not in FIELDS}
    if isinstance(content := kept.get("content"), str):
        kept["content"] = split_think_tags(content)[1]
    return kept


def message_as_template_reads(message: dict[str, Any], reads: TemplateReasoning) -> dict[str, Any]:
    """The message as the template reads it: its reasoning where that is looked for (what the template never writes
    stays where it is, TPL009), its text in a list where it reads nothing else."""
    message = _with_thoughts_moved(message, reads)
    text = message.get("content")
    return {**message, "content": in_parts(text)} if reads.parts and isinstance(text, str) else message


def in_parts(text: str) -> list[dict[str, str]]:
    """A content as models with images have it."""
    return [{"type": "text", "text": text}]


def _with_thoughts_moved(message: dict[str, Any], reads: TemplateReasoning) -> dict[str, Any]:
    if message["role"] != "assistant" or not reads.fields or any(message.get(name) for name in reads.fields):
        return message
    own = next((message[name] for name in FIELDS if message.get(name)), None)
    if own is not None:
        return {**message, reads.fields[0]: own}
    thoughts, answer = split_think_tags(str(message.get("content") or ""))
    if reads.moves or not thoughts.strip() or OPENING in thoughts:  # text before a thought is none
        return message
    return {**message, reads.fields[0]: thoughts.strip("\n"), "content": answer}


@lru_cache(maxsize=8)
def probe_template_reasoning(template: str) -> TemplateReasoning:
    """What the template makes of reasoning, found by rendering an answer that has some; nothing where it refuses that.

    Args:
        template: its text, the switches of the run among it (`chat_template.with_defaults`).
    """
    parts = _MARK not in _written(template, False, _MARK) and _MARK in _written(template, True, _MARK)
    tagged = _written(template, parts, f"{OPENING}\n{_MARK}\n{CLOSING}\n\n!")
    by_field = {name: _written(template, parts, "!", **{name: _MARK}) for name in FIELDS}
    fields = tuple(name for name, text in by_field.items() if _MARK in text)
    try:
        asked = render_chat_template(template, [_turn("user", "?", parts)], add_generation_prompt=True, special=SPECIAL)
    except TemplateRefused:
        asked = ""
    plain = _written(template, parts, "!")
    return TemplateReasoning(
        fields,
        tags=_MARK in tagged,
        moves=bool(fields) and tagged == by_field[fields[0]],
        opens=asked.rstrip().endswith(OPENING),
        empties=bool(asked) and plain.startswith(asked) and bool(_EMPTY.match(plain[len(asked) :])),
        parts=parts,
    )


def _turn(role: str, text: str, parts: bool) -> dict[str, Any]:
    return {"role": role, "content": in_parts(text) if parts else text}


def _written(template: str, parts: bool, answer: str, **fields: str) -> str:
    turns = [_turn("user", "?", parts), {**_turn("assistant", answer, parts), **fields}]
    try:
        return render_chat_template(template, turns, special=SPECIAL)
    except TemplateRefused:
        return ""
