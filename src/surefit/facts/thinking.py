"""Reasoning in a conversation: where rows have it, and how a chat template renders it."""

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
"""Opening of a thought → pattern of the text between thought and answer: Qwen's and DeepSeek's, gpt-oss's channels,
Muse's recipients, Google's, Cohere's, Mistral's, ByteDance's, MiniMax's, Upstage's. The opening is often in the
prompt."""
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
    """How a chat template renders the last answer, and the reasoning in it.

    Attributes:
        fields: the names in `FIELDS` under which it reads reasoning and writes it.
        tags: it writes reasoning in the content as `<think>…</think>`, with these tags or in its own way.
        moves: it parses those tags as reasoning, so that both forms are written alike.
        opens: its generation prompt ends with an opened `<think>`: the model always thinks.
        parts: it writes contents that are lists of parts, and no text (Idefics 3, LLaVA-NeXT).
        empties: for an answer without reasoning it writes an empty thought, which the model has to write.
    """

    fields: tuple[str, ...] = ()
    tags: bool = False
    moves: bool = False
    opens: bool = False
    empties: bool = False
    parts: bool = False


def split_think_tags(text: str) -> tuple[str, str]:
    """Split a model's text into (reasoning, answer). The opening tag may be missing: it is often in the prompt.

    >>> split_think_tags("<think>\\n2 and 2\\n</think>\\n\\n4"), split_think_tags("4")
    (('\\n2 and 2\\n', '4'), ('', '4'))
    """
    match = _TAGGED.match(text)
    return (match[1], text[match.end() :]) if match else ("", text)


def split_reasoning(text: str) -> tuple[str, str] | None:
    """Split a model's text into (reasoning, answer), in any form that models think in; None without a closed thought.

    >>> harmony = "<|channel|>analysis<|message|>2 and 2<|end|><|start|>assistant<|channel|>final<|message|>4<|return|>"
    >>> split_reasoning(harmony)
    ('2 and 2', '4')
    """
    thought = next((match for form in _DIVIDED if (match := form.match(text))), None)
    return (thought[1], _ENDS.sub("", text[thought.end() :])) if thought else None


def strip_reasoning(text: str) -> str:
    """Return a model's text after its thought: nothing if the thought does not end, the whole text if there is none.

    >>> strip_reasoning("<think>2 and 2</think>4"), strip_reasoning("<think>2 and"), strip_reasoning("4")
    ('4', '', '4')
    """
    if split := split_reasoning(text):
        return split[1]
    return "" if begins_with_thought(text) else text


def begins_with_thought(text: str) -> bool:
    """Return whether a text starts with a thought, ended or not."""
    return text.lstrip().startswith(tuple(_FORMS))


def has_field(message: Mapping[str, Any]) -> bool:
    """Return whether a field of the message holds reasoning."""
    return any(isinstance(value := message.get(name), str) and value.strip() for name in FIELDS)


def reasoning_of_message(message: Mapping[str, Any]) -> str:
    """Return the reasoning of an assistant's message, from a field of its own or its content; empty if there is
    none."""
    if has_field(message):
        return next(value for name in FIELDS if isinstance(value := message.get(name), str) and value.strip())
    thoughts, _ = split_think_tags(str(message.get("content") or ""))
    return thoughts if thoughts.strip() else ""


def other_tag(text: str) -> str | None:
    """Return the tag with which an answer begins its reasoning, where it is closed and is not `<think>`.

    >>> other_tag("<thought>\\nlong\\n</thought>\\n4"), other_tag("<think>long</think>4"), other_tag("4 <cot>")
    ('<thought>', None, None)
    """
    match = _OTHER_TAG.match(text.lstrip()[:40])
    if match is None:
        return None
    closing = "<|end_of_thought|>" if match[1].startswith("|") else f"</{match[1]}>"
    return match[0] if closing in text else None


def remove_reasoning(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return the message with its answer alone."""
    kept = {name: value for name, value in message.items() if name not in FIELDS}
    if isinstance(content := kept.get("content"), str):
        kept["content"] = split_think_tags(content)[1]
    return kept


def message_as_template_reads(message: dict[str, Any], reads: TemplateReasoning) -> dict[str, Any]:
    """Return the message in the form that the template reads: its reasoning in the field that it reads (reasoning that
    the template never writes stays in place, TPL009), and its text as a list of parts where it reads only those."""
    message = _with_thoughts_moved(message, reads)
    text = message.get("content")
    return {**message, "content": in_parts(text)} if reads.parts and isinstance(text, str) else message


def in_parts(text: str) -> list[dict[str, str]]:
    """Return a text as the content of a multimodal model's message: a list of parts."""
    return [{"type": "text", "text": text}]


def _with_thoughts_moved(message: dict[str, Any], reads: TemplateReasoning) -> dict[str, Any]:
    if message["role"] != "assistant" or not reads.fields or any(message.get(name) for name in reads.fields):
        return message
    reasoning = next((message[name] for name in FIELDS if message.get(name)), None)
    if reasoning is not None:
        return {**message, reads.fields[0]: reasoning}
    thoughts, answer = split_think_tags(str(message.get("content") or ""))
    if reads.moves or not thoughts.strip() or OPENING in thoughts:  # text before a thought is no thought
        return message
    return {**message, reads.fields[0]: thoughts.strip("\n"), "content": answer}


@lru_cache(maxsize=8)
def probe_template_reasoning(template: str) -> TemplateReasoning:
    """Probe how the template renders reasoning, by rendering an answer with some; all False where it raises on that.

    Args:
        template: its text, with the run's switches included (`chat_template.bake_template_defaults`).
    """
    parts = _MARK not in _written(template, False, _MARK) and _MARK in _written(template, True, _MARK)
    tagged = _written(template, parts, f"{OPENING}\n{_MARK}\n{CLOSING}\n\n!")
    by_field = {name: _written(template, parts, "!", **{name: _MARK}) for name in FIELDS}
    fields = tuple(name for name, text in by_field.items() if _MARK in text)
    try:
        prompt = render_chat_template(
            template, [_turn("user", "?", parts)], add_generation_prompt=True, special=SPECIAL
        )
    except TemplateRefused:
        prompt = ""
    plain_answer = _written(template, parts, "!")
    return TemplateReasoning(
        fields,
        tags=_MARK in tagged,
        moves=bool(fields) and tagged == by_field[fields[0]],
        opens=prompt.rstrip().endswith(OPENING),
        empties=bool(prompt) and plain_answer.startswith(prompt) and bool(_EMPTY.match(plain_answer[len(prompt) :])),
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
