"""The light tokenizer against transformers': the same ids, masks, special tokens and texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from surefit import nano
from surefit.config.schema import ModelSection
from surefit.core.errors import DataError, MachineError, ModelError
from surefit.data.tokens import tokenize
from surefit.data.tokens.light_tokenizer import LightTokenizer, load_light_tokenizer
from surefit.data.tokens.show import decode_segments
from surefit.model.tokenizer import load_tokenizer
from surefit.task import Example

SPECIAL = ["<pad>", "<s>", "</s>"]
INST_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% else %}{{ ' ' + m.content + eos_token }}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
EXAMPLES = [
    Example(({"role": "user", "content": "2+2? <call> é"}, {"role": "assistant", "content": "yes\n\n 4"})),
    Example(
        (
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "two zz"},
            {"role": "user", "content": "three"},
            {"role": "assistant", "content": "four"},
        )
    ),
    Example(text="plain text <call> zz 你好"),
]


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer puts a space before a text and <s> before that, as Llama 2's does."""
    folder = tmp_path_factory.mktemp("models") / "spaced"
    shutil.copytree(nano.PATH, folder, ignore=shutil.ignore_patterns("*.py", "__pycache__", "*.jinja", "tokenizer*"))
    library = Tokenizer(models.BPE(byte_fallback=True, unk_token="<pad>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    library.decoder = decoders.Metaspace(prepend_scheme="first")
    corpus = ["[INST] 2+2? [/INST] 4 yes no", "one two three four plain text é 你好 <call> zz"]
    library.train_from_iterator(corpus, trainers.BpeTrainer(vocab_size=200, special_tokens=SPECIAL))
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    whole = PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<s>", eos_token="</s>", pad_token="<pad>", chat_template=INST_TEMPLATE
    )
    whole.save_pretrained(folder)
    return folder


def section(name: Path | str, **settings: Any) -> ModelSection:
    return ModelSection(name_or_path=str(name), **settings)


def require_same(settings: ModelSection, examples: list[Example]) -> LightTokenizer:
    light, whole = load_light_tokenizer(settings), load_tokenizer(settings)
    either: Any = light
    assert tokenize.encode_turns(either, examples) == tokenize.encode_turns(whole, examples)
    assert tokenize.count_token_lengths(either, examples[:2]) == tokenize.count_token_lengths(whole, examples[:2])
    assert tokenize.special_tokens_from_tokenizer(either) == tokenize.special_tokens_from_tokenizer(whole)
    for example in examples[:2]:
        assert tokenize.tokenize_prompt(example, either) == tokenize.tokenize_prompt(example, whole)
        assert decode_segments(example, either) == decode_segments(example, whole)
    assert (len(light), light.get_vocab()) == (len(whole), whole.get_vocab())
    assert light.get_added_vocab() == whole.get_added_vocab()
    assert (
        light("one two", add_special_tokens=False)["input_ids"] == whole("one two", add_special_tokens=False).input_ids
    )
    return light


@pytest.mark.parametrize(
    "settings", [{}, {"add_tokens": ["<call>", "zz", "<|end|>"]}, {"chat_template": "plain"}], ids=str
)
def test_the_built_in_model(settings: dict[str, Any]) -> None:
    with_tools = Example(EXAMPLES[0].messages, (TOOL,))
    light = require_same(section("surefit/nano", **settings), [with_tools, *EXAMPLES])
    assert ("zz" in light.get_vocab()) == ("add_tokens" in settings)


def test_a_tokenizer_that_adds_a_space_and_a_begin_token(sentencepiece_like: Path) -> None:
    light = require_same(section(sentencepiece_like), EXAMPLES)
    assert (light.bos_token_id, light.eos_token_id) == (1, 2)
    assert tokenize.encode_turns(light, [EXAMPLES[2]])[0][0][0][0] == 1  # type: ignore[arg-type]


def test_loading_one_leaves_the_next_alone() -> None:
    load_light_tokenizer(section("surefit/nano", add_tokens=["<call>"]))
    assert "<call>" not in load_light_tokenizer(section("surefit/nano")).get_vocab()


def test_switches_of_the_template(sentencepiece_like: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text("{% if loud %}LOUD {% endif %}" + INST_TEMPLATE)
    settings = section(sentencepiece_like, chat_template=str(template), chat_template_kwargs={"loud": True})
    light: Any = require_same(settings, EXAMPLES)
    assert "LOUD" in tokenize.conversation_segments(EXAMPLES[0], light)[0][0][0]


def test_a_template_that_refuses(sentencepiece_like: Path, tmp_path: Path) -> None:
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages|length > 2 %}{{ raise_exception('at most one question') }}{% endif %}" + INST_TEMPLATE
    )
    light: Any = load_light_tokenizer(section(sentencepiece_like, chat_template=str(template)))
    with pytest.raises(DataError, match="at most one question"):
        tokenize.encode_turns(light, [EXAMPLES[1]])


def test_a_model_without_tokenizer_json(sentencepiece_like: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(sentencepiece_like, tmp_path / "model")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError) as raised:
        load_light_tokenizer(section(folder))
    assert (raised.value.code, raised.value.path) == ("E4190", str(folder))
    assert ".[train]" in str(raised.value.help)


def test_a_hub_model_is_fetched_without_its_weights(
    sentencepiece_like: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`snapshot_download` alone is replaced: the catalogue knows the model, and no network is needed."""
    import fnmatch

    import huggingface_hub

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)

    def download(name: str, *, revision: str | None, allow_patterns: list[str], token: str | None) -> str:
        assert (name, revision) == ("Qwen/Qwen2.5-0.5B-Instruct", None)
        for file in sentencepiece_like.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in allow_patterns):
                shutil.copy2(file, tmp_path)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    settings = section("Qwen/Qwen2.5-0.5B-Instruct")
    light: Any = load_light_tokenizer(settings)
    assert tokenize.encode_turns(light, EXAMPLES[:1])
    assert not list(tmp_path.glob("*.safetensors"))
    assert json.loads((tmp_path / "config.json").read_text())
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MachineError) as raised:
        load_light_tokenizer(settings)
    assert raised.value.code == "E4191"
