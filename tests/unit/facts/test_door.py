"""What a model's files must be before a library sees them: each case once ended in an error of ours, or in none."""

from __future__ import annotations

import json
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import pytest

from surefit.core.errors import ModelError
from surefit.facts.model import catalogue, model_facts
from surefit.facts.safetensors import INDEX, read_header
from surefit.facts.tokenizer import tokenizer_facts
from surefit.facts.validate_model_files import require_sound_adapter
from surefit.nano import PATH


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(PATH, tmp_path / "model"))


def changed(path: Path, **values: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("vocab_size", 10**18),
        ("model_type", ["llama"]),
        ("architectures", "LlamaForCausalLM"),
        ("dtype", 16),
        ("torch_dtype", ["float32"]),
        ("rope_scaling", "yarn"),
        ("rope_parameters", {"rope_type": ["yarn"], "factor": 2}),
        ("rope_scaling", {"rope_type": "yarn", "factor": float("inf"), "original_max_position_embeddings": 2}),
        ("rope_theta", float("nan")),
        ("eos_token_id", "2"),
        ("eos_token_id", [2, None]),
        ("tie_word_embeddings", "yes"),
        ("layer_types", [1, 2]),
        ("sliding_window", "all"),
        ("quantization_config", ["nf4"]),
        ("text_config", [1]),
    ],
)
def test_a_value_that_no_model_has_is_refused_with_its_key(model: Path, key: str, value: Any) -> None:
    changed(model / "config.json", **{key: value})
    started = time.process_time()
    with pytest.raises(ModelError, match=key) as caught:
        model_facts(str(model))
    assert time.process_time() - started < 2
    assert caught.value.path == str(model / "config.json")


def test_every_model_of_the_catalogue_passes() -> None:
    for name in catalogue():
        assert model_facts(name).name == name


@pytest.mark.parametrize("content", ["[" * 100_000, '{"weight_map": {"a": 1}}', '{"weight_map": [1]}', "9" * 9_999])
def test_a_broken_index_is_named(model: Path, content: str) -> None:
    (model / INDEX).write_text(content)
    with pytest.raises(ModelError, match="not a valid index"):
        model_facts(str(model))


@pytest.mark.parametrize(
    "shape", ["[1e400]", "[1.5]", "[true]", "[-1]", "[1,1,1,1,1,1,1,1,1]", '"x"', "[" + "9" * 40 + "]"]
)
def test_a_shape_that_is_none_is_a_damaged_header(tmp_path: Path, shape: str) -> None:
    header = f'{{"a": {{"dtype": "F32", "shape": {shape}, "data_offsets": [0, 4]}}}}'.encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(4))
    with pytest.raises(ModelError, match="header is damaged"):
        read_header(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("part", "value", "told"),
    [
        (
            "normalizer",
            {
                "type": "Sequence",
                "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40,
            },
            "times longer",
        ),
        ("padding", {"strategy": {"Fixed": 10**9}}, "1,000,000,000 tokens long"),
        ("post_processor", {"type": "TemplateProcessing", "single": [{}] * 10_000}, "10,000 tokens long"),
    ],
)
def test_a_tokenizer_that_would_explode_is_refused(model: Path, part: str, value: Any, told: str) -> None:
    changed(model / "tokenizer.json", **{part: value})
    with pytest.raises(ModelError, match=told):
        tokenizer_facts(model)


@pytest.mark.parametrize("value", [1, ["<s>"], {"content": 7}, {"x": 1}, "x" * 2_000])
def test_a_special_token_is_a_text(model: Path, value: Any) -> None:
    changed(model / "tokenizer_config.json", eos_token=value)
    with pytest.raises(ModelError, match="eos_token is"):
        tokenizer_facts(model)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("r", "16"), ("r", 0), ("r", 10**12), ("lora_alpha", float("inf")), ("lora_alpha", None.__class__.__name__),
        ("rank_pattern", {"q_proj": -1}), ("rank_pattern", {"(": 2}), ("alpha_pattern", {"(a+)+$": 2.0}),
        ("target_modules", {"a": 1}), ("target_modules", "((x*)*)*y"),
        ("target_modules", ".*" * 15 + "Z"), ("rank_pattern", {"q.*.*.*": 4, ".*" * 12 + "Z": 4}),
        ("modules_to_save", [1]), ("use_dora", "no"),
        ("base_model_name_or_path", 7), ("trainable_token_indices", ["a"]), ("peft_type", ["LORA"]),
    ],
)  # fmt: skip
def test_an_adapter_setting_that_cannot_be_is_refused_with_its_key(key: str, value: Any) -> None:
    sound = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj"], "rank_pattern": {"q_proj": 4}}
    assert require_sound_adapter(dict(sound), "adapter_config.json") == sound
    with pytest.raises(ModelError) as caught:
        require_sound_adapter(sound | {key: value}, "adapter_config.json")
    assert key in (caught.value.field or "") + caught.value.message


def test_expressions_as_tools_write_them_are_sound() -> None:
    """Unsloth's, with four repetitions one behind the other, and ranks by layer."""
    parts = "(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?(?:k_proj|v_proj|q_proj|o_proj|up_proj)"
    written = rf"(?:.*?(?:language|text).*?{parts}.*?)|(?:\bmodel\.layers\.[\d]{{1,}}\.{parts})"
    ranks = {rf".*\.layers\.({n}|{n}\d+)\..*_proj.*": 8 for n in range(200)}
    settings = {"target_modules": written, "rank_pattern": ranks}
    assert require_sound_adapter(settings, "adapter_config.json") is settings
