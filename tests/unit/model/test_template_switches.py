"""Switches of a chat template: what the model is given in training, in answers, and by whoever serves it later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from surefit.config.schema import ModelSection, SureFitConfig
from surefit.core.errors import ConfigError
from surefit.data.tokens.tokenize import conversation_segments, tokenize_prompt
from surefit.facts.chat_template import bake_template_defaults
from surefit.facts.template import TemplateRefused, render_chat_template, variables_of
from surefit.model.tokenizer import load_tokenizer, with_template_kwargs
from surefit.task import Example
from surefit.train.identity import require_same

THINKING = Path(__file__).with_name("thinking.jinja")
OFF: dict[str, Any] = {"enable_thinking": False}
MESSAGES = ({"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"})
EXAMPLE = Example(MESSAGES)
QUESTION = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
EMPTY = "<think>\n\n</think>\n\n"


def section(**changes: Any) -> ModelSection:
    return ModelSection.model_validate({"name_or_path": "surefit/nano", "chat_template": str(THINKING)} | changes)


def given(tokenizer: Any) -> str:
    """What the model reads before it answers."""
    return str(tokenizer.decode(tokenize_prompt(EXAMPLE, tokenizer)))


@pytest.mark.parametrize(
    ("switches", "prompt", "trained"),
    [
        ({}, QUESTION, EMPTY + "4<|im_end|>\n"),
        ({"enable_thinking": True}, QUESTION, EMPTY + "4<|im_end|>\n"),
        (OFF, QUESTION + EMPTY, "4<|im_end|>\n"),
    ],
    ids=["own", "on", "off"],
)
def test_training_and_answers_are_given_the_same_prompt(switches: dict[str, Any], prompt: str, trained: str) -> None:
    tokenizer = load_tokenizer(section(chat_template_kwargs=switches))
    assert conversation_segments(EXAMPLE, tokenizer) == [[(prompt, False), (trained, True)]]
    assert given(tokenizer) == prompt


def test_answers_may_be_asked_for_in_another_way() -> None:
    config = SureFitConfig.model_validate(
        {
            "model": section().model_dump(),
            "data": {"train": "x"},
            "output_dir": "run",
            "evaluate": {"chat_template_kwargs": OFF},
        }
    )
    assert given(load_tokenizer(config.model)) == QUESTION
    assert given(load_tokenizer(config.answering)) == QUESTION + EMPTY
    trained_off = config.model_copy(update={"model": section(chat_template_kwargs=OFF)})
    asked_on = trained_off.evaluate.model_copy(update={"chat_template_kwargs": {"enable_thinking": True}})
    assert given(load_tokenizer(trained_off.model_copy(update={"evaluate": asked_on}).answering)) == QUESTION


def test_whoever_serves_what_is_saved_asks_as_it_was_trained(tmp_path: Path) -> None:
    load_tokenizer(section(chat_template_kwargs=OFF)).save_pretrained(tmp_path)
    saved = load_tokenizer(ModelSection(name_or_path=str(tmp_path)))
    assert given(saved) == QUESTION + EMPTY
    # And may still ask otherwise: by a switch of the request, as vLLM hands it on, or by `evaluate`.
    turns = [dict(MESSAGES[0])]
    text = saved.apply_chat_template(turns, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    assert text == QUESTION
    assert given(with_template_kwargs(saved, {"enable_thinking": True})) == QUESTION


def test_a_tokenizer_is_left_as_it_was() -> None:
    own = load_tokenizer(section())
    assert given(with_template_kwargs(own, OFF)) == QUESTION + EMPTY
    assert given(own) == QUESTION


@pytest.mark.parametrize("start", ["", "\n", "\n\n  ", "  {% if true %}x{% endif %}\n  ", "{#- a comment -#}\n"])
@pytest.mark.parametrize("value", [True, 7, -1, 'a "quoted" \\ text'])
def test_nothing_but_the_switch_changes(start: str, value: Any) -> None:
    template = start + "{{ messages[0].content }}{% if effort is defined %}[{{ effort }}]{% endif %}\n"
    tokenizer = load_tokenizer(section())
    tokenizer.chat_template = template
    turns = [dict(MESSAGES[0])]
    wanted = tokenizer.apply_chat_template(turns, tokenize=False, effort=value)
    assert f"[{value}]" in str(wanted)
    changed = with_template_kwargs(tokenizer, {"effort": value})
    assert changed.apply_chat_template(turns, tokenize=False) == wanted
    assert render_chat_template(bake_template_defaults(template, {"effort": value}), turns) == wanted
    assert render_chat_template(template, turns, switches={"effort": value}) == wanted


def test_what_a_template_reads() -> None:
    text = THINKING.read_text(encoding="utf-8")
    assert variables_of(text) == {"messages", "add_generation_prompt", "enable_thinking"}
    assert variables_of("{% set mode = mode or 'x' %}{% for one in many %}{{ one }}{{ mode }}{% endfor %}") == {
        "mode", "many",
    }  # fmt: skip
    assert variables_of("{% generation %}{{ a }}{% endgeneration %}") == {"a"}
    with pytest.raises(TemplateRefused):
        variables_of("{% for %}")


@pytest.mark.parametrize(
    "switches",
    [{"messages": True}, {"a b": 1}, {"x": 1.5}, {"x": None}, {"x": "\n"}, {"x": 10**12}, {"": 1}, {"x": [1]}],
    ids=str,
)
def test_what_is_no_switch_is_refused(switches: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="chat_template_kwargs"):
        section(chat_template_kwargs=switches)


def test_a_run_is_not_resumed_with_other_prompts() -> None:
    key = "model.chat_template_kwargs"
    require_same({}, {key: {}}, Path())
    with pytest.raises(ConfigError, match="enable_thinking"):
        require_same({}, {key: OFF}, Path())
