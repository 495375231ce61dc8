"""`model.chat_template`: a template for a base model that has none, and one of the user's."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import surefit
from surefit import nano
from surefit.config.schema import ModelSection
from surefit.core.errors import ModelError
from surefit.facts.chat_template import PLAIN, template_text
from surefit.facts.model import model_facts
from surefit.facts.template import render_chat_template
from surefit.facts.tokenizer import tokenizer_facts
from surefit.generate.engine import stop_token_ids
from surefit.model.load import load_model
from surefit.model.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "And 3?"},
]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """The built-in model as a base model comes: without a template."""
    folder = tmp_path / "base"
    shutil.copytree(nano.PATH, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.jinja", "*.md"))
    return folder


def test_the_plain_template_writes_roles_in_words_and_ends_answers_with_the_model_s_token() -> None:
    text = render_chat_template(PLAIN, CHAT, add_generation_prompt=True, special={"eos_token": "</s>"})
    assert text == ("System:\nBe short.\n\nUser:\nWhat is 2 + 2?\n\nAssistant:\n4</s>\nUser:\nAnd 3?\n\nAssistant:\n")
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    asked = [{"role": "user", "content": "1?"}, {"role": "assistant", "content": "", "tool_calls": calls}]
    text = render_chat_template(PLAIN, asked, tools=[tool], special={"eos_token": "</s>"})
    assert text.startswith('Tools:\n[{"type": "function"')
    assert text.endswith('Assistant:\n[{"name": "add", "arguments": {"a": 1}}]</s>\n')


def test_the_plain_template_begins_as_the_model_s_texts_do_and_loses_nothing() -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turns = [{"role": "user", "content": None}, {"role": "assistant", "content": "Let me add.", "tool_calls": calls}]
    text = render_chat_template(PLAIN, turns, special={"bos_token": "<s>", "eos_token": "</s>"})
    assert text == '<s>User:\n\n\nAssistant:\nLet me add.[{"name": "add", "arguments": {"a": 1}}]</s>\n'


@pytest.mark.parametrize("text", [PLAIN, "{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"])
def test_templates_that_use_the_model_s_tokens_are_taken(tmp_path: Path, text: str) -> None:
    (tmp_path / "own.jinja").write_text(text)
    assert template_text(str(tmp_path / "own.jinja")) == text


def test_plain_needs_a_token_that_ends_answers(base: Path, tmp_path: Path) -> None:
    settings = json.loads((base / "tokenizer_config.json").read_text())
    del settings["eos_token"]
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    found = surefit.check(
        surefit.Config.from_dict(
            {
                "recipe": "function_calling",
                "model": {"name_or_path": str(base), "chat_template": "plain"},
                "data": {"train": "surefit/function-calling-train", "eval": 0.002},
                "output_dir": str(tmp_path / "run"),
            }
        )
    )
    assert any("this tokenizer has none" in finding.message for finding in found.errors)


def test_chatml_and_llama3_as_their_models_write_them() -> None:
    """The first is Qwen's of every conversation without tools, the second Llama 3's."""
    assert render_chat_template(template_text("chatml"), CHAT[:3]) == (
        "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4<|im_end|>\n"
    )
    text = render_chat_template(
        template_text("llama3"), CHAT[1:2], add_generation_prompt=True, special={"bos_token": "<|bos|>"}
    )
    assert text == (
        "<|bos|><|start_header_id|>user<|end_header_id|>\n\nWhat is 2 + 2?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )


@pytest.mark.parametrize("name", ["plain", "chatml", "llama3"])
def test_a_question_s_text_is_the_beginning_of_the_text_with_its_answer(name: str) -> None:
    """What is trained equals what `generate` is given, with tools and calls too."""
    template, special = template_text(name), {"eos_token": "</s>", "bos_token": "<s>"}
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    tool = {"type": "function", "function": {"name": "add", "parameters": {}}}
    answers = [{"role": "assistant", "content": "4"}, {"role": "assistant", "content": None, "tool_calls": calls}]
    for answer, tools in zip(answers, (None, [tool]), strict=True):
        asked = render_chat_template(template, CHAT[:2], tools=tools, add_generation_prompt=True, special=special)
        written = render_chat_template(template, [*CHAT[:2], answer], tools=tools, special=special)
        end = {"plain": "</s>\n", "chatml": "<|im_end|>\n", "llama3": "<|eot_id|>"}[name]
        said = "4" if tools is None else '[{"name": "add", "arguments": {"a": 1}}]'
        assert written == f"{asked}{said}{end}"


@pytest.mark.slow
def test_a_named_template_needs_its_tokens(base: Path, tmp_path: Path) -> None:
    values = {
        "recipe": "function_calling",
        "model": {"name_or_path": str(base), "chat_template": "chatml"},
        "data": {"train": "surefit/function-calling-train", "eval": 0.002, "max_length": 512},
        "train": {"max_steps": 1, "global_batch_size": 4},
        "output_dir": str(tmp_path / "run"),
    }
    chatml = surefit.Config.from_dict(values)
    found = surefit.check(chatml)
    (finding,) = found.errors
    assert "TPL002" not in {one.code for one in found.findings}  # it would say the same less well
    assert "<|im_start|> and <|im_end|>" in finding.message
    assert "write plain" in str(finding.help)
    with pytest.raises(ModelError, match="which the tokenizer does not have"):
        load_tokenizer(ModelSection(name_or_path=str(base), chat_template="chatml"))
    # A base as Qwen's is: the tokens are in its vocabulary, a template is not.
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (base / name).read_text()
        (base / name).write_text(text.replace("<|user|>", "<|im_start|>").replace("<|tool|>", "<|im_end|>"))
    assert surefit.check(chatml).errors == ()
    run = surefit.train(chatml, quiet=True)
    assert run.output is not None
    tokenizer = load_tokenizer(ModelSection(name_or_path=str(base), chat_template="chatml"))
    model = load_model(ModelSection(name_or_path=str(base), dtype="float32"), type("Cpu", (), {"kind": "cpu"})())
    assert tokenizer.convert_tokens_to_ids("<|im_end|>") in stop_token_ids(model, tokenizer)


def test_a_base_model_is_trainable_with_it_and_without_it_is_not(base: Path, tmp_path: Path) -> None:
    values = {
        "recipe": "function_calling",
        "model": {"name_or_path": str(base)},
        "data": {"train": "surefit/function-calling-train", "eval": 0.002, "max_length": 512},
        "train": {"max_steps": 1, "global_batch_size": 4},
        "output_dir": str(tmp_path / "run"),
    }
    plain = surefit.Config.from_dict(values)
    (finding,) = surefit.check(plain).errors
    assert finding.code == "MOD006"
    assert "model.chat_template: plain" in str(finding.help)
    chosen = plain.changed({"model.chat_template": "plain"})
    assert surefit.check(chosen).errors == ()
    run = surefit.train(chosen, quiet=True)
    assert run.output is not None
    assert (run.output / "chat_template.jinja").read_text() == PLAIN, "it goes with the adapter"


def test_answers_end_where_its_turns_end(base: Path) -> None:
    section = ModelSection(name_or_path=str(base), dtype="float32", chat_template="plain")
    tokenizer = load_tokenizer(section)
    model = load_model(section, type("Cpu", (), {"kind": "cpu"})())
    assert tokenizer.eos_token_id in stop_token_ids(model, tokenizer)
    facts = tokenizer_facts(base, PLAIN)
    assert facts.end_of_turn == tokenizer.eos_token
    assert model_facts(str(base)).has_chat_template is False


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "no such file"), (b"\xff\xfe", "not UTF-8"), (b"{% for %}", "cannot write a question and an answer"),
     (b"x" * 300_000, "larger than 256 KiB"), (b"{{ raise_exception('no') }}", "cannot write"), ("folder", "regular")],
)  # fmt: skip
def test_a_file_that_is_no_template(tmp_path: Path, content: Any, why: str) -> None:
    file = tmp_path / "own.jinja"
    if content == "folder":
        file.mkdir()
    elif content is not None:
        file.write_bytes(content)
    with pytest.raises(ModelError, match=why) as caught:
        template_text(str(file))
    assert caught.value.field == "model.chat_template"
    assert "plain" in str(caught.value.help)


def test_a_user_s_own_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")
    tokenizer = load_tokenizer(ModelSection(name_or_path="surefit/nano", chat_template=str(file)))
    assert tokenizer.apply_chat_template(CHAT[1:2], tokenize=False) == "<user>What is 2 + 2?"
