"""The Modelfile that `surefit export --for ollama` writes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from surefit.core.errors import ModelError
from surefit.facts.gguf import GgufHeader
from surefit.facts.turn_texts import TurnTexts
from surefit.merge.modelfile import OllamaSettings, modelfile_text, quoted, require_turn_texts

TEXTS = TurnTexts("<s>U:", "<s>S:", "U:", "A:", "</s>U:", "A:")


def header(**metadata: Any) -> GgufHeader:
    values = {"general.architecture": "llama", "llama.context_length": 8192} | {
        f"tokenizer.ggml.{name}": value for name, value in metadata.items()
    }
    return SimpleNamespace(metadata=values, of_model=lambda key: values.get(f"llama.{key}"))  # type: ignore[return-value]


def settings(**changes: Any) -> OllamaSettings:
    values: dict[str, Any] = {
        "texts": TEXTS, "bos": "<s>", "system": "Be brief.", "stops": ["</s>", "</s>"], "max_length": 512,
        "temperature": 0.0,
    }  # fmt: skip
    return OllamaSettings(**(values | changes))


def test_a_modelfile_has_the_prompt_and_the_settings_of_the_scores() -> None:
    lines = modelfile_text(settings(), "model.gguf", header()).splitlines()
    assert lines[0] == "FROM ./model.gguf"
    assert 'SYSTEM "Be brief."' in lines
    assert [line for line in lines if line.startswith("PARAMETER")] == [
        'PARAMETER stop "</s>"',
        "PARAMETER num_ctx 4096",
        "PARAMETER temperature 0",
        "PARAMETER repeat_penalty 1",
    ]


@pytest.mark.parametrize(
    ("metadata", "written"),
    [
        ({"add_bos_token": True}, False),
        ({"add_bos_token": False}, True),
        ({"model": "llama"}, False),
        ({}, True),
        ({"pre": "llama-bpe"}, False),
        ({"pre": "llama-bpe", "add_bos_token": False}, True),
        ({"pre": "qwen2"}, True),
    ],
)
def test_the_beginning_of_a_text_is_written_once(metadata: dict[str, Any], written: bool) -> None:
    assert ("<s>" in modelfile_text(settings(), "model.gguf", header(**metadata))) == written


@pytest.mark.parametrize(("max_length", "context"), [(512, 4096), (6000, 6000), (100_000, 8192)])
def test_the_context_holds_the_rows_and_is_the_models_at_most(max_length: int, context: int) -> None:
    assert f"num_ctx {context}\n" in modelfile_text(settings(max_length=max_length), "model.gguf", header())


def test_texts_that_a_modelfile_cannot_quote() -> None:
    assert quoted('"Yes."') is None
    assert quoted('a """ b') is None
    for change in ({"system": '"Yes."'}, {"stops": ['"""']}):
        with pytest.raises(ModelError, match=r"cannot quote this (system prompt|stop text)"):
            modelfile_text(settings(**change), "model.gguf", header())


def test_sampling_is_from_all_tokens_as_in_evaluate() -> None:
    text = modelfile_text(settings(temperature=0.5), "model.gguf", header())
    assert "PARAMETER top_k 0\nPARAMETER top_p 1\nPARAMETER min_p 0\n" in text


def test_a_model_that_continues_text_gets_its_prompt_alone() -> None:
    assert require_turn_texts(SimpleNamespace(chat_template=None), "merged") is None
    assert 'TEMPLATE """{{ .Prompt }}"""' in modelfile_text(settings(texts=None), "model.gguf", header())


@pytest.mark.parametrize(
    ("template", "render"),
    [
        ("", lambda messages: messages[-1]["content"]),
        ("{{ strftime_now('%d') }}", lambda m: "U:" + "".join(f"{t['content']}|" for t in m) + "A:"),
    ],
)
def test_a_template_that_cannot_be_written_is_an_error_before_anything_is_converted(template, render) -> None:
    def apply(messages: Any, **_: Any) -> Any:
        return render(messages)

    tokenizer = SimpleNamespace(chat_template=template or "x", apply_chat_template=apply)
    with pytest.raises(ModelError) as raised:
        require_turn_texts(tokenizer, "merged")
    assert "--jinja" in str(raised.value.help)
    assert Path(str(raised.value.path)) == Path("merged")
