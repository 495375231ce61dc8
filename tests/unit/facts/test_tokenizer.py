"""Tokenizer files and chat templates as the light facts see them, against the libraries that own the formats."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from surefit import nano
from surefit.core.errors import ModelError
from surefit.facts.template import TemplateRefused, render_chat_template
from surefit.facts.tokenizer import tokenizer_facts

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TURNS = [{"role": "user", "content": "grüße <b>"}, {"role": "assistant", "content": " 42 "}]
TOOLS = [{"type": "function", "function": {"name": "add", "description": 'says "é"', "parameters": {"a": [1, None]}}}]


@pytest.fixture
def folder(tmp_path: Path):
    """folder(file name=content, …) → a model folder with these JSON files."""

    def make(**files: Any) -> Path:
        for name, content in files.items():
            text = content if isinstance(content, str) else json.dumps(content)
            (tmp_path / name.replace("__", ".")).write_text(text, encoding="utf-8")
        return tmp_path

    return make


def bpe(vocab: Any, added: list[tuple[str, int]] = (), kind: str = "BPE") -> dict[str, Any]:
    tokens = [{"id": number, "content": text, "special": True} for text, number in added]
    return {"added_tokens": tokens, "model": {"type": kind, "vocab": vocab, "merges": []}}


def test_the_facts_of_the_built_in_model_are_those_of_the_libraries() -> None:
    facts, own = tokenizer_facts(nano.PATH), Tokenizer.from_file(str(nano.PATH / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(nano.PATH)
    assert facts.tokens == own.get_vocab_size(with_added_tokens=True)
    assert facts.largest_id == max(own.get_vocab().values())
    assert facts.added == {token.content: number for number, token in own.get_added_tokens_decoder().items()}
    assert (facts.pad_id, facts.eos_id, facts.bos_id) == (theirs.pad_token_id, theirs.eos_token_id, None)
    assert (facts.pad_token, facts.eos_token) == (theirs.pad_token, theirs.eos_token)
    assert (facts.stop_ids, facts.end_of_turn, facts.end_of_turn_id) == ((1,), "<|end|>", 1)
    assert facts.marks_generation
    assert facts.mentions_tools


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_a_template_is_rendered_as_transformers_renders_it(asked: bool, tools: Any) -> None:
    theirs = AutoTokenizer.from_pretrained(nano.PATH)
    templates = [
        theirs.chat_template,
        CHATML,
        "{% for m in messages %}\n  {%- generation -%}\n {{ m.content | trim }}\n{%- endgeneration %}\n  {% endfor %}",
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson(indent=2) }}{% endfor %}",
        "{{ eos_token }}{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = 2 %}{% endfor %}{{ ns.n }}",
    ]
    for template in templates:
        theirs.chat_template = template
        expected = theirs.apply_chat_template(TURNS, tools=tools, tokenize=False, add_generation_prompt=asked)
        special = {"eos_token": "<|end|>"}
        assert (
            render_chat_template(template, TURNS, tools=tools, add_generation_prompt=asked, special=special) == expected
        )


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no') }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages[9].x.y }}"]
)
def test_a_template_that_refuses_says_so(template: str, folder) -> None:
    with pytest.raises(TemplateRefused):
        render_chat_template(template, TURNS)
    assert tokenizer_facts(folder(tokenizer_config__json={"chat_template": template})).turn_end is None


def test_ids_of_special_tokens_and_the_end_of_a_turn(folder) -> None:
    facts = tokenizer_facts(
        folder(
            tokenizer__json=bpe({"a": 0, "</s>": 1, '"\\': 2}, [("<|im_start|>", 3), ("<|im_end|>", 4), ("</s>", 1)]),
            tokenizer_config__json={"eos_token": {"content": "</s>"}, "pad_token": None, "chat_template": CHATML},
            special_tokens_map__json={"pad_token": "a", "bos_token": "a"},
            generation_config__json={"eos_token_id": [1, 7]},
            config__json={"eos_token_id": 9},
        )
    )
    assert (facts.tokens, facts.largest_id, facts.largest_plain_id) == (5, 4, 2)
    assert (facts.eos_token, facts.eos_id) == ("</s>", 1)
    assert (facts.pad_token, facts.pad_id) == (None, None), "null in tokenizer_config.json is a statement"
    assert (facts.bos_token, facts.bos_id) == ("a", 0), "what it does not name is looked up in the older file"
    assert facts.stop_ids == (1, 7)
    assert (facts.turn_end, facts.end_of_turn, facts.end_of_turn_id) == ("<|im_end|>\n", "<|im_end|>", 4)
    assert (facts.marks_generation, facts.mentions_tools) == (False, False)


def test_a_unigram_vocabulary_counts_in_order(folder) -> None:
    facts = tokenizer_facts(folder(tokenizer__json=bpe([["<unk>", 0.0], ["▁a", -1.5], ["b", -2]], kind="Unigram")))
    assert (facts.tokens, facts.largest_id) == (3, 2)


def test_keys_of_the_file_may_stand_in_a_token(folder) -> None:
    vocab = {"a": 0, 'x"vocab": {"': 1, "b": 2}
    facts = tokenizer_facts(folder(tokenizer__json=bpe(vocab, [('"vocab"', 3)])))
    assert (facts.tokens, facts.largest_id) == (4, 3)


def test_a_folder_without_tokenizer_files_has_no_numbers(folder) -> None:
    facts = tokenizer_facts(folder(config__json={}))
    assert (facts.file, facts.tokens, facts.largest_id, facts.pad_token, facts.chat_template) == (None,) * 5
    assert facts.stop_ids == ()


@pytest.mark.parametrize("content", ["{", '{"added_tokens": [', "[]"])
def test_a_damaged_file_is_an_error_that_names_it(content: str, folder) -> None:
    with pytest.raises(ModelError) as caught:
        tokenizer_facts(folder(tokenizer__json=content))
    assert str(caught.value.path).endswith("tokenizer.json")


@pytest.mark.parametrize("content", ["{}", '{"model": 3, "added_tokens": [3]}', '{"model": {"vocab": {"a": "b"}}}'])
def test_an_odd_file_has_no_tokens(content: str, folder) -> None:
    assert tokenizer_facts(folder(tokenizer__json=content)).tokens is None


def test_it_is_read_without_heavy_imports(tmp_path: Path) -> None:
    import subprocess
    import sys

    shutil.copytree(nano.PATH, tmp_path / "model")
    program = (
        "import sys; from pathlib import Path; from surefit.facts.tokenizer import tokenizer_facts\n"
        f"tokenizer_facts(Path({str(tmp_path / 'model')!r}))\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
