"""A chat template as six texts: exact where it can be, and None where it cannot."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pytest

from surefit.facts.chat_template import NAMED, SPECIAL
from surefit.facts.template import TemplateRefused, render_chat_template
from surefit.facts.turn_texts import TurnTexts, find_turn_texts

GEMMA = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "{% for message in messages %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
GEMMA3 = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set first = messages[0]['content'] + '\n\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set first = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + (first if loop.first else '') + message['content'] + '<end_of_turn>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'user' %}{{ '[INST] ' }}"
    "{% if loop.first and system %}{{ system + '\n\n' }}{% endif %}{{ message['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + message['content'] + eos_token }}{% endif %}{% endfor %}"
)
PHI = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
QWEN = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are Qwen.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LAST_SYSTEM = MISTRAL.replace("loop.first and system", "loop.last and system")
NUMBERED = PHI.replace("message['content'] +", "message['content'] + loop.index ~")
FORGETFUL = PHI.replace("in messages %}{{", "in messages if message['role'] != 'assistant' or loop.index < 3 %}{{")


def texts_of(template: str) -> TurnTexts | None:
    def render(messages: Sequence[Mapping[str, str]]) -> str:
        try:
            return render_chat_template(template, list(messages), add_generation_prompt=True, special=SPECIAL)
        except TemplateRefused as error:
            raise ValueError(str(error)) from error

    return find_turn_texts(render)


def go(template: str, messages: Sequence[Mapping[str, str]]) -> str:
    """Render the part of Go's text/template that `go_template` writes, read from its text and not from the texts."""
    literal = r'\{\{ "((?:[^"\\]|\\.)*)" \}\}'

    def value(part: str) -> str:
        return "".join(re.findall(literal, part))

    start, _, loop = template.partition("{{- range $i, $_ := .Messages }}")
    user, _, answer = loop.partition('{{- else if eq .Role "assistant" }}')
    system = next((m["content"] for m in messages if m["role"] == "system"), "")
    if "{{ if .System }}" in start:
        with_system, _, without = start.removeprefix("{{ if .System }}").partition("{{ else }}")
        before, _, after = with_system.partition("{{ .System }}")
        start = f"{value(before)}{system}{value(after)}" if system else value(without)
    else:
        start = value(start)
    text = start
    for number, message in enumerate(messages):
        last = number == len(messages) - 1
        if message["role"] == "user":
            text += message["content"] + (value(user) if last else "")
        elif message["role"] == "assistant":
            before, _, after = answer.partition("{{ .Content }}")
            text += value(before) + message["content"] + ("" if last else value(after))
    return text.encode().decode("unicode_escape") if "\\" in text else text


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Three?"},
]


@pytest.mark.parametrize(
    "template",
    [*NAMED.values(), GEMMA, GEMMA3, MISTRAL, PHI, QWEN],
    ids=[*NAMED, "gemma", "gemma3", "mistral", "phi", "qwen"],
)
def test_a_template_of_turns_is_written_exactly(template: str) -> None:
    texts = texts_of(template)
    assert texts is not None
    conversations = [CONVERSATION[1:], CONVERSATION[1:2], *([CONVERSATION] if texts.before_system is not None else [])]
    for messages in conversations:
        rendered = render_chat_template(template, messages, add_generation_prompt=True, special=SPECIAL)
        assert texts.render(messages) == rendered
        assert go(texts.go_template(), messages) == rendered


def test_a_template_without_a_system_turn_writes_none() -> None:
    texts = texts_of(GEMMA)
    assert texts is not None
    assert (texts.before_system, texts.after_system) == (None, None)
    assert ".System" not in texts.go_template()


@pytest.mark.parametrize("template", [LAST_SYSTEM, NUMBERED, FORGETFUL], ids=["last", "numbered", "forgetful"])
def test_a_template_that_does_more_has_no_texts(template: str) -> None:
    assert texts_of(template) is None


def test_the_beginning_of_a_text_is_left_out_where_the_tokenizer_writes_it() -> None:
    texts = texts_of(GEMMA3)
    assert texts is not None
    assert texts.before_user.startswith("<s>")
    without = texts.without_start("<s>")
    assert without.before_user == texts.before_user.removeprefix("<s>")
    assert without.before_system is not None
    assert not without.before_system.startswith("<s>")
